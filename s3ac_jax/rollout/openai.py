"""Rollouts by servers that others wrote, over HTTP: vLLM, vLLM-TPU, SGLang; or by our own.

The servers have to take token ids and to give token ids with log-probs. They load new weights from
a folder that the trainer exports and both sides can read.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from s3ac_jax.core.types import Prompt, PyTree, Rollout
from s3ac_jax.rollout.backend import RolloutError, Sampling
from s3ac_jax.rollout.fleet import Fleet, Timing
from s3ac_jax.rollout.local import check_request
from s3ac_jax.rollout.openai_flavours import FLAVOURS, Answer, Work
from s3ac_jax.rollout.openai_link import HttpFault, HttpLink, LoopThread
from s3ac_jax.rollout.wire import ABORT, STOP


class OpenAIRollout:
    """Rollouts by HTTP servers at `addresses` ("http://host:port"), several of which may die.

    flavour: "vllm", "sglang", or "s3ac" for our own. export: (params, version) -> folder that the
    servers can read, in the layout of Hugging Face; needed for `update_weights`. vocab_size: token
    ids must be below it. model: name that the server knows it by, None for its only one. token:
    sent as bearer. max_in_flight: requests that one server has at a time. timeout_s: of one call,
    a reload included. in_flight: responses in progress go on under new weights; False waits for
    them.
    Experts are not recorded. Tokens are marked with the version that was loaded last: vLLM does not
    say which weights made them. A server that was lost loads the current weights before it gets
    work.
    Source: ours; the protocol is that of `rollout/backend.py`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        flavour: str,
        *,
        vocab_size: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        export: Callable[[PyTree, int], str] | None = None,
        model: str | None = None,
        token: str | None = None,
        max_in_flight: int = 256,
        timeout_s: float = 3600.0,
        timing: Timing = Timing(),  # noqa: B008 (frozen)
        in_flight: bool = False,
    ):
        if not addresses:
            raise RolloutError("no address of a rollout server: set rollout.addresses")
        if flavour not in FLAVOURS:
            raise RolloutError(f"no flavour {flavour!r}: use one of {', '.join(FLAVOURS)}")
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens
        self.in_flight = in_flight
        self.version = -1
        self._export = export
        self._needs_weights = export is not None
        self._counts = {"requests": 0, "tokens": 0, "aborted": 0}
        self._loop = LoopThread({"Authorization": f"Bearer {token}"} if token else {})
        self._links = [
            HttpLink(address, FLAVOURS[flavour](), self._loop, model, vocab_size, timeout_s)
            for address in addresses
        ]
        self._fleet = Fleet(self._links, max_in_flight=max_in_flight, timing=timing)

    def update_weights(self, params: PyTree, version: int) -> None:
        """Exports the weights of all later tokens and has every server that is there load them.

        Raises RolloutError when a server can't load them and when none is to be had.
        Source: ours.
        """
        if self._export is None:
            raise RolloutError("weights can't be sent: this rollout was made without an export")
        folder = self._export(params, version)
        for link in self._links:
            link.folder, link.version, link.in_flight = folder, version, self.in_flight
        self._fleet.sync()
        self.version, self._needs_weights = version, False

    def generate(self, prompt: Prompt, sampling: Sampling, *, keep_routing: bool = True) -> Rollout:
        """One response for each of the B prompts, in their order; a request each.

        Without an export the servers' own weights make them; tokens are marked with the version
        that the server names, 0 when it names none.
        Raises ValueError when a prompt or a limit exceeds what the rollout was built for, and
        RolloutError before the first `update_weights`, after `close`, when a server refuses a
        request or answers what can't be trained on, and when none is to be had.
        Source: ours.
        """
        if self._needs_weights:
            raise RolloutError("no weights: call update_weights(params, version) first")
        check_request(prompt, sampling, self.max_prompt_tokens, self.max_response_tokens)
        for link in self._links:
            link.begin()
        rows, longest = len(prompt.index), self.max_response_tokens
        works = [_work(prompt, sampling, row) for row in range(rows)]
        answers = self._fleet.run(works, [1] * rows)
        tokens = np.zeros((rows, longest), np.int32)
        logp = np.zeros((rows, longest), np.float32)
        made, stopped = np.zeros(rows, np.int32), np.zeros(rows, bool)
        version = np.full((rows, longest), -1, np.int32)
        aborted = np.ones(rows, bool)
        for row, answer in enumerate(answers):
            if answer is not None:
                made[row] = count = len(answer.tokens)
                tokens[row, :count], logp[row, :count] = answer.tokens, answer.logp
                version[row, :count] = self._mark(answer)
                stopped[row], aborted[row] = answer.finish == STOP, answer.finish == ABORT
        self._counts["requests"] += rows
        self._counts["tokens"] += int(made.sum())
        self._counts["aborted"] += int(aborted.sum())
        return Rollout(
            prompt, tokens, made, logp, stopped, version, None, aborted if aborted.any() else None
        )

    def _mark(self, answer: Answer) -> int:
        """The version that a response's tokens are marked with."""
        if self._export is not None:
            return self.version
        named = answer.version or ""
        return int(named) if named.isdecimal() else 0

    def abort(self) -> None:
        """From another thread: a call in progress returns with what there is. Source: ours."""
        self._fleet.abort()

    def pause(self) -> None:
        """From another thread: the servers make no token until `resume`, where they can.

        Source: ours.
        """
        self._fleet.pause()
        self._tell(lambda link: link.flavour.pause(link.call))

    def resume(self) -> None:
        """Ends a pause. Source: ours."""
        self._tell(lambda link: link.flavour.resume(link.call))
        self._fleet.resume()

    def _tell(self, what: Callable[[HttpLink], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        """One call to every server at once: what came of each, or its error."""
        calls = {link.address: self._loop.submit(what(link)) for link in self._links}
        found: dict[str, Any] = {}
        for address, call in calls.items():
            try:
                found[address] = call.result()
            except HttpFault as error:
                found[address] = RolloutError(str(error))
        return found

    def stats(self) -> dict[str, Any]:
        """Counts of this client, the weights' version, and whether each server is there.

        Source: ours.
        """
        looks = self._tell(lambda link: link.flavour.check(link.call, link.version))
        servers = {
            address: {"error": str(found)} if isinstance(found, RolloutError) else {"is_live": True}
            for address, found in looks.items()
        }
        return {
            **self._counts, **self._fleet.counts, "version": self.version, "fingerprint": None,
            "servers": servers,
        }  # fmt: skip

    def close(self) -> None:
        """Cancels what is in flight, ends the connections and their thread. Source: ours."""
        self._fleet.close()
        self._loop.close()


def _work(prompt: Prompt, sampling: Sampling, row: int) -> Work:
    stops = np.asarray(sampling.stop_ids[row])
    return Work(
        row,
        np.asarray(prompt.tokens[row, : prompt.num_tokens[row]]).tolist(),
        int(sampling.seed[row]),
        float(sampling.temperature[row]),
        int(sampling.max_tokens[row]),
        float(sampling.top_p[row]),
        int(sampling.top_k[row]),
        stops[stops >= 0].tolist(),
    )
