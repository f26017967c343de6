"""The trainer's side of grading: what it can decide itself, and processes for the rest.

Algebra on model output can hang, take all memory or crash, so it never happens in the trainer. The
pool starts one supervisor (supervisor.py), which forks and ends workers; not multiprocessing, whose
children run the trainer's main module again, with jax in it. Nothing that comes back is unpickled.
"""

import collections
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from s3ac_jax.rewards import math_answers
from s3ac_jax.rewards.extract import final_answer
from s3ac_jax.rewards.link import Link, Lost
from s3ac_jax.rewards.supervisor import IMPORT_SECONDS, WALL
from s3ac_jax.rewards.verdict import REASONS, GraderError, Verdict

_CACHED = 1 << 16
# Seconds beyond a worker's own limit after which the supervisor counts as stuck.
_MARGIN = 30.0
# Supervisors lost one after the other, without a verdict in between, before a batch is given up.
_RESTARTS = 3
# A batch of so many that a user's function raises on all of is a bug in the function.
_BUG = 8
Item = tuple[str, str, str]


class GraderPool:
    """Grades responses with up to `workers` processes, which start when first needed.

    deadline_seconds: of CPU time per item; five times that of wall time. An item that is not
    finished then is wrong, with the reason "deadline". A worker may take 2 GiB of address space
    beyond what math-verify takes, a user's imports included.
    Any thread may call it, one batch at a time. Close it, or let it be collected: its processes end
    with it, and with this process however that ends.
    Source: ours.
    """

    def __init__(self, workers: int = 2, deadline_seconds: float = 2.0):
        if workers < 1 or not deadline_seconds > 0:
            raise GraderError(
                f"GraderPool(workers={workers}, deadline_seconds={deadline_seconds}): "
                "both have to be positive"
            )
        self.workers, self.deadline = workers, deadline_seconds
        self.counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[Item, tuple[bool, str]] = collections.OrderedDict()
        self._checked: set[str] = set()
        self._number = 0
        self._link: Link | None = None
        self._closed = False

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def start(self) -> None:
        """Starts the processes in the background, a few seconds before they are needed.

        Source: ours.
        """
        with self._lock:
            self._connect()

    def check(self, kinds: Iterable[str]) -> None:
        """Raises GraderError for a kind that nobody can grade, before there are responses.

        A user's function has to be there, which starts the processes. Source: ours.
        """
        own = []
        for kind in dict.fromkeys(kinds):
            if ":" in kind:
                own.append(kind)
            else:
                _known_kind(kind)
        with self._lock:
            for kind in own:
                if kind not in self._checked:
                    self._check(kind)

    def check_algebra(self) -> None:
        """Raises GraderError where math-verify is missing; waits for the processes to be there.

        Source: ours: which answers need it is only known when they are given.
        """
        with self._lock:
            try:
                self._need_algebra(self._connect(), [{"kind": "math"}])
            except Lost:
                self._drop()  # who grades starts them again, or says that they do not start

    def close(self) -> None:
        """Ends the processes; twice is fine. Source: ours."""
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.end()
                self._link = None

    def grade(self, items: Sequence[Item]) -> list[Verdict]:
        """The verdicts on (response, gold, kind), in order.

        kind: "math", "choice", or "module:function" for a user's f(response, gold) -> bool.
        Raises GraderError where grading itself is broken, never for what a response holds.
        Source: ours.
        """
        verdicts: list[Verdict | None] = []
        open_items: list[tuple[int, Item]] = []
        for place, (response, gold, kind) in enumerate(items):
            verdict = None
            if ":" in kind:
                open_items.append((place, (response, gold, kind)))
            else:
                _known_kind(kind)
                verdict = math_answers.decide(response, gold, kind=kind)
                if verdict is None:
                    answer = final_answer(response, kind)[0] or ""
                    open_items.append((place, (answer, gold, kind)))
            verdicts.append(verdict)
        for place, verdict in zip(
            (place for place, _ in open_items),
            self._ask([item for _, item in open_items]),
            strict=True,
        ):
            verdicts[place] = verdict
        done = [verdict for verdict in verdicts if verdict is not None]
        with self._lock:
            self.counts.update(verdict.reason for verdict in done)
        return done

    def same(self, pairs: Sequence[tuple[str, str]], kind: str = "math") -> list[bool]:
        """Is each pair of extracted answers one answer? Either may be the right one.

        Source: ours: the comparison of a right answer with another has a direction (28 % and 28),
        equality has none. A user's function only knows responses, so its answers are mathematics.
        """
        kind = "math" if ":" in kind else kind
        _known_kind(kind)
        results: list[bool | None] = []
        asked: list[Item] = []
        for first, second in pairs:
            found = [math_answers.judge(first, second, kind)[0]]
            if not found[0]:
                found.append(math_answers.judge(second, first, kind)[0])
            results.append(True if True in found else None if None in found else False)
            if results[-1] is None:
                asked += [(first, second, kind), (second, first, kind)]
        replies = iter(self._ask(asked))
        return [
            next(replies).correct | next(replies).correct if result is None else result
            for result in results
        ]

    def _ask(self, items: list[Item]) -> list[Verdict]:
        """Verdicts of the workers; an answer is asked about once, however often it comes."""
        if not items:
            return []
        with self._lock:
            for kind in {kind for _, _, kind in items if ":" in kind} - self._checked:
                self._check(kind)
            done = {item: Verdict(*self._known[item], 0.0) for item in items if item in self._known}
            new = [item for item in dict.fromkeys(items) if item not in done]
            replies = self._exchange(
                [dict(zip(("response", "gold", "kind"), item, strict=True)) for item in new]
            )
            _report_bug(new, replies)
            for item, reply in zip(new, replies, strict=True):
                verdict = done[item] = _verdict(reply)
                # A worker that someone ended says nothing about the answer.
                if ":" not in item[2] and verdict.reason != "died":
                    self._known[item] = verdict.correct, verdict.reason
                    if len(self._known) > _CACHED:
                        self._known.popitem(last=False)
            return [done[item] for item in items]

    def _check(self, kind: str) -> None:
        """Refuses a user's grader that is not there, before anything is graded."""
        reply = self._exchange([{"kind": kind}])[0]
        if fault := reply.get("missing") or reply.get("reason"):
            raise GraderError(
                f"grader {kind}: {fault}; it has to name a module that can be imported from "
                f"{os.getcwd()} and a function f(response, gold) -> bool in it"
            )
        self._checked.add(kind)

    def _exchange(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The replies to `messages`, in order, over as many supervisors as that takes."""
        first = self._number
        self._number += len(messages)
        waiting = collections.deque(
            {"id": first + place, **message} for place, message in enumerate(messages)
        )
        sent: dict[int, dict[str, Any]] = {}
        replies: dict[int, dict[str, Any]] = {}
        lost = 0
        imports = any(":" in message["kind"] for message in messages)
        patience = WALL * self.deadline + _MARGIN + (IMPORT_SECONDS if imports else 0.0)
        try:
            while waiting or sent:
                try:
                    link = self._connect()
                    self._need_algebra(link, messages)
                    # A short queue, so that neither side ever waits for the other to read.
                    while waiting and len(sent) < 2 * self.workers + 2:
                        message = waiting.popleft()
                        sent[message["id"]] = message
                        link.send(message)
                    reply = link.receive(patience)
                    number = reply.get("id")
                    if number in sent:
                        del sent[number]
                        replies[number] = reply
                        lost = 0
                except Lost:
                    self._drop()
                    lost += 1
                    if lost > _RESTARTS:
                        raise GraderError(
                            f"the grading process ended {lost} times in a row; its last words are "
                            "above, if it had any"
                        ) from None
                    waiting.extendleft(reversed(sent.values()))
                    sent.clear()
        except BaseException:
            # Half a conversation is no start for the next one.
            self._drop()
            raise
        return [replies[first + place] for place in range(len(messages))]

    def _connect(self) -> Link:
        if self._closed:
            raise GraderError("this GraderPool is closed; make a new one")
        if self._link is None:
            self._link = Link(self.workers, self.deadline)
        return self._link

    def _drop(self) -> None:
        if self._link is not None:
            self._link.end()
            self._link = None

    @staticmethod
    def _need_algebra(link: Link, messages: list[dict[str, Any]]) -> None:
        missing = link.ready()
        if missing and any(":" not in message["kind"] for message in messages):
            raise GraderError(
                f"answers that are no plain numbers need math-verify ({missing}): "
                "pip install 's3ac-jax[grade]'"
            )


def _known_kind(kind: str) -> None:
    if kind not in ("math", "choice"):
        raise GraderError(
            f"there is no kind of answer {kind!r}; it is math, choice, or a grader of your own as "
            "module:function"
        )


def _verdict(reply: dict[str, Any]) -> Verdict:
    """A reply as a verdict; anything odd in it is a wrong answer."""
    reason, seconds = reply.get("reason"), reply.get("seconds")
    if reason not in REASONS or not isinstance(seconds, float):
        return Verdict(False, "error", 0.0)
    return Verdict(reply.get("correct") is True, reason, seconds)


def _report_bug(items: list[Item], replies: list[dict[str, Any]]) -> None:
    """Raises GraderError where a user's function failed on every item of a batch."""
    for kind in {kind for _, _, kind in items if ":" in kind}:
        own = [reply for item, reply in zip(items, replies, strict=True) if item[2] == kind]
        if len(own) >= _BUG and all(reply.get("reason") == "grader_error" for reply in own):
            raise GraderError(
                f"grader {kind} failed on all {len(own)} responses of a batch, with "
                f"{own[0].get('detail')}"
            )
