"""Packed rows without a rollout, for benchmarks that want them full."""

import jax
import jax.numpy as jnp
import numpy as np

from s3ac_jax.core.types import Packed
from s3ac_jax.parallel.mesh import spec_of


def packed(config, mesh, rows, segment, prompt):
    """Rows full of responses of `segment` tokens, each behind a prompt of `prompt` of them.

    Laid out where the steps expect them; every other response is right. Source: ours.
    """
    tokens = config.train.pack_tokens
    rng = np.random.default_rng(0)
    shape = rows, tokens
    place = np.broadcast_to(np.arange(tokens) % segment, shape)
    within = np.broadcast_to(np.arange(tokens) // segment, shape)
    number = within + (tokens // segment) * np.arange(rows)[:, None]
    last = place == segment - 1

    def laid(x):
        where = spec_of(("rows", None), x.shape, mesh)
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, where))

    return Packed(
        tokens=laid(rng.integers(config.model.vocab_size, size=shape, dtype=np.int32)),
        segment_ids=laid(1 + within.astype(np.int32)),
        positions=laid(place.astype(np.int32)),
        mask=laid(place >= prompt),
        response=laid(number.astype(np.int32)),
        num_trainable=laid(np.full(shape, segment - prompt, np.int32)),
        reward=laid((last & (number % 2 == 0)).astype(np.float32)),
        logp_rollout=laid(np.full(shape, -np.log(config.model.vocab_size), np.float32)),
        rows=jnp.int32(rows),
    )
