"""Micro-batches: any split gives what one batch gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.core.metrics import Mean
from s3ac_jax.train import micro


def test_ten_of_ten_and_two_of_one_are_twelve_elevenths():
    # Trap 6: the mean of the means would be (10/10 + 2/1) / 2 = 1.5.
    error = np.zeros((2, 10), np.float32)
    error[0], error[1, 0] = 1.0, 2.0
    mask = np.arange(10) < np.array([[10], [1]])
    batch = {"error": error, "mask": mask, "tokens": np.float32(11)}

    def loss(scale, part):
        live = jnp.where(part["mask"], scale * part["error"], 0.0)
        report = {"error": Mean.of(part["error"], part["mask"])}
        return jnp.sum(live) / part["tokens"], (report, scale * part["error"])

    for micro_rows in (1, 2):
        total, report, read, grad = jax.jit(micro.gradients, static_argnums=(0, 4))(
            loss, jnp.float32(1.0), batch, 2, micro_rows
        )
        np.testing.assert_allclose([total, grad, report["error"].value()], 12 / 11, rtol=1e-6)
        assert float(report["error"].weight) == 11
        np.testing.assert_array_equal(read, error)


@pytest.mark.parametrize(("rows", "used"), [(0, 0), (1, 2), (4, 4), (5, 6)])
def test_what_a_loss_reads_comes_back_in_order(rows, used):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4)), jnp.float32)

    def loss(scale, part):
        return scale * jnp.sum(part), ({}, (2 * part, part > 0))

    _, report, read, _ = jax.jit(lambda n: micro.gradients(loss, jnp.float32(1.0), x, n, 2))(rows)
    assert report == {}
    visited = np.arange(6)[:, None] < used
    np.testing.assert_array_equal(read[0], np.where(visited, 2 * x, 0))
    np.testing.assert_array_equal(read[1], visited & (x > 0))


def test_a_loss_that_reads_nothing():
    *_, read, _ = micro.gradients(
        lambda scale, part: (scale * jnp.sum(part), ({}, None)), jnp.float32(1), jnp.ones((4, 2)),
        4, 2,
    )  # fmt: skip
    assert read is None


@pytest.mark.parametrize(("rows", "turns"), [(0, 0), (1, 1), (2, 1), (3, 2), (6, 3)])
def test_only_the_rows_in_use_are_visited(rows, turns):
    batch = {"x": jnp.arange(6.0)[:, None] * jnp.ones((6, 3)), "scalar": jnp.float32(2.0)}

    def body(carry, part, number):
        assert part["x"].shape == (2, 3)
        return carry[0] + 1, carry[1] + part["scalar"] * part["x"].sum(), carry[2] + number

    got = jax.jit(lambda n: micro.fold(body, (0, 0.0, 0), batch, n, 2))(rows)
    want = turns, 2.0 * 3 * sum(range(2 * turns)), sum(range(turns))
    np.testing.assert_allclose(got, want)


def test_per_token_lays_rows_back_in_order():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
    y = jnp.arange(24).reshape(6, 4)

    def read(part):
        return part["x"] * 2, part["y"] + 1

    read_all = jax.jit(lambda n: micro.per_token(read, {"x": x, "y": y, "n": n}, n, 2))
    for rows, made in ((6, 6), (3, 4), (0, 0)):
        double, plus = read_all(rows)
        used = np.arange(6)[:, None] < made
        np.testing.assert_array_equal(double, np.where(used, 2 * x, 0))
        np.testing.assert_array_equal(plus, np.where(used, y + 1, 0))


def test_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="5 rows are no multiple of micro_rows = 2"):
        micro.fold(lambda carry, *_: carry, 0, {"x": jnp.ones((5, 2))}, 5, 2)
