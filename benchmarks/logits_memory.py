"""Temporary memory of the updates at 4,096 tokens and a vocabulary of 151,936, by XLA's count.

  python benchmarks/logits_memory.py

Compares the actor's step, which never has more than 2^25 logits, with the one that makes them all,
and says how far their gradients are apart. The critic has no logits: its step is there to compare.
Takes 8 GiB and some minutes; --compile_only neither.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.core.types import ActorBatch, CriticBatch, Packed
from s3ac_jax.models import token_logp
from s3ac_jax.models.network import actor_network, critic_network
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.train import steps
from s3ac_jax.train.learner import make_learner

ROWS, TOKENS, VOCAB = 4, 1024, 151_936
SPEC = DecoderSpec(
    vocab_size=VOCAB, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32,
    intermediate_size=128, remat=True,
)  # fmt: skip


def batches():
    rng = np.random.default_rng(0)
    shape = ROWS, TOKENS
    tokens = rng.integers(VOCAB, size=shape).astype(np.int32)
    places = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), shape)
    normal, zeros = rng.normal(size=shape).astype(np.float32), np.zeros(shape, np.float32)
    mask = places > 0
    packed = Packed(
        tokens=tokens, segment_ids=np.ones(shape, np.int32), positions=places, mask=mask,
        response=np.zeros(shape, np.int32), num_trainable=np.full(shape, TOKENS - 1, np.int32),
        reward=zeros, logp_rollout=zeros, rows=np.int32(ROWS),
    )  # fmt: skip
    count = np.float32(mask.sum())
    actor = ActorBatch(
        packed, zeros - np.log(VOCAB), normal, np.ones(shape, np.float32), None, count
    )
    critic = CriticBatch(packed, mask, None, normal, count, np.array(True))
    return {"actor": actor, "critic": critic}


def compiled(role):
    """The step of one role, compiled, and its arguments."""
    # Its state after a step is the gradient.
    recipe, tx = RECIPES["s3ac_single"], optax.trace(decay=0.0)
    if role == "actor":
        network = actor_network(SPEC)
        step = steps.make_actor_step(
            network, recipe.surrogate, tx, clip=1e9, temperature=1.0, micro_rows=ROWS
        )
    else:
        network = critic_network(SPEC)
        step = steps.make_critic_step(network, recipe.critic, tx, clip=1e9, micro_rows=ROWS)
    learner = jax.eval_shape(lambda: make_learner(network.init(jax.random.key(0)), tx))
    return step.lower(learner, batches()[role]).compile(), network, tx


def temporary(role):
    """MiB of temporary memory. Source of the number: XLA's own analysis."""
    return compiled(role)[0].memory_analysis().temp_size_in_bytes / 2**20


def materialised():
    """From here on all logits are made at once."""
    token_logp.BLOCK_NUMBERS = 1 << 40


def gradients():
    step, network, tx = compiled("actor")
    learner = make_learner(network.init(jax.random.key(0)), tx)
    after, *_ = step(learner, jax.tree.map(jnp.asarray, batches()["actor"]))
    return jax.device_get(after.opt_state)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile_only", action="store_true", help="memory alone")
    only = parser.parse_args().compile_only
    sizes = {role: temporary(role) for role in ("actor", "critic")}
    grads = None if only else gradients()
    materialised()
    whole = temporary("actor")
    for role, size in sizes.items():
        print(f"{role} step: {size:,.0f} MiB, 1/{whole / size:.1f} of the actor's with all logits")
    print(f"actor step with all logits: {whole:,.0f} MiB")
    if grads is not None:
        pairs = zip(*map(jax.tree.leaves, (grads, gradients())), strict=True)
        far = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
        print(f"gradients differ by {far:.1e} of the largest of each weight")


if __name__ == "__main__":
    main()
