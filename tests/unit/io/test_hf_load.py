"""Weights from golden tensors: values by transposes spelled out, dtypes, shares of devices."""

import dataclasses
import functools
import subprocess
import sys
import weakref
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io import hf_save
from s3ac_jax.io.hf_config import HfError
from s3ac_jax.io.hf_files import Folder
from s3ac_jax.io.hf_layout import FLOAT32
from s3ac_jax.io.hf_weights import (
    load,
    load_params,
    read_origin,
    read_spec,
    save_params,
)
from s3ac_jax.models.network import actor_network
from s3ac_jax.models.spec import LoraSpec
from s3ac_jax.parallel import mesh as parallel
from tests.unit.io.hf_folders import (
    FAMILIES,
    GOLDEN,
    golden,
    golden_config,
    loaded,
    quiet,
    same_tensors,
    tensors_of,
)

MOE = ("qwen3_moe", "qwen3_5_moe", "qwen3_5_moe_vl")


def text_of(family):
    """Tensors of the text model, under the names of a text-only folder."""
    found = {}
    for name, value in golden(family).items():
        if not name.startswith(("model.visual.", "mtp.")):
            found[name.replace("model.language_model.", "model.")] = value
    return found


def spelled_out(family):
    """Our weights from the tensors, by numpy alone."""
    config = golden_config(family)
    config = config.get("text_config", config)
    t = {name: value.astype(np.float32) for name, value in text_of(family).items()}
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", width // heads)
    every, kinds = range(layers), config.get("layer_types") or ["full_attention"] * layers
    attends = [n for n in every if kinds[n] == "full_attention"]
    linear = [n for n in every if kinds[n] == "linear_attention"]
    want = {"embed": t["model.embed_tokens.weight"], "final_norm": t["model.norm.weight"]}
    if not config["tie_word_embeddings"]:
        want["lm_head"] = t["lm_head.weight"].T

    def stack(numbers, name, change=lambda x: x):
        return np.stack([change(t[f"model.layers.{n}.{name}"]) for n in numbers])

    def put(leaf, values):
        want[f"layers/{leaf}"] = values

    put("attn_norm", stack(every, "input_layernorm.weight"))
    put("mlp_norm", stack(every, "post_attention_layernorm.weight"))
    if linear:
        both = stack(attends, "self_attn.q_proj.weight", lambda w: w.reshape(heads, 2, dim, width))
        put("attn/q", both[:, :, 0].transpose(0, 3, 1, 2))
        put("attn/gate", both[:, :, 1].transpose(0, 3, 1, 2))
    else:
        put("attn/q", stack(attends, "self_attn.q_proj.weight",
                            lambda w: w.T.reshape(width, heads, dim)))  # fmt: skip
    for leaf in "kv":
        put(f"attn/{leaf}", stack(attends, f"self_attn.{leaf}_proj.weight",
                                  lambda w: w.T.reshape(width, kv, dim)))  # fmt: skip
    put("attn/o", stack(attends, "self_attn.o_proj.weight",
                        lambda w: w.T.reshape(heads, dim, width)))  # fmt: skip
    if family == "qwen2_tied":
        for leaf, count in (("q", heads), ("k", kv), ("v", kv)):
            biases = stack(attends, f"self_attn.{leaf}_proj.bias")
            put(f"attn/{leaf}_bias", biases.reshape(-1, count, dim))
    else:
        for leaf in ("q_norm", "k_norm"):
            put(f"attn/{leaf}", stack(attends, f"self_attn.{leaf}.weight"))
    if linear:
        spell_out_linear(config, functools.partial(stack, linear), put)
    if family not in MOE:
        for leaf in ("gate", "up", "down"):
            put(f"mlp/{leaf}", stack(every, f"mlp.{leaf}_proj.weight", np.transpose))
        return want
    put("moe/router", stack(every, "mlp.gate.weight", np.transpose))
    experts = range(config.get("num_experts") or config["num_local_experts"])
    if family == "qwen3_5_moe_vl":
        half = config["moe_intermediate_size"]
        both = stack(every, "mlp.experts.gate_up_proj")
        put("moe/gate", both[:, :, :half].transpose(0, 1, 3, 2))
        put("moe/up", both[:, :, half:].transpose(0, 1, 3, 2))
        put("moe/down", stack(every, "mlp.experts.down_proj").transpose(0, 1, 3, 2))
    else:
        for leaf in ("gate", "up", "down"):
            names = [f"mlp.experts.{e}.{leaf}_proj.weight" for e in experts]
            put(f"moe/{leaf}", np.stack([stack(every, n, np.transpose) for n in names], axis=1))
    if linear:
        for leaf in ("gate", "up", "down"):
            put(f"moe/shared/{leaf}",
                stack(every, f"mlp.shared_expert.{leaf}_proj.weight", np.transpose))  # fmt: skip
        put("moe/shared_gate", stack(every, "mlp.shared_expert_gate.weight", lambda w: w[0]))
    return want


def spell_out_linear(config, stack, put):
    width = config["hidden_size"]
    keys = (config["linear_num_key_heads"], config["linear_key_head_dim"])
    values = (config["linear_num_value_heads"], config["linear_value_head_dim"])
    count = keys[0] * keys[1]
    rows = {"q": slice(0, count), "k": slice(count, 2 * count), "v": slice(2 * count, None)}
    for leaf, size in (("q", keys), ("k", keys), ("v", values)):
        put(f"linear_attn/{leaf}", stack("linear_attn.in_proj_qkv.weight",
            lambda w, r=rows[leaf], size=size: w[r].T.reshape(width, *size)))  # fmt: skip
        put(f"linear_attn/conv_{leaf}", stack("linear_attn.conv1d.weight",
            lambda w, r=rows[leaf], size=size: w[r, 0].T.reshape(-1, *size)))  # fmt: skip
    put("linear_attn/z", stack("linear_attn.in_proj_z.weight",
                               lambda w: w.T.reshape(width, *values)))  # fmt: skip
    for leaf in "ba":
        put(f"linear_attn/{leaf}", stack(f"linear_attn.in_proj_{leaf}.weight", np.transpose))
    for leaf in ("dt_bias", "A_log"):
        put(f"linear_attn/{leaf}", stack(f"linear_attn.{leaf}"))
    put("linear_attn/norm", stack("linear_attn.norm.weight"))
    put("linear_attn/out", stack("linear_attn.out_proj.weight",
                                 lambda w: w.T.reshape(*values, width)))  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_where_it_belongs(family):
    got, want = loaded(family), spelled_out(family)
    abstract = named_leaves(actor_network(read_spec(GOLDEN / family)).abstract)
    assert got.keys() == want.keys() == abstract.keys()
    for name, leaf in got.items():
        assert (leaf.shape, leaf.dtype) == (abstract[name].shape, np.float32)
        np.testing.assert_array_equal(leaf, want[name], err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes_of_weights(family, tmp_path):
    spec = read_spec(GOLDEN / family)
    params = load_params(GOLDEN / family, spec, dtype=jnp.bfloat16, **quiet)
    want = spelled_out(family)
    for name, leaf in named_leaves(params).items():
        dtype = np.float32 if name in FLOAT32 else ml_dtypes.bfloat16
        assert leaf.dtype == dtype, name
        np.testing.assert_array_equal(leaf, want[name].astype(dtype), err_msg=name)
    assert all(name in want for name in FLOAT32 if name.startswith("layers/linear") and
               spec.linear_attention)  # fmt: skip
    model = load(GOLDEN / family, dtype=jnp.bfloat16, **quiet)
    assert model.spec == dataclasses.replace(spec, dtype="bfloat16")
    with pytest.raises(HfError, match="dtype must be float32 or bfloat16, got float16"):
        load(GOLDEN / family, dtype=jnp.float16)


def test_a_dtype_that_is_none(tmp_path):
    for read in (load, lambda *args, **kw: load_params(*args, read_spec(GOLDEN / "qwen3"), **kw)):
        with pytest.raises(HfError, match="dtype must be float32 or bfloat16, got 'nonsense'"):
            read(GOLDEN / "qwen3", dtype="nonsense")
    assert load(GOLDEN / "qwen3", dtype=None).spec.dtype == "float32"
    params = load_params(GOLDEN / "qwen3", read_spec(GOLDEN / "qwen3"), dtype=None)
    assert {leaf.dtype for leaf in named_leaves(params).values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3_5"])
def test_weights_under_adapters_have_the_networks_dtypes(family):
    """What adapters lie beside is in bfloat16; norms, biases and convolutions in float32."""
    spec = dataclasses.replace(read_spec(GOLDEN / family), lora=LoraSpec(2, 4.0))
    params = named_leaves(load_params(GOLDEN / family, actor_network(spec)))
    exact = [
        name
        for name in params
        if "norm" in name or "bias" in name or "conv" in name or name.endswith("A_log")
    ]
    assert len(exact) >= 6
    for name, leaf in params.items():
        assert leaf.dtype == (jnp.float32 if name in exact else jnp.bfloat16), name
        np.testing.assert_array_equal(leaf, loaded(family)[name].astype(leaf.dtype), err_msg=name)
    said = load_params(GOLDEN / family, actor_network(spec), dtype=jnp.float32)
    assert {leaf.dtype for leaf in named_leaves(said).values()} == {np.dtype(np.float32)}


# ---- shares of devices


@pytest.mark.parametrize("family", FAMILIES)
def test_each_device_gets_its_share(family):
    network = actor_network(read_spec(GOLDEN / family))
    for sizes in ({"fsdp": 2, "tensor": 2}, {"data": 2, "tensor": 2}, {"expert": 4}):
        mesh = parallel.make_mesh(parallel.MeshSpec(**sizes))
        places = parallel.shardings(network.axes, network.abstract, mesh)
        params = load_params(GOLDEN / family, network, shardings=places, **quiet)
        for name, leaf in named_leaves(params).items():
            assert leaf.sharding.is_equivalent_to(named_leaves(places)[name], leaf.ndim)
            np.testing.assert_array_equal(leaf, loaded(family)[name], err_msg=name)


def test_a_device_reads_only_its_rows(monkeypatch):
    read, whole = {}, Folder.read

    def counted(folder, name, spans=None):
        values = whole(folder, name, spans)
        read[name] = read.get(name, 0) + values.size
        return values

    monkeypatch.setattr(Folder, "read", counted)
    network = actor_network(read_spec(GOLDEN / "qwen3_5_moe"))
    mesh = parallel.make_mesh(parallel.MeshSpec(data=2, tensor=2))
    places = parallel.shardings(network.axes, network.abstract, mesh)
    load_params(GOLDEN / "qwen3_5_moe", network, shardings=places)
    for name, values in golden("qwen3_5_moe").items():
        # Four devices in two shares: each share once. The interleaved gate comes with the query.
        most = values.size * (2 if name.endswith("q_proj.weight") else 1)
        assert read[name] <= most, name


def test_a_sharded_model_is_saved(tmp_path):
    network = actor_network(read_spec(GOLDEN / "qwen3_5_moe"))
    mesh = parallel.make_mesh(parallel.MeshSpec(fsdp=2, tensor=2))
    places = parallel.shardings(network.axes, network.abstract, mesh)
    params = load_params(GOLDEN / "qwen3_5_moe", network, shardings=places)
    origin = read_origin(GOLDEN / "qwen3_5_moe")
    save_params(params, network.spec, origin, tmp_path / "out")
    same_tensors(tensors_of(tmp_path / "out"), golden("qwen3_5_moe"))
    with pytest.raises(HfError, match="shardings have no place for embed"):
        load_params(GOLDEN / "qwen3_5_moe", network, shardings={"layers": places["layers"]})


# ---- memory


class Alive:
    """Bytes of arrays that somebody still refers to, and the most there were at once."""

    def __init__(self):
        self.now = self.most = self.total = 0

    def watch(self, function):
        def watched(*args):
            array = function(*args)
            self.total += array.nbytes
            self.now += array.nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(array, self.drop, array.nbytes)
            return array

        return watched

    def drop(self, num_bytes):
        self.now -= num_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_one_tensor_at_a_time_is_on_the_host(family, tmp_path, monkeypatch):
    read, fetched = Alive(), Alive()
    monkeypatch.setattr(Folder, "read", read.watch(Folder.read))
    monkeypatch.setattr(hf_save, "_fetched", fetched.watch(hf_save._fetched))
    spec = read_spec(GOLDEN / family)
    params = load_params(GOLDEN / family, spec, **quiet)
    save_params(params, spec, read_origin(GOLDEN / family), tmp_path / "out", **quiet)
    largest = max(value.nbytes for value in golden(family).values())
    for seen in (read, fetched):
        # The one before may live until the next has taken its place.
        assert seen.most <= 2 * largest
        assert seen.total > 6 * largest


MEASURE = """
import json, pathlib, sys
import jax, jax.numpy as jnp, numpy as np, safetensors.numpy
from s3ac_jax.io.hf_config import hf_from_spec
from s3ac_jax.io.hf_layout import tensors
from s3ac_jax.io.hf_weights import load_params
from s3ac_jax.models.spec import DecoderSpec

def megabytes(what):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024

folder, layers = pathlib.Path(sys.argv[1]), int(sys.argv[2])
spec = DecoderSpec(128, 512, layers, 4, 4, 16, 8192)
if sys.argv[3] == "make":
    (folder / "config.json").write_text(json.dumps(hf_from_spec(spec)))
    made = {t.name: np.ones(t.shape, np.float32) for t in tensors(spec)}
    safetensors.numpy.save_file(made, folder / "model.safetensors")
else:
    jnp.zeros(3).block_until_ready()
    before = megabytes("VmRSS")
    params = load_params(folder, spec)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 2**20
    print(weights, megabytes("VmHWM") - before - weights)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_peak_does_not_grow_with_the_checkpoint(tmp_path):
    measured = []
    for layers in (2, 14):
        for what in ("make", "load"):
            command = [sys.executable, "-c", MEASURE, str(tmp_path), str(layers), what]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        measured.append(tuple(map(float, done.stdout.split())))
    (small, over_small), (large, over_large) = measured
    assert large - small > 500
    # Compilers and allocators take their share once; a second copy of the weights would be 500.
    assert over_large - over_small < 200
