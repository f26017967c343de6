"""A few responses of a tick with everything that is known of each token."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from s3ac_jax.core.types import ActorBatch, Packed, Scored
from s3ac_jax.data.prompts import PromptSet
from s3ac_jax.data.tokenizer import Tokenizer, pieces


def chosen(scored: Scored, count: int) -> np.ndarray:
    """Numbers of `count` valid responses: wrong and right ones, short and long ones.

    Source: ours: spread evenly over all of them, the wrong before the right, by length.
    """
    valid = np.flatnonzero(scored.valid)
    order = valid[np.lexsort((scored.rollout.num_tokens[valid], scored.success[valid]))]
    if count >= len(order):
        return order
    return order[(np.arange(count) * (len(order) - 1)) // max(count - 1, 1)]


@jax.jit
def read_tokens(
    packed: Sequence[Packed],
    scores: Sequence[tuple[Array, Array | None]],
    actor: Sequence[ActorBatch],
    numbers: Int[Array, "n"],
) -> dict[str, Array]:
    """The packed rows that hold these responses, and in `mine` which of their tokens are theirs.

    packed, scores, actor: of one rollout batch, an entry per optimiser batch. Arrays [n, T].
    Source: ours: a few rows, so that no more than that travels to the host.
    """

    def of_part(
        one: Packed, score: tuple[Array, Array | None], batch: ActorBatch
    ) -> tuple[dict[str, Array], Array]:
        logp_old, values = score
        fields = {
            "logp_rollout": one.logp_rollout, "logp_old": logp_old,
            "advantage": batch.advantages, "weight": batch.weights,
        }  # fmt: skip
        if values is not None:
            fields["value"] = values
        owner = jnp.where(one.mask, one.response, -1)

        def of(number: Array) -> tuple[dict[str, Array], Array]:
            mine = owner == number
            has = mine.any(axis=1)
            row = jnp.argmax(has)
            return {name: x[row] for name, x in fields.items()} | {"mine": mine[row]}, has.any()

        return jax.vmap(of)(numbers)

    # Part by part: joined, all tokens of the batch would be there twice.
    found = [of_part(*parts) for parts in zip(packed, scores, actor, strict=True)]
    part = jnp.argmax(jnp.stack([has for _, has in found]), axis=0)
    places = jnp.arange(len(numbers))
    return jax.tree.map(lambda *x: jnp.stack(x)[part, places], *(rows for rows, _ in found))


def trajectory_lines(
    tick: int,
    scored: Scored,
    numbers: np.ndarray,
    read: dict[str, np.ndarray],
    prompts: PromptSet,
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """One line of trajectories.jsonl for each of the responses `numbers`.

    read: what `read_tokens` gave, on the host. A number that isn't finite becomes None.
    Source: ours; docs/report.md describes the file.
    """
    rollout, lines = scored.rollout, []
    for place, number in enumerate(numbers):
        row, length = int(rollout.prompt.index[number]), int(rollout.num_tokens[number])
        asked = prompts.tokens[row, : prompts.num_tokens[row]].tolist()
        tokens = rollout.tokens[number, :length].tolist()
        mine = read["mine"][place]
        each = {name: x[place][mine] for name, x in read.items() if name != "mine"}
        # float64: what is beyond float32 shall show, too.
        each["ratio"] = np.exp(each["logp_old"].astype(float) - each["logp_rollout"])
        reason = None if scored.reasons is None else str(scored.reasons[number])
        lines.append(
            {
                "tick": tick,
                "response": int(number),
                "prompt": row,
                "level": prompts.called.names[int(prompts.levels[row])],
                "prompt_tokens": asked,
                "prompt_pieces": pieces(tokenizer, asked),
                "tokens": tokens,
                "pieces": pieces(tokenizer, tokens),
                "stopped": bool(rollout.stopped[number]),
                "reward": float(scored.reward[number]),
                "success": bool(scored.success[number]),
                "reason": reason,
                "value": None,
                **{name: rounded(x) for name, x in each.items()},
            }
        )
    return lines


def rounded(x: np.ndarray) -> list[float | None]:
    """Numbers of five digits, None for what isn't finite. Source: ours: JSON has no NaN."""
    return [float(f"{one:.5g}") if np.isfinite(one) else None for one in x.tolist()]
