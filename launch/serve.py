"""Serves a policy: gRPC for trainers and JetStream's clients, OpenAI's HTTP API for people.

  python launch/serve.py --config=configs/tiny.py                            # the base policy
  python launch/serve.py --config=configs/tiny.py --checkpoint=runs/tiny     # what a run has learnt
  python launch/serve.py --config=configs/smollm2_135m.py --hf=trained       # a folder

Others than this machine are served with --host, and then with --tls_cert, --tls_key and
--token_file. docs/serving.md says more.
"""

import os

from absl import flags

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.config.flags import run_app

FLAGS = flags.FLAGS
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Workdir of a run (its newest actor), one checkpoint, or orbax weights."
)
_HF = flags.DEFINE_string("hf", None, "Hugging Face folder, its tokenizer included.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; 0.0.0.0 for all.")
_PORT = flags.DEFINE_integer("port", 9000, "gRPC.", lower_bound=0, upper_bound=65535)
_HTTP = flags.DEFINE_integer("http_port", 8000, "HTTP; 0: none.", 0, 65535)
_METRICS = flags.DEFINE_integer("metrics_port", 0, "Prometheus, plain HTTP; 0: none.", 0, 65535)
_METRICS_HOST = flags.DEFINE_string("metrics_host", "127.0.0.1", "For --metrics_port.")
_CERT = flags.DEFINE_string("tls_cert", None, "PEM file: the certificate and its chain.")
_KEY = flags.DEFINE_string("tls_key", None, "PEM file: the certificate's private key.")
_TOKEN = flags.DEFINE_string("token_file", None, "File with the token that clients must send.")
_ROOT = flags.DEFINE_string("weights_root", None, "Folder that updates by path come from.")
_PENDING = flags.DEFINE_integer("max_pending", 4096, "Responses that may wait for a slot.", 1)
_PROMPT = flags.DEFINE_integer("max_prompt_tokens", 0, "Of a request; 0: the task's.", 0)
_RESPONSE = flags.DEFINE_integer("max_response_tokens", 0, "Of a request; 0: the config's.", 0)
_INSECURE = flags.DEFINE_bool("insecure", False, "Serve others without TLS and token.")


def main(_: list[str]) -> None:
    config = from_config_dict(FLAGS.config)
    # Not above: a typo is told before flax and orbax are loaded.
    from s3ac_jax.train.serve import Wanted, serve

    serve(
        config,
        Wanted(
            checkpoint=_CHECKPOINT.value, hf=_HF.value, host=_HOST.value, port=_PORT.value,
            http_port=_HTTP.value, metrics_host=_METRICS_HOST.value, metrics_port=_METRICS.value,
            tls_cert=_CERT.value, tls_key=_KEY.value, token_file=_TOKEN.value,
            weights_root=_ROOT.value, max_pending=_PENDING.value,
            insecure=_INSECURE.value, max_prompt_tokens=_PROMPT.value,
            max_response_tokens=_RESPONSE.value,
        ),
    )  # fmt: skip
    # Or the interpreter goes through all of jax's objects on its way out, half a second, and waits
    # for a checkpoint that is still being read.
    os._exit(0)


if __name__ == "__main__":
    run_app(main, ("config",))
