"""The legend of axes and the records that travel between rooms.

Axes, everywhere in the code:

    B  rows (responses of a batch, or packed rows)   T  tokens of a row
    P  prompts                                       G  responses per prompt
    D  model width                                   H  attention heads, K key/value heads
    E  experts                                       V  vocabulary
    L  layers                                        F  MLP width
    N  responses of a whole rollout batch

Alignment, everywhere in the code: a per-token array is aligned to the token it speaks of. At the
index of response token t stand log pi(a_t | s_t) and V(s_t), both read from the hidden state one
index earlier, that is, *before* the token. The hidden state of the last token is never used.
"""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int16, Shaped

PyTree = Any
_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def record(cls: type[_T]) -> type[_T]:
    """Makes `cls` a frozen dataclass that is also a pytree; every field is a child.

    Source: ours: records, not dicts, between rooms.
    """
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@record
class Prompt:
    """P prompts, right-padded.

    index: row of each prompt in its prompt set. num_tokens: tokens that are not padding.
    """

    index: Int[Array, "P"]
    tokens: Int[Array, "P T"]
    num_tokens: Int[Array, "P"]


@record
class Rollout:
    """B responses as the sampler returned them, token ids only, right-padded.

    logp: nats, under softmax(logits / temperature). stopped: True when the response ended with a
    stop token, False when it met the length limit. version: weights that made each token, -1 where
    there is none; they differ within a response when weights changed while it was made.
    routing: experts of each token, prompt first and response behind it, S = both; L the layers
    with experts, k experts per token, -1 where not recorded (a last token is never read). None
    when nothing was recorded. aborted: cut off before the end, not to be trained on; None for none.
    """

    prompt: Prompt
    tokens: Int[Array, "B T"]
    num_tokens: Int[Array, "B"]
    logp: Float[Array, "B T"]
    stopped: Bool[Array, "B"]
    version: Int[Array, "B T"]
    routing: Int16[Array, "B S L k"] | None = None
    aborted: Bool[Array, "B"] | None = None


@record
class Scored:
    """A rollout with its outcome. reward: in [-1, 1], or less where shaping punishes. success:
    the verifier's word, unshaped.

    valid: False where grading failed for a reason that is not the response's (infrastructure).
    reasons: short codes, on the host alone; None for a verifier that gives none.
    """

    rollout: Rollout
    reward: Float[Array, "B"]
    success: Bool[Array, "B"]
    valid: Bool[Array, "B"]
    reasons: Shaped[np.ndarray, "B"] | None = None


@record
class Packed:
    """Responses with their prompts laid end to end in B rows of T tokens.

    segment_ids: 1, 2, ... within a row, 0 is padding. positions: from 0 within each segment.
    mask: trainable tokens. response: number of the response in the batch, -1 at padding.
    num_trainable: trainable tokens of the response that the token belongs to. reward: on the last
    trainable token of each response, 0 elsewhere. rows: how many leading rows hold anything.
    routing: experts to replay, as in `Rollout`; None to route anew.
    """

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    response: Int[Array, "B T"]
    num_trainable: Int[Array, "B T"]
    reward: Float[Array, "B T"]
    logp_rollout: Float[Array, "B T"]
    rows: Int[Array, ""]
    routing: Int16[Array, "B T L k"] | None = None


@record
class Episodes:
    """What credit assignment reads: a whole rollout batch, packed, and what was known before it.

    values: V(s_t), None for a method that doesn't read them. baseline: success rate [0, 1] that
    each response's prompt had before this batch, by its own history. The other fields as in
    `Packed`.
    """

    values: Float[Array, "B T"] | None
    reward: Float[Array, "B T"]
    mask: Bool[Array, "B T"]
    num_trainable: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    response: Int[Array, "B T"]
    baseline: Float[Array, "N"]


@record
class CriticBatch:
    """What the critic step reads. learns: tokens whose value is trained; returns: their targets.

    values_old: before the update, None when the loss has no clip; not read if `first`, for then
    V_old is what this step finds itself. tokens: how many learn in the whole optimiser batch.
    """

    packed: Packed
    learns: Bool[Array, "B T"]
    values_old: Float[Array, "B T"] | None
    returns: Float[Array, "B T"]
    tokens: Float[Array, ""]
    first: Bool[Array, ""]


@record
class ActorBatch:
    """What the actor step reads; all of it constants.

    logp_old: before the update, or the sampler's. advantages: raw or whitened, 0 where not
    trainable. weights: of each token's loss, mismatch and averaging together, 0 where rejected.
    imitation: coefficient of -log pi of each token, None for none. denominator: of the sum over
    the whole optimiser batch, so that any split into micro-batches gives the same loss.
    """

    packed: Packed
    logp_old: Float[Array, "B T"]
    advantages: Float[Array, "B T"]
    weights: Float[Array, "B T"]
    imitation: Float[Array, "B T"] | None
    denominator: Float[Array, ""]


@record
class Learner:
    """One role's weights and optimiser. Only `trainable` has gradients and moments."""

    trainable: PyTree
    frozen: PyTree
    opt_state: PyTree
    step: Int[Array, ""]


@record
class LastResponse:
    """The latest response to each prompt of the prompt set, right-padded; num_tokens 0 for none.

    logp: nats, of the weights that made it.
    """

    tokens: Int[Array, "P T"]
    num_tokens: Int[Array, "P"]
    logp: Float[Array, "P T"]


@record
class PromptStats:
    """History of each prompt of the prompt set, aged lazily.

    successes, attempts: aged counts as of optimiser tick `updated`. last: None for a method that
    doesn't look at how far the policy has moved since.
    """

    successes: Float[Array, "P"]
    attempts: Float[Array, "P"]
    updated: Int[Array, "P"]
    last: LastResponse | None


@record
class DataCursor:
    """Where the prompt stream stands: epoch number and prompts already drawn from it."""

    epoch: Int[Array, ""]
    offset: Int[Array, ""]


@record
class RunState:
    """All that one tick hands to the next; a checkpoint of it is the whole run.

    critic: None for a method without one. entropy_band: thresholds of the recipe's entropy
    control, nats; NaN before the first batch.
    """

    actor: Learner
    critic: Learner | None
    stats: PromptStats
    cursor: DataCursor
    entropy_band: Float[Array, "2"]
    tick: Int[Array, ""]
