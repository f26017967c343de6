"""Layers of several kinds in one scan: what is compiled, and that it is a loop over the layers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.models import decoder
from s3ac_jax.models.network import actor_network
from s3ac_jax.models.spec import LinearAttentionSpec, MoeSpec
from s3ac_jax.models.stack import Stage, scan_layers, stages
from tests.helpers import tiny_spec

A, L, P = ("attn", "mlp"), ("linear_attn", "mlp"), ("attn", "moe")
Q = ("linear_attn", "moe")
STACKS = {
    "of one kind": (A,) * 5,
    "of period four": (L, L, L, A) * 2,
    "with one that differs": (P, P, A, P, P, P),
    "with a prefix and a period": (A, Q, Q, P, Q, Q, P),
}


@pytest.mark.parametrize(
    ("kinds", "want"),
    [
        ((A,) * 6, [Stage(0, (A,), 6)]),
        ((L, L, L, A) * 3, [Stage(0, (L, L, L, A), 3)]),
        ((P, P, A, P, P, P), [Stage(0, (P,), 2), Stage(2, (A,), 1), Stage(3, (P,), 3)]),
        ((A, Q, Q, P, Q, Q, P), [Stage(0, (A,), 1), Stage(1, (Q, Q, P), 2)]),
        ((A,) + (P,) * 47, [Stage(0, (A,), 1), Stage(1, (P,), 47)]),
        ((L, L, L, A) * 15, [Stage(0, (L, L, L, A), 15)]),
        ((A,), [Stage(0, (A,), 1)]),
    ],
)
def test_stages_by_hand(kinds, want):
    assert list(stages(kinds)) == want


def test_no_cut_compiles_fewer_layers():
    """Every way to cut every short stack of two kinds, by brute force."""

    def cost(piece):
        """Layers of the shortest pattern that, repeated, is the piece."""
        sizes = (n for n in range(1, len(piece) + 1) if len(piece) % n == 0)
        return next(n for n in sizes if piece[:n] * (len(piece) // n) == piece)

    for length in range(1, 7):
        for kinds in itertools.product((A, P), repeat=length):
            found = stages(kinds)
            layers = [(s.first, s.pattern * s.repeats) for s in found]
            assert sum((run for _, run in layers), ()) == kinds
            assert [first for first, _ in layers] == [
                sum(len(run) for _, run in layers[:n]) for n in range(len(layers))
            ]
            best = min(
                sum(cost(kinds[a:b]) for a, b in itertools.pairwise((0, *cuts, length)))
                for count in range(length)
                for cuts in itertools.combinations(range(1, length), count)
            )
            assert sum(len(s.pattern) for s in found) == best


BLOCKS = ("attn", "linear_attn", "mlp", "moe")


def stacks_of(kinds, seed=0):
    """Weights of each block, a dict and a bare array among them, [layers that have it, 3]."""
    rng = np.random.default_rng(seed)
    draw = lambda count: rng.normal(size=(count, 3)).astype(np.float32)  # noqa: E731
    counts = {name: sum(name in layer for layer in kinds) for name in BLOCKS}
    per_block = {name: {"w": draw(n), "b": draw(n)} for name, n in counts.items() if n}
    return {**per_block, "layer": draw(len(kinds))}


FACTORS = dict(zip(BLOCKS, (0.5, -0.9, 1.1, 0.7), strict=True))


def step(kinds, carry, blocks, numbers):
    """No two layers commute; what is kept says which layer it was."""
    x, count = carry
    kept = {}
    for name in kinds:
        x = jnp.sin(FACTORS[name] * x * blocks[name]["w"]) + blocks[name]["b"] + blocks["layer"]
        if name != "mlp":
            kept[name] = {"x": x, "number": numbers[name]}
    kept["layer"] = numbers["layer"], count
    return (x, count + 1), kept


def loop(kinds, per_block, x):
    """One layer after the other, by their numbers; float64."""
    done, kept = dict.fromkeys(per_block, 0), {name: [] for name in per_block}
    for n, layer in enumerate(kinds):
        for name in layer:
            weights = {key: leaf[done[name]].astype(float) for key, leaf in per_block[name].items()}
            x = np.sin(FACTORS[name] * x * weights["w"]) + weights["b"] + per_block["layer"][n]
            kept[name].append(x)
            done[name] += 1
    return x, kept


@pytest.mark.parametrize("stack", STACKS)
def test_scan_is_the_loop(stack):
    kinds = STACKS[stack]
    per_block = stacks_of(kinds)
    x = np.array([0.3, -1.0, 2.0], np.float32)
    want, want_kept = loop(kinds, per_block, x.astype(float))

    def run(per_block, **how):
        return scan_layers(kinds, step, (x, 0), per_block, **how)

    gradients = []
    for how in ({}, {"remat": "nothing"}, {"remat": "matmuls"}, {"indexed": True}):

        def loss(per_block, how=how):
            (y, count), kept = run(per_block, **how)
            return jnp.sum(y), (y, count, kept)

        grads, (got, count, kept) = jax.jit(jax.grad(loss, has_aux=True))(per_block)
        assert count == len(kinds)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        names = {name for layer in kinds for name in layer} - {"mlp"}
        assert set(kept) == names | {"layer"}
        for name in names:
            np.testing.assert_allclose(kept[name]["x"], want_kept[name], rtol=1e-5, atol=1e-6)
            assert kept[name]["number"].tolist() == list(range(len(want_kept[name])))
        for numbers in kept["layer"]:
            assert numbers.tolist() == list(range(len(kinds)))
        gradients.append(grads)
    for other in gradients[1:]:
        for a, b in zip(*map(jax.tree.leaves, (gradients[0], other)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    # Against a slope of the loop: the first weight of every block has a say.
    for name in per_block.keys() - {"layer"}:
        ends = []
        for sign in (1, -1):
            moved = jax.tree.map(lambda leaf: leaf.astype(float), per_block)
            moved[name]["w"][0] += sign * 1e-5
            ends.append(loop(kinds, moved, x.astype(float))[0].sum())
        slope = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(gradients[0][name]["w"][0].sum(), slope, rtol=1e-3, atol=1e-5)


def test_remat_is_one_checkpoint_per_layer():
    kinds = STACKS["of period four"]
    per_block = stacks_of(kinds)

    def text(remat):
        def run(w):
            return jnp.sum(scan_layers(kinds, step, (jnp.ones(3), 0), w, remat=remat)[0][0])

        return str(jax.make_jaxpr(run)(per_block))

    assert text("nothing").count(" remat2[") == 4  # the layers of one turn
    assert text(None).count(" remat2[") == 0


def test_the_order_of_blocks_is_one_in_every_process(monkeypatch):
    """That of a set is not, and shows in the program: no cache would know it again."""
    seen = []

    def spied(kinds, step, carry, per_block, **how):
        seen.append(list(per_block))
        return scan_layers(kinds, step, carry, per_block, **how)

    monkeypatch.setattr(decoder, "scan_layers", spied)
    spec = tiny_spec(
        num_layers=4, linear_attention=LinearAttentionSpec(2, 2, 3, 3), full_attention=(1, 3),
        moe=MoeSpec(3, 1, 4, dense_layers=(0, 1)),
    )  # fmt: skip
    network, tokens = actor_network(spec), np.zeros((1, 3), np.int32)
    jax.eval_shape(lambda p: network.bind(p)(tokens, tokens, tokens + 1)[0], network.abstract)
    assert seen == [["attn", "linear_attn", "mlp", "moe", "layer"]]
