"""The overlong penalty: a loop, its corners, and integers on either side of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos.shaping import soft_overlong_penalty


def oracle(length, longest, buffer):
    """DAPO's three cases, as printed."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0


@pytest.mark.parametrize(("longest", "buffer"), [(20480, 4096), (100, 100), (7, 1), (64, 27)])
def test_oracle_and_permutation(longest, buffer):
    rng = np.random.default_rng(longest)
    lengths = rng.integers(0, longest + longest // 4, (5, 40))
    got = np.asarray(soft_overlong_penalty(lengths, max_tokens=longest, buffer_tokens=buffer))
    want = [[oracle(int(n), longest, buffer) for n in row] for row in lengths]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    order = rng.permutation(5)
    moved = soft_overlong_penalty(lengths[order], max_tokens=longest, buffer_tokens=buffer)
    np.testing.assert_array_equal(moved, got[order])


def test_corners():
    lengths = np.array([0, 60, 61, 80, 99, 100, 101, 10**6])
    got = soft_overlong_penalty(lengths, max_tokens=100, buffer_tokens=40)
    want = [0.0, 0.0, -1 / 40, -0.5, -39 / 40, -1.0, -1.0, -1.0]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    # A buffer as long as the limit: every token costs.
    got = soft_overlong_penalty(np.arange(5), max_tokens=4, buffer_tokens=4)
    np.testing.assert_array_equal(got, [0.0, -0.25, -0.5, -0.75, -1.0])


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint16, np.uint32, np.float32])
def test_trap_5_is_float_for_every_length_type(dtype):
    # Unsigned differences would wrap around; an integer result would be 0.
    lengths = np.array([10, 737, 2000], dtype)
    got = soft_overlong_penalty(lengths, max_tokens=1000, buffer_tokens=418)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [0.0, -155 / 418, -1.0], rtol=1e-6)
    reward = jnp.array([1, 1, -1], jnp.float32) + got
    np.testing.assert_allclose(reward, [1.0, 1 - 155 / 418, -2.0], rtol=1e-6)


def test_under_jit_with_static_limits():
    jitted = jax.jit(soft_overlong_penalty, static_argnames=("max_tokens", "buffer_tokens"))
    np.testing.assert_allclose(jitted(np.int32(75), max_tokens=100, buffer_tokens=50), -0.5)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_refuses_a_buffer_outside_the_limit(buffer):
    with pytest.raises(ValueError, match="buffer_tokens"):
        soft_overlong_penalty(3, max_tokens=100, buffer_tokens=buffer)
