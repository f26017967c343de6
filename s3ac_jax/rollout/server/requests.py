"""Requests on their way into the slots: what is refused, and what a driver keeps of each."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from s3ac_jax.rollout.backend import Sampling
from s3ac_jax.rollout.jetstream import orchestrator
from s3ac_jax.rollout.limits import Limits, prompt_fault, settings_fault
from s3ac_jax.rollout.server.sinks import BadRequest, Sink
from s3ac_jax.rollout.wire import Requests


def check_requests(requests: Requests, limits: Limits) -> None:
    """Raises BadRequest, naming the first request or prompt that is out of range, and its limit.

    Source: ours.
    """
    tokens, lengths, row, sampling = requests[:4]
    fault = prompt_fault(lengths, tokens, limits)
    fault = fault or settings_fault(sampling, limits.cache_tokens - lengths[row])
    if fault is not None:
        raise BadRequest(str(fault))


@dataclasses.dataclass(eq=False)
class Job(orchestrator.ActiveRequest):
    """A prompt and the responses asked for it: n rows of settings, one prefill, n slots.

    samples: their numbers in the sink. begun: how many have got a slot so far. left: how many
    have not been delivered. prefix_row: of the prompt in `prefill_result`.
    Source: JetStream's ActiveRequest (orchestrator.py, 0.2.2).
    """

    max_tokens: int = 0
    return_channel: Any = None
    prompt: Any = None
    sampling: Any = None
    sink: Any = None
    samples: Any = None
    request_id: str = ""
    want_routing: bool = False
    begun: int = 0
    left: int = 0
    cancelled: bool = False
    prefix_row: int = 0

    # The parent's own would call two jobs equal, and `queue.remove` would take the wrong one.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def rows(self) -> int:
        """Responses asked for. Source: ours."""
        return len(self.samples)


class Handle:
    """A submission, for those who may lose interest in it. version: of the weights at its taking.

    Source: ours.
    """

    def __init__(self, jobs: list[Job], cancel: Callable[[list[Job]], int], version: int):
        self._jobs, self._cancel, self.version = jobs, cancel, version

    def cancel(self, _: Any = None) -> None:
        """Ends its responses as they are; the argument is gRPC's, whose callbacks get one.

        Source: ours.
        """
        self._cancel(self._jobs)


def samples_of(prompt: Sequence[int], sampling: Sampling, n: int, request_id: str) -> Requests:
    """n responses to one prompt; settings in one row, whose seed counts on.

    Raises BadRequest when there is nothing to do. Source: ours.
    """
    if n < 1:
        raise BadRequest(f"the number of samples must be >= 1, got {n}")
    every = Sampling(*(np.repeat(field, n, axis=0) for field in map(np.asarray, sampling)))
    every = every._replace(seed=every.seed + np.arange(n, dtype=np.uint32))
    tokens = np.asarray(prompt, np.int32)
    lengths = np.array([len(tokens)], np.int32)
    return Requests(tokens, lengths, np.zeros(n, np.int32), every, request_id=request_id)


def to_jobs(requests: Requests, sink: Sink) -> list[Job]:
    """One job per prompt that is asked for, longest prompts first.

    Long responses, which long prompts tend to have, then do not all begin last.
    Source: ours.
    """
    ends = np.cumsum(requests.lengths)
    order = np.argsort(requests.prompt_row, kind="stable")
    prompts, first = np.unique(requests.prompt_row[order], return_index=True)
    jobs = []
    for prompt, samples in zip(prompts, np.split(order, first[1:]), strict=True):
        end = ends[prompt]
        tokens: Int32[np.ndarray, "T"] = requests.tokens[end - requests.lengths[prompt] : end]
        jobs.append(
            Job(
                prompt=tokens,
                sampling=Sampling(*(field[samples] for field in requests.sampling)), sink=sink,
                samples=samples.tolist(), request_id=requests.request_id,
                want_routing=requests.want_routing, left=len(samples),
            )
        )  # fmt: skip
    return sorted(jobs, key=lambda job: -len(job.prompt))
