"""One role's optimiser: schedule, clipping, frozen weights, and the guard against NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from s3ac_jax.config.run import OptimizerConfig
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import Learner
from s3ac_jax.train.learner import apply_gradients, make_learner, make_optimizer, params_of


def toy_params():
    return {
        "backbone": {"mlp": jnp.array([1.0, -2.0, 3.0]), "attn": jnp.array([0.5, 0.25])},
        "value_head": jnp.array([0.1, 0.2]),
    }


def frozen(name):
    return "attn" in name


def grads_like(trainable, value=1.0):
    return jax.tree.map(lambda x: jnp.full(x.shape, value), trainable)


def step(learner, tx, *, grad=1.0, loss=0.0, clip=1e9):
    return apply_gradients(
        learner, grads_like(learner.trainable, grad), jnp.float32(loss), tx, clip
    )


def config(**changes):
    return OptimizerConfig(**({"lr": 0.01, "clip": 1.0, "weight_decay": 0.0} | changes))


def test_warm_up_continues_after_resume_for_every_weight():
    # With one gradient for ever, Adam's update is the learning rate itself.
    tx = make_optimizer(config(warmup_steps=4))
    learner, moved = make_learner(toy_params(), tx, frozen), []
    for number in range(7):
        before = learner.trainable
        learner, _ = step(learner, tx)
        moved.append(jax.tree.map(lambda a, b: a - b, before, learner.trainable))
        if number == 1:  # saved and restored: numpy arrays in a new learner
            learner = Learner(*(jax.tree.map(np.asarray, x) for x in vars(learner).values()))
    for number, tree in enumerate(moved):
        want = 0.01 * min(number + 1, 4) / 4
        for name, delta in named_leaves(tree).items():
            np.testing.assert_allclose(delta, want, rtol=1e-3, err_msg=f"{name} at {number}")
    assert int(learner.step) == 7


@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warm_up_the_first_step_is_a_full_one(warmup):
    tx = make_optimizer(config(warmup_steps=warmup))
    learner = make_learner(toy_params(), tx)
    for _ in range(3):
        before = learner.trainable["value_head"]
        learner, _ = step(learner, tx)
        np.testing.assert_allclose(before - learner.trainable["value_head"], 0.01, rtol=1e-3)


def test_cosine_ends_at_two_percent():
    tx = make_optimizer(config(warmup_steps=2), decay_steps=6)
    learner, moved = make_learner(toy_params(), tx), []
    for _ in range(8):
        before = learner.trainable["value_head"]
        learner, _ = step(learner, tx)
        moved.append(float((before - learner.trainable["value_head"])[0]))
    cosine = [0.02 + 0.98 * (1 + np.cos(np.pi * n / 4)) / 2 for n in range(5)]
    want = 0.01 * np.array([0.0, 0.5, *cosine, 0.02])
    np.testing.assert_allclose(moved, want, rtol=1e-3, atol=1e-7)


def test_adamw_by_hand():
    tx = make_optimizer(config(weight_decay=0.1, b1=0.8, b2=0.9))
    learner = make_learner(toy_params(), tx)
    x, m, v = 1.0, 0.0, 0.0
    for t, g in enumerate((0.5, -2.0, 1.0), start=1):
        learner, _ = step(learner, tx, grad=g)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        x -= 0.01 * (m / (1 - 0.8**t) / ((v / (1 - 0.9**t)) ** 0.5 + 1e-8) + 0.1 * x)
        np.testing.assert_allclose(learner.trainable["backbone"]["mlp"][0], x, rtol=1e-5)


def test_frozen_weights_have_no_moments_no_decay_and_no_part_in_the_norm():
    tx = make_optimizer(config(weight_decay=0.5))
    learner = make_learner(toy_params(), tx, frozen)
    assert named_leaves(learner.frozen).keys() == {"backbone/attn"}
    assert named_leaves(learner.trainable).keys() == {"backbone/mlp", "value_head"}
    assert not any("attn" in name for name in named_leaves(learner.opt_state))
    assert sum(leaf.ndim > 0 for leaf in jax.tree.leaves(learner.opt_state)) == 4  # two moments
    learner, report = step(learner, tx, grad=3.0)
    np.testing.assert_allclose(report["grad_norm"].value(), 3 * 5**0.5, rtol=1e-6)
    np.testing.assert_array_equal(params_of(learner)["backbone"]["attn"], [0.5, 0.25])
    assert named_leaves(params_of(learner)).keys() == named_leaves(toy_params()).keys()


@pytest.mark.parametrize(("grad", "clipped"), [(0.1, 0.0), (5.0, 1.0)])
def test_clipping_keeps_the_direction_and_reports_the_norm_before(grad, clipped):
    tx = optax.sgd(1.0)
    learner, report = step(make_learner(toy_params(), tx), tx, grad=grad, clip=2.0)
    norm = grad * 7**0.5
    np.testing.assert_allclose(report["grad_norm"].value(), norm, rtol=1e-6)
    assert report["clipped_steps"].value() == clipped
    assert report["nonfinite"].value() == 0
    want = grad * min(1.0, 2.0 / norm)
    for before, after in zip(
        jax.tree.leaves(toy_params()), jax.tree.leaves(params_of(learner)), strict=True
    ):
        np.testing.assert_allclose(before - after, want, rtol=1e-4)


@pytest.mark.parametrize(
    ("grad", "loss"), [(np.nan, 0.0), (np.inf, 0.0), (1.0, np.nan), (1.0, np.inf), (1e30, 0.0)]
)
def test_a_step_that_is_not_finite_changes_nothing(grad, loss):
    tx = make_optimizer(config(weight_decay=0.1))
    learner, _ = step(make_learner(toy_params(), tx, frozen), tx)
    after, report = step(learner, tx, grad=grad, loss=loss)
    for name, leaf in named_leaves(learner).items():
        np.testing.assert_array_equal(named_leaves(after)[name], leaf, err_msg=name)
    assert report["nonfinite"].value() == 1
    assert int(after.step) == 1
