"""Log-probs and entropy of given tokens from hidden states, never [tokens, vocabulary] at once."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from s3ac_jax.parallel.vocab import Vocabulary, over_vocabulary

# float32 logits that exist at a time: 128 MiB.
BLOCK_NUMBERS = 1 << 25


def _dense(hidden, head, targets, inverse_temperature):
    logits = jnp.einsum(
        "nd,dv->nv", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    logits = logits * inverse_temperature
    logp_NV = jax.nn.log_softmax(logits, axis=-1)
    # A select over the vocabulary instead of a gather: its gradient is no scatter.
    chosen = jnp.arange(logits.shape[-1]) == targets[:, None]
    logp = jnp.sum(jnp.where(chosen, logp_NV, 0.0), axis=-1)
    return logp, -jnp.sum(jnp.exp(logp_NV) * logp_NV, axis=-1)


@jax.named_scope("token_logp")
def token_logp(
    hidden: Float[Array, "N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "N"],
    *,
    temperature: float = 1.0,
    block_numbers: int | None = None,
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """log pi(target) and the entropy of pi for each of N hidden states, float32, nats.

    Above `block_numbers` logits (None: 2^25), each device takes its own tokens and one block of the
    vocabulary at a time, and again in the backward pass; what is kept between the two is two
    numbers per token. The gradient of the head is summed in float32 over the tokens of a device and
    travels block by block: by chunks of tokens, a float32 sum of the head's whole size would be
    carried.
    Source: ours: float32 accumulation, since ready-made fused losses lose up to 0.1 nats a token
    in bfloat16 (measured); Cut your losses (2411.09009), section 4, for blocks of the vocabulary;
    online softmax (1805.02867), algorithm 3.
    """
    inverse = 1.0 / temperature
    block_numbers = BLOCK_NUMBERS if block_numbers is None else block_numbers
    if hidden.shape[0] * head.shape[1] <= block_numbers:
        return _dense(hidden, head, targets, inverse)

    def read(hidden: Array, head: Array, targets: Array, vocabulary: Vocabulary):
        block = max(128, block_numbers // hidden.shape[0] // 128 * 128)
        return _by_blocks(hidden, head, targets, vocabulary, inverse, min(block, head.shape[1]))

    return over_vocabulary(read, hidden, head, targets)


class _Blocks:
    """The blocks of a device's vocabulary, all of one size; the last may begin in the one before.

    Source: ours: a vocabulary of 128 times a prime has no blocks of equal size.
    """

    def __init__(
        self, hidden: Array, head: Array, targets: Array, vocabulary: Vocabulary, inverse: float,
        size: int,
    ):  # fmt: skip
        self.hidden, self.targets, self.vocabulary = hidden, targets, vocabulary
        # Cast first: half the bytes travel.
        self.head, self.inverse, self.size = head.astype(hidden.dtype), inverse, size
        self.first = vocabulary.first(head.shape[1])
        self.numbers = jnp.arange(-(-head.shape[1] // size))

    def start(self, number: Array) -> Array:
        """Column of the head at which block `number` begins."""
        return jnp.minimum(number * self.size, self.head.shape[1] - self.size)

    def read(self, number: Array) -> tuple[Array, Array, Array, Array]:
        """Weights [D, v] and logits [N, v] of block `number`; which are its own, and which is each
        token's target."""
        start = self.start(number)
        columns = start + jnp.arange(self.size)
        part = jax.lax.dynamic_slice_in_dim(self.head, start, self.size, axis=1)
        part = self.vocabulary.whole(part)
        logits = jnp.einsum("nd,dv->nv", self.hidden, part, preferred_element_type=jnp.float32)
        own = columns >= number * self.size
        chosen = own & (self.first + columns == self.targets[:, None])
        return part, logits * self.inverse, own, chosen


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _by_blocks(hidden, head, targets, vocabulary, inverse, size):
    return _forward(hidden, head, targets, vocabulary, inverse, size)[0]


def _forward(hidden, head, targets, vocabulary: Vocabulary, inverse: float, size: int):
    blocks = _Blocks(hidden, head, targets, vocabulary, inverse, size)

    def turn(carry, number):
        most, norm, mean, target = carry
        _, logits, own, chosen = blocks.read(number)
        new = jnp.maximum(most, jnp.max(jnp.where(own, logits, -jnp.inf), axis=-1))
        exps = jnp.where(own, jnp.exp(logits - new[:, None]), 0.0)
        scale = jnp.exp(most - new)
        norm = norm * scale + jnp.sum(exps, axis=-1)
        mean = mean * scale + jnp.sum(exps * logits, axis=-1)
        target = target + jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)
        return (new, norm, mean, target), None

    zeros = jnp.zeros(targets.shape)
    start = jnp.full(targets.shape, -jnp.inf), zeros, zeros, zeros
    (here, norm, mean, target), _ = jax.lax.scan(turn, start, blocks.numbers)
    most = vocabulary.most(here)
    scale = jnp.exp(here - most)
    norm = vocabulary.total(norm * scale)
    log_sum = most + jnp.log(norm)
    entropy = log_sum - vocabulary.total(mean * scale) / norm
    kept = hidden, head, targets, entropy, log_sum
    return (vocabulary.total(target) - log_sum, entropy), kept


def _backward(vocabulary: Vocabulary, inverse: float, size: int, kept, grads):
    hidden, head, targets, entropy, log_sum = kept
    blocks = _Blocks(hidden, head, targets, vocabulary, inverse, size)
    # Each device of a part was given its share.
    of_logp, of_entropy = (vocabulary.total(g)[:, None] for g in grads)
    exact = {"preferred_element_type": jnp.float32}

    def turn(carry, number):
        dhidden, dhead = carry
        part, logits, own, chosen = blocks.read(number)
        logp = logits - log_sum[:, None]
        p = jnp.where(own, jnp.exp(logp), 0.0)
        back = jnp.where(chosen, of_logp, 0.0)
        back = back - p * (of_logp + of_entropy * (logp + entropy[:, None]))
        back = (back * inverse).astype(hidden.dtype)
        dhidden = dhidden + jnp.einsum("nv,dv->nd", back, part, **exact)
        new = vocabulary.stored(jnp.einsum("nd,nv->dv", hidden, back, **exact))
        at = (0, blocks.start(number))
        old = jax.lax.dynamic_slice(dhead, at, new.shape)
        return (dhidden, jax.lax.dynamic_update_slice(dhead, old + new, at)), None

    start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    (dhidden, dhead), _ = jax.lax.scan(turn, start, blocks.numbers)
    return dhidden.astype(hidden.dtype), dhead.astype(head.dtype), None


_by_blocks.defvjp(_forward, _backward)


def before(x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
    """Shifts rows by one so that entry t holds what was read just before token t.

    Entry 0 repeats itself and means nothing; no first token of a row is ever trainable.
    Source: S3AC (2610.35518), value convention: V(s_t) is read before response token t.
    """
    return jnp.concatenate([x[:, :1], x[:, :-1]], axis=1)
