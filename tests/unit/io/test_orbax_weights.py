"""Weights alone in an orbax folder, and one role of a run's checkpoint."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import Learner
from s3ac_jax.io.checkpoint import CheckpointError, Checkpoints
from s3ac_jax.io.hf_origin import Origin
from s3ac_jax.io.orbax_weights import load_orbax, load_role, save_orbax, spec_from_dict
from s3ac_jax.models.spec import DecoderSpec, LinearAttentionSpec, LoraSpec, MoeSpec

SPEC = DecoderSpec(
    50, 32, 3, 4, 2, 16, 64, full_attention=(1,), zero_centred_norms=True,
    moe=MoeSpec(8, 3, 16, dense_layers=(0, 2)), linear_attention=LinearAttentionSpec(2, 4, 8, 6),
    lora=LoraSpec(4, 8.0, ("attn",)),
)  # fmt: skip
PARAMS = {
    "embed": jnp.arange(6.0).reshape(2, 3),
    "layers": {"mlp": {"up": jnp.array([1.5, -2.0], jnp.bfloat16)}},
}
ORIGIN = Origin("/there", "{}", (("", "BF16"),), skipped=(("mtp", 4),))


def same(got, want):
    got, want = named_leaves(got), named_leaves(want)
    assert got.keys() == want.keys()
    for name, leaf in got.items():
        assert isinstance(leaf, np.ndarray)
        assert leaf.dtype == want[name].dtype
        np.testing.assert_array_equal(leaf, want[name])


def test_a_spec_goes_through_json():
    for spec in (SPEC, DecoderSpec(50, 32, 3, 4, 2, 16, 64)):
        text = json.dumps(dataclasses.asdict(spec))
        assert spec_from_dict(json.loads(text), "here") == spec


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"heads": 3}, "unexpected keyword argument 'heads'"),
        ({"moe": 3}, "here doesn't describe a model"),
        ({"num_heads": 3}, "num_heads .3. must be a multiple"),
        ({"vocab_size": "many"}, "here doesn't describe a model"),
    ],
)
def test_what_describes_no_model(changes, line):
    with pytest.raises(CheckpointError, match=line) as caught:
        spec_from_dict(dataclasses.asdict(SPEC) | changes, "here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("origin", [ORIGIN, None])
def test_weights_come_back_with_what_they_are(tmp_path, origin):
    save_orbax(PARAMS, SPEC, origin, tmp_path / "w")
    params, spec, again = load_orbax(tmp_path / "w")
    assert (spec, again) == (SPEC, origin)
    same(params, PARAMS)


def test_where_they_can_be_saved(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match="isn't an empty folder; name a new one"):
            save_orbax(PARAMS, SPEC, None, place)
    (tmp_path / "empty").mkdir()
    save_orbax(PARAMS, SPEC, None, tmp_path / "empty")


@pytest.fixture
def run(tmp_path):
    """Checkpoints of steps 2 and 4, as a run writes them: two roles, a part of one frozen."""
    tx = optax.adamw(1e-3)
    up = {"mlp": {"up": jnp.arange(8.0).reshape(2, 4)}}
    norm = {"final_norm": jnp.ones(3)}
    actor = Learner({**up, **norm}, {}, tx.init({**up, **norm}), jnp.int32(3))
    half = {"backbone": up, "value_head": jnp.arange(3.0)}
    critic = Learner(half, {"backbone": norm}, tx.init(half), jnp.int32(3))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (2, 4):
        state = {"actor": actor, "critic": critic, "tick": jnp.int32(step)}
        checkpoints.save(step, jax.tree.map(lambda x, s=step: x * s, state), {"step": step})
    checkpoints.close()
    return tmp_path / "checkpoints"


def test_one_role_of_a_run_without_its_optimiser(run):
    actor, step = load_role(run, "actor")
    assert step == 4
    same(actor, {"mlp": {"up": 4 * jnp.arange(8.0).reshape(2, 4)}, "final_norm": 4 * jnp.ones(3)})
    critic, step = load_role(run, "critic", 2)
    assert step == 2
    backbone = {"mlp": {"up": 2 * jnp.arange(8.0).reshape(2, 4)}, "final_norm": 2 * jnp.ones(3)}
    same(critic, {"backbone": backbone, "value_head": 2 * jnp.arange(3.0)})


def test_what_is_not_there_is_named(run, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 3 \(it has 2, 4\)"):
        load_role(run, "actor", 3)
    with pytest.raises(CheckpointError, match="4 has no judge/trainable/ or judge/frozen/"):
        load_role(run, "judge")
    with pytest.raises(CheckpointError, match="absent has no checkpoint that was written to the"):
        load_role(tmp_path / "absent", "actor")
    with pytest.raises(CheckpointError, match=r"absent holds no weights that launch/convert.py wr"):
        load_orbax(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="holds a run's checkpoints; name the run with --wo"):
        load_orbax(run)


def test_damage_is_told_when_a_part_is_read(run):
    files = [path for path in (run / "4").rglob("*") if path.is_file() and path.stat().st_size > 99]
    for file in files:
        if file.name != "files.json":
            content = bytearray(file.read_bytes())
            content[50] ^= 1
            file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged .* falls back to step 2"):
        load_role(run, "actor")
