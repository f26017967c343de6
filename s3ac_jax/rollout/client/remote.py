"""Rollouts by rollout servers in other processes or on other machines, over gRPC."""

import collections
import json
import math
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from s3ac_jax.core.types import Prompt, PyTree, Rollout
from s3ac_jax.models.network import Network
from s3ac_jax.rollout import rollout_pb2 as pb
from s3ac_jax.rollout.assemble import Assembly, tally
from s3ac_jax.rollout.backend import RolloutError, Sampling, fingerprint_of
from s3ac_jax.rollout.client.fleet import Fleet
from s3ac_jax.rollout.client.fleet_server import Timing, to_stderr
from s3ac_jax.rollout.client.grpc_link import CONTROL_S, GenerateCall, GrpcLink, WeightsUpdate
from s3ac_jax.rollout.client.link import (
    CallFailed,
    Verdict,
    first_answers,
    raise_refusals,
    shown,
)
from s3ac_jax.rollout.local import check_request
from s3ac_jax.rollout.wire import ABORT, STOP, Requests, Responses, pack_requests

# Pieces that a server has at a time: it goes on with the others while one comes to its end.
_PIECES = 4
# A server that stands still for us is told to go on before we leave, if it answers this soon.
_LEAVE_S = 3.0


class RemoteRollout:
    """Rollouts by servers at `addresses` ("host:port"), several of which may die.

    network: the policy; its weights are cast to what decoding reads before they are sent.
    record_routing: ask the servers for the experts of each token. token: of the servers' users.
    tls_ca: file of the certificate that signed theirs; None for no encryption. max_in_flight:
    requests that one server has at a time. timeout_s: of one call, a weight update included.
    in_flight: responses in progress go on under new weights, their tokens say under which; False
    lets them end first, and a response of older weights than the current ones is an error. save:
    makes a checkpoint of weights and says where; servers then read them there, on a file system
    that they share. Without it the weights are streamed. copies: keep weights of one's own, for a
    caller that donates those it gave before it gives others. notice: takes a line for people, now
    and then, about servers that are away or take in weights.
    Responses do not depend on how many servers there are or which of them made what: every request
    has its own seed.
    Source: ours; the protocol is that of `rollout/backend.py`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        network: Network,
        max_prompt_tokens: int,
        max_response_tokens: int,
        record_routing: bool = False,
        token: str | None = None,
        tls_ca: str | None = None,
        max_in_flight: int = 512,
        timeout_s: float = 3600.0,
        timing: Timing = Timing(),  # noqa: B008 (frozen)
        in_flight: bool = False,
        save: Callable[[PyTree, int], str] | None = None,
        copies: bool = False,
        notice: Callable[[str], None] = to_stderr,
    ):
        if not addresses:
            raise RolloutError("no address of a rollout server: set rollout.addresses")
        self.network = network
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens
        self.routing_shape = network.spec.routing_shape if record_routing else None
        self.in_flight = in_flight
        self.save = save
        self._copies = copies
        self.version = -1
        self._fingerprint: str | None = None
        # Where the weights with the fingerprint `_saved` are: evaluation and the next tick have the
        # same, which need not be written twice.
        self._path: str | None = None
        self._saved: str | None = None
        self._counts = collections.Counter(requests=0, tokens=0, aborted=0)
        self._notice = notice
        self._links = [GrpcLink(address, token, tls_ca, timeout_s) for address in addresses]
        self._fleet = Fleet(self._links, max_in_flight=max_in_flight, timing=timing, notice=notice)

    def update_weights(self, params: PyTree, version: int) -> None:
        """Sends the weights of all later tokens to every server that can be reached.

        Servers that have the same weights already get the new version only. A server that comes
        back is sent them again: without `copies` the arrays must not be donated before the next
        update.
        Raises RolloutError when a server's fingerprint is another afterwards, when it refuses
        them, and when no server is to be had.
        Source: ours.
        """
        given, params = params, self.network.in_compute_dtype(params)
        if self._copies:
            params = jax.tree.map(_own, params, given)
        fingerprint = fingerprint_of(params)
        if self.save is not None and fingerprint != self._saved:
            self._path, self._saved = self.save(params, version), fingerprint
        weights = WeightsUpdate(params, version, fingerprint, self.in_flight, self._path)
        for link in self._links:
            link.weights = weights
        self._fleet.sync()
        self.version, self._fingerprint = version, fingerprint

    def adopt_weights(self) -> int:
        """Takes the weights that the servers have as the current ones; returns their version.

        Servers with others, now or later, are an error: nothing is sent to them. Waits for the
        first one to be there.
        Raises RolloutError when servers differ, refuse, or are not to be had. Source: ours.
        """
        answers = first_answers(
            "say which weights they have",
            lambda: self._ask("Stats", lambda link: link.call("Stats", pb.Empty(), CONTROL_S)),
            self._fleet.timing.patience, self._notice,
        )  # fmt: skip
        found = {address: json.loads(reply.json) for address, reply in answers.items()}
        have = {(one["fingerprint"], one["version"]) for one in found.values()}
        if len(have) > 1:
            each = ", ".join(
                f"{address} has {one['fingerprint']} (version {one['version']})"
                for address, one in found.items()
            )
            raise RolloutError(f"the rollout servers have different weights: {each}")
        (self._fingerprint, self.version), *_ = have
        for link in self._links:
            link.weights = WeightsUpdate(None, self.version, self._fingerprint, False, None)
        return self.version

    def generate(self, prompt: Prompt, sampling: Sampling, *, keep_routing: bool = True) -> Rollout:
        """One response for each of the B prompts, in their order.

        keep_routing: False asks for no experts. Samples of one prompt go to one server, which
        reads the prompt once.
        Raises ValueError when a prompt or a limit exceeds what the rollout was built for, and
        RolloutError before the first `update_weights`, after `close`, when a server refuses a
        request and when none is to be had.
        Source: ours.
        """
        if self._fingerprint is None:
            raise RolloutError(
                "no weights: call update_weights(params, version) first, or adopt_weights()"
            )
        check_request(prompt, sampling, self.max_prompt_tokens, self.max_response_tokens)
        shape = self.routing_shape if keep_routing else None
        works = self._pieces(prompt, sampling, shape is not None)
        results = self._fleet.run(works, [len(work.rows) for work in works])
        made = Assembly(prompt, self.max_response_tokens, shape)
        for work, responses in zip(works, results, strict=True):
            if responses is not None:
                self._put(made, work.rows, responses, sampling)
        rollout = made.finish()
        self._counts.update(tally(rollout))
        return rollout

    def _pieces(self, prompt: Prompt, sampling: Sampling, want_routing: bool) -> list[GenerateCall]:
        """Whole groups of requests with one prompt, longest prompts first."""
        tokens = np.asarray(prompt.tokens, np.int32)
        lengths = np.asarray(prompt.num_tokens, np.int32)
        groups: dict[bytes, list[int]] = {}
        for row, length in enumerate(lengths):
            groups.setdefault(tokens[row, :length].tobytes(), []).append(row)
        most = self._fleet.max_in_flight
        parts = [
            rows[start : start + most]
            for rows in sorted(groups.values(), key=lambda rows: -lengths[rows[0]])
            for start in range(0, len(rows), most)
        ]
        share = math.ceil(len(lengths) / (_PIECES * len(self._links)))
        size = max(1, min(share, most // _PIECES))
        pieces: list[list[list[int]]] = [[]]
        for part in parts:
            if pieces[-1] and sum(map(len, pieces[-1])) + len(part) > size:
                pieces.append([])
            pieces[-1].append(part)
        works, name = [], uuid.uuid4().hex
        for number, piece in enumerate(pieces):
            rows = np.concatenate([np.asarray(part, np.int64) for part in piece or [[]]])
            first = [part[0] for part in piece]
            requests = Requests(
                tokens=np.concatenate(
                    [tokens[row, : lengths[row]] for row in first] or [tokens[0:0, 0]]
                ),
                lengths=lengths[first],
                prompt_row=np.repeat(np.arange(len(piece)), [len(part) for part in piece]),
                sampling=Sampling(*(np.asarray(field)[rows] for field in sampling)),
                want_routing=want_routing,
                request_id=f"{name}-{number}",
            )
            works.append(GenerateCall(rows, pack_requests(requests)))
        return works

    def _put(
        self, made: Assembly, rows: np.ndarray, responses: Responses, sampling: Sampling
    ) -> None:
        """Writes the responses to requests `rows` into `made`."""
        count = responses.num_tokens
        least = (responses.finish != ABORT).astype(int)
        if (count < least).any() or (count > sampling.max_tokens[rows]).any():
            raise RolloutError("a rollout server made a response of another length than asked for")
        vocab = self.network.spec.vocab_size
        if ((responses.tokens < 0) | (responses.tokens >= vocab)).any():
            raise RolloutError(f"a rollout server made a token outside 0..{vocab - 1}")
        made.put(
            rows, count, tokens=responses.tokens, logp=responses.logp, version=responses.version,
            stopped=responses.finish == STOP, aborted=responses.finish == ABORT,
        )  # fmt: skip
        if made.routing is not None:
            whole = np.asarray(made.prompt.num_tokens)[rows] + count
            want = (int(whole.sum()), *made.routing.shape[2:])
            if responses.routing is None or responses.routing.shape != want:
                found = None if responses.routing is None else list(responses.routing.shape)
                raise RolloutError(
                    f"a rollout server recorded experts of shape {found}, {list(want)} needed: "
                    "start it with the trainer's config"
                )
            among, place = np.nonzero(np.arange(made.routing.shape[1]) < whole[:, None])
            made.routing[rows[among], place] = responses.routing

    def rest(self) -> None:
        """Nothing: what servers hold is not on the trainer's devices. Source: ours."""

    def abort(self) -> None:
        """From another thread: a call in progress returns with what there is. Source: ours."""
        self._fleet.abort()

    def pause(self) -> None:
        """From another thread: the servers make no token until `resume`, for anybody.

        Raises RolloutError naming the servers that would not; the others stand still then, and
        nothing more is sent. One that can't be reached is none that makes tokens for us.
        Source: ours.
        """
        self._fleet.pause()
        self._tell("pause", "Pause", lambda link: link.hold())

    def resume(self) -> None:
        """Ends a pause. Raises RolloutError naming the servers that would not; those that can't
        be reached are told when they are there again.

        Source: ours.
        """
        try:
            self._tell("resume", "Resume", lambda link: link.go_on())
        finally:
            for link in self._links:
                link.paused = False
            self._fleet.resume()

    def _tell(self, what: str, name: str, call: Callable[[GrpcLink], Any]) -> None:
        for line in raise_refusals(what, self._ask(name, call)):
            self._notice(f"rollout server {line}")

    def _ask(self, name: str, call: Callable[[GrpcLink], Any]) -> dict[str, Any]:
        """One call to every server at once: what each answered, or a CallFailed."""
        calls: dict[GrpcLink, Any] = {}
        for link in self._links:
            try:
                calls[link] = call(link)
            except RolloutError as error:
                calls[link] = CallFailed(Verdict.FATAL, str(error))
        return {
            link.address: one if isinstance(one, CallFailed) else link.told(name, one)
            for link, one in calls.items()
        }

    def stats(self) -> dict[str, Any]:
        """Counts of this client, the weights' version and fingerprint, and what each server says.

        servers: statistics by address; {"error": line} for one that can't be reached, as after
        `close`.
        Source: ours.
        """
        answers = self._ask("Stats", lambda link: link.call("Stats", pb.Empty(), CONTROL_S))
        return {
            **self._counts,
            **self._fleet.counts,
            "pushed_bytes": sum(link.pushed_bytes for link in self._links),
            "version": self.version,
            "fingerprint": self._fingerprint,
            "servers": {
                address: found if isinstance(found, dict) else json.loads(found.json)
                for address, found in shown(answers).items()
            },
        }

    def close(self) -> None:
        """Cancels what is in flight and ends the connections; servers that stand still for us go
        on.

        Source: ours.
        """
        self._fleet.close()
        calls = [(link, link.go_on(_LEAVE_S)) for link in self._links if link.paused]
        for link, call in calls:
            link.told("Resume", call)
        for link in self._links:
            link.weights, link.paused = None, False
            link.close()


def _own(cast: Any, given: Any) -> Any:
    """An array that is not the one that was given; where a cast has nothing to do, it may be."""
    return jnp.copy(cast) if cast.dtype == given.dtype else cast
