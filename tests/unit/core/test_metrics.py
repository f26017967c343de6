"""Metrics fold in any grouping and are divided once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.core.metrics import Max, Mean, Min, finalize, identity, merge


def of(x, mask=None):
    return {"mean": Mean.of(x, mask), "deep": {"max": Max.of(x, mask), "min": Min.of(x, mask)}}


def test_trap_6_sums_10_of_10_and_2_of_1_are_12_of_11():
    tokens = np.concatenate([np.ones(10), [2.0]])
    want = 12 / 11
    for cut in range(12):
        split = merge(Mean.of(tokens[:cut]), Mean.of(tokens[cut:]))
        np.testing.assert_allclose(finalize(split), want, rtol=1e-7)
    mean_of_means = (1.0 + 2.0) / 2
    assert abs(finalize(split) - mean_of_means) > 0.4


@pytest.mark.parametrize(("parts", "seed"), [(1, 0), (3, 1), (7, 2)])
def test_any_split_gives_the_whole(parts, seed):
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(size=(40, 3)), rng.random((40, 3)) < 0.5
    x = np.where(mask, x, np.nan)
    folded = identity(of(x, mask))
    for rows in np.split(rng.permutation(40), sorted(rng.integers(0, 41, parts - 1))):
        folded = merge(folded, of(x[rows], mask[rows]))
    got = finalize(folded)
    np.testing.assert_allclose(got["mean"], np.mean(x[mask]), rtol=1e-5)
    np.testing.assert_allclose(got["deep"]["max"], np.max(x[mask]), rtol=1e-6)
    np.testing.assert_allclose(got["deep"]["min"], np.min(x[mask]), rtol=1e-6)


def test_monoid_laws():
    a, b, c = (of(np.array(x)) for x in ([1.0, 5.0], [2.0], [-3.0, 0.5, 4.0]))
    assert finalize(merge(merge(a, b), c)) == finalize(merge(a, merge(b, c)))
    assert finalize(merge(a, b)) == finalize(merge(b, a))
    assert finalize(merge(a, identity(a))) == finalize(a) == finalize(merge(identity(a), a))


def test_nothing_is_not_available():
    got = finalize(of(np.array([1.0]), np.array([False])))
    values = [got["mean"], got["deep"]["max"], got["deep"]["min"]]
    assert all(type(v) is float and math.isnan(v) for v in values)


def test_results_are_python_floats_and_broken_terms_show():
    assert finalize(Mean.of(np.array([1, 2]))) == 1.5
    assert type(finalize(Max.of(3))) is float
    broken = merge(Max.of(np.array([1.0])), Max.of(np.array([np.nan])))
    assert math.isnan(finalize(broken))
    assert math.isnan(finalize(Mean.of(np.array([np.nan, 1]))))


def test_merge_of_dicts_and_kinds():
    joined = merge({"a": Mean.of(1.0)}, {"b": Max.of(2.0)})
    assert finalize(joined) == {"a": 1.0, "b": 2.0}
    with pytest.raises(TypeError, match="merge"):
        merge({"a": Mean.of(1.0)}, {"a": Max.of(1.0)})


def test_identity_is_a_scan_carry():
    x = jnp.arange(12.0).reshape(4, 3)
    start = identity(jax.eval_shape(of, x[0]))

    def body(carry, row):
        return merge(carry, of(row)), None

    folded, _ = jax.jit(lambda start, x: jax.lax.scan(body, start, x))(start, x)
    assert finalize(folded) == {"mean": 5.5, "deep": {"max": 11.0, "min": 0.0}}
