"""Names, norms, health, fingerprints, splitting."""

import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.core.metrics import Mean
from s3ac_jax.core.trees import (
    all_finite,
    combine,
    fingerprint,
    first_nonfinite,
    global_norm,
    named_leaves,
    nest,
    partition,
    squared_norm,
)


def weights(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.normal(size=(5, 4)).astype(np.float32),
        "layers": {
            "attention": {"q": rng.normal(size=(2, 4, 4)).astype(np.float32)},
            "mlp": {"up": jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.bfloat16)},
        },
        "steps": np.arange(3),
    }


def test_names():
    names = list(named_leaves(weights()))
    assert names == ["embed", "layers/attention/q", "layers/mlp/up", "steps"]
    assert list(named_leaves({"a": [1, Mean.of(1.0)]})) == ["a/0", "a/1/total", "a/1/weight"]


def test_nest_undoes_names():
    tree = weights()
    again = nest(named_leaves(tree))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert all(map(operator.is_, jax.tree.leaves(again), jax.tree.leaves(tree)))


def test_norms():
    tree = weights()
    leaves = [np.asarray(leaf, np.float64) for leaf in named_leaves(tree).values()]
    want = sum(float(np.sum(leaf**2)) for leaf in leaves)
    np.testing.assert_allclose(squared_norm(tree), want, rtol=1e-5)
    np.testing.assert_allclose(global_norm(tree), want**0.5, rtol=1e-5)
    assert squared_norm({}) == 0.0
    # In bf16 the sum would stop at 256.
    ones = {"w": jnp.ones(4096, jnp.bfloat16)}
    assert squared_norm(ones) == 4096.0
    assert squared_norm(ones).dtype == jnp.float32


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_health(poison):
    tree = weights()
    assert first_nonfinite(tree) is None
    assert jax.jit(all_finite)(tree)
    tree["layers"]["mlp"]["up"] = tree["layers"]["mlp"]["up"].at[1, 2, 0].set(poison)
    assert first_nonfinite(tree) == "layers/mlp/up"
    assert not jax.jit(all_finite)(tree)
    assert all_finite({"steps": np.arange(3)})
    assert all_finite({})
    assert first_nonfinite({}) is None


def test_fingerprint_is_the_same_in_graph_on_host_and_for_copies():
    tree = weights()
    want = int(fingerprint(tree))
    assert int(jax.jit(fingerprint)(tree)) == want
    assert int(fingerprint(jax.tree.map(np.array, tree))) == want
    assert int(fingerprint(dict(reversed(tree.items())))) == want


def test_fingerprint_sees_every_kind_of_change():
    base = {"a": np.arange(1, 1025, dtype=np.float32), "b": np.zeros((2, 3), np.float32)}
    swapped = base["a"].copy()
    # Powers of two at a distance of 256: linear checksums with index weights forgive this swap.
    swapped[[0, 255]] = swapped[[255, 0]]
    flipped = base["a"].copy()
    flipped.view(np.uint32)[7] ^= 1
    minus_zero = base["b"].copy()
    minus_zero[1, 2] = -0.0
    trees = [
        base,
        {**base, "a": swapped},
        {**base, "a": flipped},
        {**base, "a": np.roll(base["a"], 1)},
        {**base, "b": minus_zero},
        {**base, "b": base["b"].T.copy()},
        {**base, "b": base["b"].astype(np.int32)},
        {**base, "b": jnp.asarray(base["b"], jnp.bfloat16)},
        {"a": base["a"]},
        {"a": base["b"], "b": base["a"]},
        {"a": base["a"], "c": base["b"]},
        {},
    ]
    prints = [int(fingerprint(tree)) for tree in trees]
    assert len(set(prints)) == len(prints)


def test_fingerprint_tells_permutations_apart():
    rows = np.array([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0], [64.0, 128.0]], np.float32)
    prints = {
        int(fingerprint({"w": rows[list(order)]})) for order in itertools.permutations(range(4))
    }
    assert len(prints) == 24


def test_fingerprint_of_other_dtypes():
    for dtype in (bool, np.int8, np.float16, jnp.bfloat16, jnp.float8_e4m3fn, np.uint32):
        x = jnp.asarray([0, 1, 1, 0], dtype)
        assert int(fingerprint({"w": x})) != int(fingerprint({"w": x[::-1].at[0].set(x[1])}))


def test_partition_has_no_place_for_the_other_part():
    tree = weights()
    frozen, rest = partition(tree, lambda name: "attention" in name)
    assert list(named_leaves(frozen)) == ["layers/attention/q"]
    assert list(named_leaves(rest)) == ["embed", "layers/mlp/up", "steps"]
    assert "attention" not in rest["layers"]
    assert "mlp" not in frozen["layers"]
    for joined in (combine(frozen, rest), combine(rest, frozen)):
        assert jax.tree.structure(joined) == jax.tree.structure(tree)
        assert int(fingerprint(joined)) == int(fingerprint(tree))


def test_partition_keeps_frozen_leaves_out_of_gradients():
    tree = {"a": {"w": jnp.ones(2), "b": jnp.ones(2)}, "c": jnp.ones(2)}
    trainable, frozen = partition(tree, lambda name: name != "a/b")

    def loss(trainable):
        return squared_norm(combine(trainable, frozen))

    assert list(named_leaves(jax.grad(loss)(trainable))) == ["a/w", "c"]


def test_partition_limits_and_errors():
    tree = weights()
    everything, nothing = partition(tree, lambda name: True)
    assert nothing == {}
    assert list(everything) == list(tree)
    with pytest.raises(ValueError, match="embed"):
        combine(tree, {"embed": 1})
    with pytest.raises(ValueError, match="layers"):
        combine(tree, {"layers": 1})
    with pytest.raises(TypeError, match="layers"):
        partition({"layers": [1, 2]}, lambda name: True)
    with pytest.raises(TypeError, match="list"):
        partition([1, 2], lambda name: True)
