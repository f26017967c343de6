"""The door to JetStream: what the wheel must be like, and what importing it must not do."""

import importlib.metadata
import inspect
import subprocess
import sys

import pytest

pytest.importorskip("jetstream", reason="needs google-jetstream 0.2.2")

import jax.numpy as jnp

from s3ac_jax.rollout.jetstream import (
    VERSION,
    engine_api,
    orchestrator,
    server_lib,
    token_utils,
    tokenizer_api,
)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_the_wheel_is_the_one_we_know():
    assert importlib.metadata.version("google-jetstream") == VERSION == "0.2.2"


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (orchestrator.Driver, "__init__", "prefill_engines generate_engines prefill_params "
         "generate_params interleaved_mode jax_padding metrics_collector is_ray_backend"),
        (orchestrator.Driver, "_prefill_thread", "idx"),
        (orchestrator.Driver, "_transfer_thread", "idx"),
        (orchestrator.Driver, "_generate_thread", "idx"),
        (orchestrator.Driver, "_detokenize_thread", "idx"),
        (orchestrator.Driver, "_process_prefill_content", "request tokenizer is_bos "
         "max_prefill_length"),
        (orchestrator.Driver, "place_request_on_prefill_queue", "request"),
        (orchestrator.Driver, "stop", ""),
        (server_lib.JetStreamServer, "__init__", "driver threads port credentials"),
        (server_lib.JetStreamServer, "_async_start", ""),
        (server_lib.JetStreamServer, "_async_stop", ""),
        (server_lib.JetStreamServer, "start", ""),
        (server_lib.JetStreamServer, "stop", ""),
        (server_lib.JetStreamServer, "wait_for_termination", ""),
        (engine_api.Engine, "prefill", "params existing_prefix padded_tokens true_length"),
        (engine_api.Engine, "insert", "prefix decode_state slot"),
        (engine_api.Engine, "generate", "params decode_state"),
        (engine_api.Engine, "init_decode_state", "args kwargs"),
        (engine_api.Engine, "get_tokenizer", ""),
        (engine_api.Engine, "build_tokenizer", "metadata"),
        (tokenizer_api.Tokenizer, "encode", "s kwargs"),
        (tokenizer_api.Tokenizer, "decode", "token_ids kwargs"),
    ],
)  # fmt: skip
def test_methods_we_override_or_call(owner, name, parameters):
    found = inspect.signature(vars(owner)[name]).parameters
    assert [parameter for parameter in found if parameter != "self"] == parameters.split()


def test_attributes_we_rely_on():
    driver = inspect.getsource(orchestrator.Driver)
    for name in ("_prefill_backlog", "_detokenize_backlogs", "_all_threads", "live"):
        assert f"self.{name} = " in driver
    server = inspect.getsource(server_lib.JetStreamServer)
    for name in ("_executor", "_loop", "_loop_thread", "_grpc_server", "_driver"):
        assert f"self.{name}" in server
    assert set(orchestrator.ActiveRequest.__dataclass_fields__) >= {
        "max_tokens", "return_channel", "prefill_result", "prefill_content",
    }  # fmt: skip
    assert list(engine_api.ResultTokens.__dataclass_fields__) == [
        "data", "tokens_idx", "valid_idx", "length_idx", "samples_per_slot",
    ]  # fmt: skip
    assert callable(token_utils.pad_tokens)


def test_a_driver_deletes_prefixes_without_jax_tree_map():
    array = jnp.ones(3)
    orchestrator.delete_pytree({"a": array, "b": (1, None)})
    assert array.is_deleted()


def test_importing_the_server_is_quiet_and_light():
    done = run(
        "import logging, sys\n"
        "root = logging.getLogger()\n"
        "mine = logging.NullHandler()\n"
        "root.addHandler(mine)\n"
        "root.setLevel(37)\n"
        "import s3ac_jax.rollout.server.grpc_server\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('tensorflow', 'seqio', 't5')]\n"
        "assert heavy == [], heavy\n"
        "assert root.level == 37 and root.handlers == [mine], (root.level, root.handlers)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_seqio_that_is_there_is_left_alone():
    done = run(
        "import sys, types\n"
        "seqio, vocabularies = types.ModuleType('seqio'), types.ModuleType('seqio.vocabularies')\n"
        "seqio.vocabularies = vocabularies\n"
        "vocabularies.Vocabulary = vocabularies.SentencePieceVocabulary = type('V', (), {})\n"
        "sys.modules.update({'seqio': seqio, 'seqio.vocabularies': vocabularies})\n"
        "from s3ac_jax.rollout.jetstream import token_utils\n"
        "assert sys.modules['seqio'] is seqio\n"
        "assert token_utils.Vocabulary is vocabularies.Vocabulary\n"
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_without_jetstream_it_says_what_to_install():
    done = run(
        "import sys\n"
        "sys.modules['jetstream'] = None\n"
        "from s3ac_jax.core.errors import RunError\n"
        "try:\n"
        "    import s3ac_jax.rollout.jetstream\n"
        "except RunError as error:\n"
        "    print(error)\n"
    )
    assert "pip install --no-deps google-jetstream==0.2.2" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    "module", ["client.remote", "weights_wire", "wire", "server.sinks", "local"]
)
def test_clients_need_no_jetstream(module):
    done = run(f"import sys\nsys.modules['jetstream'] = None\nimport s3ac_jax.rollout.{module}\n")
    assert (done.returncode, done.stderr) == (0, "")
