"""What the trainer sees of rollouts, wherever they are made: one protocol, one kind of settings."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from s3ac_jax.core import trees
from s3ac_jax.core.errors import RunError
from s3ac_jax.core.types import Prompt, PyTree, Rollout

# A static width: what ends a response is compared with every token inside the compiled step.
MAX_STOP_IDS = 8


class RolloutError(RunError):
    """Rollouts can't be had; the message is one line that says from where and what to do.

    Source: ours.
    """


class Sampling(NamedTuple):
    """Per-request settings, one entry each. temperature 0 is greedy. max_tokens: response tokens.

    top_p: smallest set of tokens with this share of the probability, 1 for all. top_k: likeliest
    tokens, 0 for all. stop_ids: tokens that end the response, -1 for none.
    Source: ours; The curious case of neural text degeneration (1904.09751) for top_p.
    """

    seed: UInt32[Array, "B"]
    temperature: Float[Array, "B"]
    max_tokens: Int[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int[Array, "B"]
    stop_ids: Int[Array, "B K"]


def make_sampling(
    key: jax.Array,
    rows: int,
    *,
    temperature: float,
    max_tokens: int,
    stop_ids: Sequence[int],
    top_p: float = 1.0,
    top_k: int = 0,
) -> Sampling:
    """The same settings for `rows` requests, a seed for each drawn from `key`.

    Raises ValueError on more than MAX_STOP_IDS stop ids.
    Source: ours.
    """
    seeds = np.asarray(jax.random.bits(key, (rows,), np.uint32))
    return seeded_sampling(
        seeds, temperature=temperature, max_tokens=max_tokens, stop_ids=stop_ids, top_p=top_p,
        top_k=top_k,
    )  # fmt: skip


def seeded_sampling(
    seeds: Any,
    *,
    temperature: Any,
    max_tokens: Any,
    stop_ids: Sequence[int],
    top_p: Any = 1.0,
    top_k: Any = 0,
) -> Sampling:
    """Settings for the requests of `seeds`; a number stands for all of them, an array for each.

    Raises ValueError on more than MAX_STOP_IDS stop ids.
    Source: ours.
    """
    if len(stop_ids) > MAX_STOP_IDS:
        raise ValueError(f"at most {MAX_STOP_IDS} stop ids, got {len(stop_ids)}")
    seeds = np.asarray(seeds, np.uint32)
    stops = np.full((len(seeds), MAX_STOP_IDS), -1, np.int32)
    stops[:, : len(stop_ids)] = stop_ids

    def each(value: Any, dtype: Any) -> np.ndarray:
        return np.broadcast_to(value, seeds.shape).astype(dtype)

    return Sampling(
        seeds, each(temperature, np.float32), each(max_tokens, np.int32),
        each(top_p, np.float32), each(top_k, np.int32), stops,
    )  # fmt: skip


digest_of = jax.jit(trees.fingerprint)


def hex_digest(digest: Any) -> str:
    """A checksum of weights as people and messages see it. Source: ours."""
    return f"{int(digest):08x}"


def fingerprint_of(params: PyTree) -> str:
    """Eight hex digits that say which weights these are, names, dtypes and bits; any sharding.

    Source: ours: both sides of a weight sync compare them.
    """
    return hex_digest(digest_of(params))


class RolloutBackend(Protocol):
    """Makes responses with the weights it was last given.

    A response depends on weights, prompt and its own settings, not on what else is asked for.
    Source: ours.
    """

    def generate(self, prompt: Prompt, sampling: Sampling, *, keep_routing: bool = True) -> Rollout:
        """One response for each of the B prompts, in their order.

        keep_routing: False leaves out the experts that may have been recorded, for responses that
        nobody trains on.
        Raises ValueError on a prompt or settings out of range, RolloutError when none can be had.
        Source: ours.
        """
        ...

    def update_weights(self, params: PyTree, version: int) -> None:
        """The weights of all later responses, and the number that their tokens are marked with.

        Raises RolloutError when they did not arrive as they were sent. Source: ours.
        """
        ...

    def rest(self) -> None:
        """Gives up what it holds on the trainer's devices, until the next `update_weights`.

        Source: ours: an update needs the room of keys, values and weights to sample from.
        """
        ...

    def abort(self) -> None:
        """From another thread: ends responses in progress as they are, marked `aborted`.

        Source: ours.
        """
        ...

    def pause(self) -> None:
        """From another thread: no token is made until `resume`. Source: ours."""
        ...

    def resume(self) -> None:
        """Ends a pause. Source: ours."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and the weights' version and fingerprint. Source: ours."""
        ...

    def close(self) -> None:
        """Ends threads and connections; nothing can be generated afterwards. Source: ours."""
        ...
