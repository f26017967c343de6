"""The responses of one call while they come in, wherever they are made, and the Rollout of them."""

from typing import Any

import numpy as np

from s3ac_jax.core.types import Prompt, Rollout


class Assembly:
    """Arrays for one response to each of the B prompts, to be filled in any order.

    tokens, logp and version are [B, T], num_tokens, stopped and aborted [B], routing is
    [B, P + T, L, k] for a `routing_shape` of (L, k). T = max_response_tokens, P = padded width of
    the prompts. At first there is nothing: no token, no expert (-1), and every response counts as
    aborted until its end is known.
    Source: ours.
    """

    def __init__(
        self, prompt: Prompt, max_response_tokens: int, routing_shape: tuple[int, int] | None
    ):
        rows, width = prompt.tokens.shape
        shape = rows, max_response_tokens
        self.prompt = prompt
        self.tokens, self.logp = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        self.version = np.full(shape, -1, np.int32)
        self.num_tokens = np.zeros(rows, np.int32)
        self.stopped, self.aborted = np.zeros(rows, bool), np.ones(rows, bool)
        self.routing = None
        if routing_shape is not None:
            whole = rows, width + max_response_tokens
            self.routing = np.full((*whole, *routing_shape), -1, np.int16)

    def put(
        self, rows: np.ndarray, num_tokens: np.ndarray, *, tokens: Any, logp: Any, version: Any,
        stopped: Any, aborted: Any,
    ) -> None:  # fmt: skip
        """Whole responses to the requests `rows`; tokens, logp and version of them end to end.

        version: one number stands for all tokens. Source: ours.
        """
        among, place = np.nonzero(np.arange(self.tokens.shape[1]) < num_tokens[:, None])
        at = rows[among], place
        self.tokens[at], self.logp[at], self.version[at] = tokens, logp, version
        self.num_tokens[rows] = num_tokens
        self.stopped[rows], self.aborted[rows] = stopped, aborted

    def finish(self, version: int | None = None) -> Rollout:
        """The Rollout. version: of all tokens; None where `version` holds that of each.

        Source: ours.
        """
        if version is not None:
            exists = np.arange(self.tokens.shape[1]) < self.num_tokens[:, None]
            self.version = np.where(exists, version, -1).astype(np.int32)
        return Rollout(
            self.prompt, self.tokens, self.num_tokens, self.logp, self.stopped, self.version,
            self.routing, self.aborted if self.aborted.any() else None,
        )  # fmt: skip


def tally(rollout: Rollout) -> dict[str, int]:
    """What a backend counts of each call: requests, tokens, aborted responses. Source: ours."""
    aborted = 0 if rollout.aborted is None else int(np.sum(rollout.aborted))
    return {
        "requests": len(rollout.num_tokens),
        "tokens": int(np.sum(rollout.num_tokens)),
        "aborted": aborted,
    }
