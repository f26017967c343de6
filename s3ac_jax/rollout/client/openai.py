"""Rollouts by servers that others wrote, over HTTP: vLLM, vLLM-TPU, SGLang; or by our own.

The servers have to take token ids and to give token ids with log-probs. They load new weights from
a folder that the trainer exports and both sides can read.
"""

import collections
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from s3ac_jax.core.types import Prompt, PyTree, Rollout
from s3ac_jax.rollout.assemble import Assembly, tally
from s3ac_jax.rollout.backend import RolloutError, Sampling
from s3ac_jax.rollout.client.fleet import Fleet
from s3ac_jax.rollout.client.fleet_server import Timing, to_stderr
from s3ac_jax.rollout.client.http_link import HttpLink, LoopThread
from s3ac_jax.rollout.client.link import (
    CallFailed,
    Verdict,
    first_answers,
    raise_refusals,
    shown,
)
from s3ac_jax.rollout.client.openai_flavours import (
    FLAVOURS,
    Completion,
    CompletionRequest,
    Weights,
)
from s3ac_jax.rollout.hosts import check_token_hidden
from s3ac_jax.rollout.local import check_request
from s3ac_jax.rollout.wire import ABORT, STOP


class OpenAIRollout:
    """Rollouts by HTTP servers at `addresses` ("http://host:port"), several of which may die.

    flavour: "vllm", "sglang", or "s3ac" for our own. export: (params, version) -> folder that the
    servers can read, in the layout of Hugging Face; needed for `update_weights`. vocab_size: token
    ids must be below it. model: name that the server knows it by, None for its only one. token:
    sent as bearer, to other machines over https only. max_in_flight: requests that one server has
    at a time. timeout_s: of one call, a reload included. in_flight: responses in progress go on
    under new weights; False waits for them. notice: takes a line for people, now and then, about
    servers that are away or load weights.
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
        notice: Callable[[str], None] = to_stderr,
    ):
        if not addresses:
            raise RolloutError("no address of a rollout server: set rollout.addresses")
        if flavour not in FLAVOURS:
            raise RolloutError(f"no flavour {flavour!r}: use one of {', '.join(FLAVOURS)}")
        for address in addresses:
            fix = "use https://, or leave out rollout.token_file"
            check_token_hidden(address, token, address.startswith("https://"), fix)
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens
        self.in_flight = in_flight
        self.version = -1
        self._export = export
        self._needs_weights = export is not None
        self._fingerprint: str | None = None
        self._counts = collections.Counter(requests=0, tokens=0, aborted=0)
        self._notice = notice
        self._standing = False  # the servers, for us
        self._loop = LoopThread({"Authorization": f"Bearer {token}"} if token else {})
        self._links = [
            HttpLink(address, FLAVOURS[flavour](), self._loop, model, vocab_size, timeout_s)
            for address in addresses
        ]
        self._fleet = Fleet(self._links, max_in_flight=max_in_flight, timing=timing, notice=notice)

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

    def adopt_weights(self) -> Weights:
        """Takes the weights that the servers have as those that answer; returns what they say.

        Answers that say another version later are an error. Waits for the first server to be there.
        Raises RolloutError when servers differ, refuse, or are not to be had. Source: ours.
        """
        found = first_answers(
            "say which weights they have",
            lambda: self._ask(lambda link: link.flavour.weights(link.call, link.model)),
            self._fleet.timing.patience, self._notice,
        )  # fmt: skip
        weights, *others = set(found.values())
        if others:
            each = ", ".join(
                f"{address} has {one.fingerprint or one.name} (version {one.version})"
                for address, one in found.items()
            )
            raise RolloutError(f"the rollout servers have different weights: {each}")
        if weights.fingerprint is not None:
            self._fingerprint = weights.fingerprint
            for link in self._links:
                link.version = weights.version
        return weights

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
        works = [_work(prompt, sampling, row) for row in range(len(prompt.index))]
        answers = self._fleet.run(works, [1] * len(works))
        made = Assembly(prompt, self.max_response_tokens, None)
        for row, answer in enumerate(answers):
            if answer is not None:
                made.put(
                    np.array([row]), np.array([len(answer.tokens)]), tokens=answer.tokens,
                    logp=answer.logp, version=self._mark(answer), stopped=answer.finish == STOP,
                    aborted=answer.finish == ABORT,
                )  # fmt: skip
        rollout = made.finish()
        self._counts.update(tally(rollout))
        return rollout

    def _mark(self, answer: Completion) -> int:
        """The version that a response's tokens are marked with."""
        if self._export is not None:
            return self.version
        named = answer.version or ""
        return int(named) if named.isdecimal() else 0

    def rest(self) -> None:
        """Nothing: what servers hold is not on the trainer's devices. Source: ours."""

    def abort(self) -> None:
        """From another thread: a call in progress returns with what there is. Source: ours."""
        self._fleet.abort()

    def pause(self) -> None:
        """From another thread: the servers make no token until `resume`, where they can.

        Raises RolloutError naming the servers that would not; the others stand still then, and
        nothing more is sent.
        Source: ours.
        """
        self._fleet.pause()
        self._standing = True
        self._tell("pause", lambda link: link.flavour.pause(link.call))

    def resume(self) -> None:
        """Ends a pause. Raises RolloutError naming the servers that would not. Source: ours."""
        try:
            self._tell("resume", lambda link: link.flavour.resume(link.call))
        finally:
            self._standing = False
            self._fleet.resume()

    def _tell(self, what: str, call: Callable[[HttpLink], Coroutine[Any, Any, Any]]) -> None:
        for line in raise_refusals(what, self._ask(call)):
            self._notice(f"rollout server {line}")

    def _ask(self, call: Callable[[HttpLink], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        """One call to every server at once: what came of each, or a CallFailed."""
        found: dict[str, Any] = {}
        try:
            calls = {link.address: self._loop.submit(call(link)) for link in self._links}
        except RolloutError as error:
            return {link.address: CallFailed(Verdict.FATAL, str(error)) for link in self._links}
        for address, future in calls.items():
            try:
                found[address] = future.result()
            except CallFailed as error:
                found[address] = error
        return found

    def stats(self) -> dict[str, Any]:
        """Counts of this client, the weights' version, and whether each server is there.

        servers: {"is_live": True} by address, or {"error": line}, as after `close`.
        Source: ours.
        """
        looks = self._ask(lambda link: link.flavour.check(link.call, link.version))
        servers = {
            address: found if isinstance(found, dict) else {"is_live": True}
            for address, found in shown(looks).items()
        }
        return {
            **self._counts, **self._fleet.counts, "version": self.version,
            "fingerprint": self._fingerprint, "servers": servers,
        }  # fmt: skip

    def close(self) -> None:
        """Cancels what is in flight, ends the connections and their thread; servers that stand
        still for us go on.

        Source: ours.
        """
        self._fleet.close()
        if self._standing:
            self._standing = False
            self._ask(lambda link: link.flavour.resume(link.call))
        self._loop.close()


def _work(prompt: Prompt, sampling: Sampling, row: int) -> CompletionRequest:
    stops = np.asarray(sampling.stop_ids[row])
    return CompletionRequest(
        row,
        np.asarray(prompt.tokens[row, : prompt.num_tokens[row]]).tolist(),
        int(sampling.seed[row]),
        float(sampling.temperature[row]),
        int(sampling.max_tokens[row]),
        float(sampling.top_p[row]),
        int(sampling.top_k[row]),
        stops[stops >= 0].tolist(),
    )
