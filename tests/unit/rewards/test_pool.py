"""The pool under all that can happen to it: bombs, kills, leaks, threads, users' functions."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from s3ac_jax.rewards.pool import GraderPool
from s3ac_jax.rewards.verdict import REASONS, GraderError

pytest.importorskip("math_verify", reason="needs the extra grade")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up as Linux does")

GOLDEN = Path(__file__).parents[2] / "golden"
ROOT = Path(__file__).resolve().parents[3]
GOLD = r"8\sqrt{6}"
ALGEBRA = (r"\boxed{\sqrt{384}}", GOLD, "math")
ADVERSARIAL = [
    r"\boxed{10^{10^{10}}}", r"\boxed{9^{9^{9^9}}}", r"\boxed{(10^9)!}", r"\boxed{9999999!}",
    r"\boxed{\sum_{k=1}^{10^9} k}", r"\boxed{\prod_{k=1}^{1000000} k^k}",
    r"\boxed{(x+y+z+w)^{200}-(x+y+z+w+1)^{200}}", r"\boxed{\log(\log(\log(10^{10^{10}})))}",
    r"\boxed{" + r"\sqrt{" * 100 + "2" + "}" * 100 + "}", r"\boxed{" + "(" * 3000 + "}",
    r"\boxed{" + "7" * 200_000 + "}", "{" * 1_000_000, "\\boxed{\0}", "\\boxed{\ud800}",
    r"\boxed{__import__('os').system('touch executed')}", r"\boxed{eval('open(\"run\",\"w\")')}",
    r"\boxed{8\sqrt{6}+(x-x)(x+1)^{300}}", r"\boxed{(8\sqrt{6}+\sqrt{2}-\sqrt{2})^{3000}}",
    r"\boxed{\frac{8\sqrt{6}\cdot 2000!}{2000!}}", r"\boxed{10^{10^{10}} \bmod 7}",
]  # fmt: skip
GRADERS = """
import os, time

def right(response, gold):
    print("a line on standard output")
    return response == gold

def spins(response, gold):
    while True:
        pass

def sleeps(response, gold):
    time.sleep(1000)

def slow(response, gold):
    with open("graders.log", "a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\\n")
    time.sleep(0.3)
    return True

def allocates(response, gold):
    return len(bytearray(8 << 30)) > 0

def leaves(response, gold):
    os._exit(3)

def raises(response, gold):
    raise KeyError(gold)

def other(response, gold):
    return 0.5

number = 5
"""


@pytest.fixture(scope="module")
def graders(tmp_path_factory):
    """A folder with a user's module, as the working directory."""
    folder = tmp_path_factory.mktemp("graders")
    (folder / "own_graders.py").write_text(GRADERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def pool(graders):
    """One pool for what leaves it whole, with a short deadline."""
    with GraderPool(2, deadline_seconds=0.5) as pool:
        yield pool


def descendants(pid: int) -> set[int]:
    """Processes below `pid` that are alive."""
    done = subprocess.run(
        ["ps", "-eo", "pid,ppid,stat"], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    above = {int(row[0]): int(row[1]) for row in rows if not row[2].startswith("Z")}
    below: set[int] = set()
    level = {pid}
    while level:
        level = {one for one, parent in above.items() if parent in level}
        below |= level
    return below


def command(pid: int) -> bytes:
    """Its command line; empty for a zombie and for one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def graders_of(pid: int) -> set[int]:
    """The supervisors below `pid` and their workers."""
    return {one for one in descendants(pid) if b"rewards.supervisor" in command(one)}


def gone(pids: set[int], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(map(command, pids)):
            return True
        time.sleep(0.05)
    return False


def test_numbers_take_no_process():
    before = graders_of(os.getpid())
    with GraderPool(2) as pool:
        verdicts = pool.grade([(r"\boxed{5}", "5", "math"), ("5", "5", "math")])
        assert [verdict.correct for verdict in verdicts] == [True, False]
        assert graders_of(os.getpid()) == before
        assert pool.counts == {"string": 1, "no_box": 1}


def test_the_table_of_pairs(pool):
    pairs = [
        json.loads(line) for line in (GOLDEN / "verifier_pairs.jsonl").read_text().splitlines()
    ]
    verdicts = pool.grade([(pair["response"], pair["gold"], pair["kind"]) for pair in pairs])
    found = {pair["id"]: verdict.correct for pair, verdict in zip(pairs, verdicts, strict=True)}
    assert found == {pair["id"]: pair["expected"] for pair in pairs}


def test_eight_hundred_items_with_twenty_bombs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    items = [(text, GOLD, "math") for text in ADVERSARIAL]
    items += [(rf"\boxed{{{n}}}", str(n), "math") for n in range(700)]
    items += [(rf"\boxed{{(x+{n})^2}}", rf"x^2+{2 * n}x+{n * n}", "math") for n in range(80)]
    started, before = time.monotonic(), graders_of(os.getpid())
    with GraderPool(2) as pool:
        verdicts = pool.grade(items)
        seconds = time.monotonic() - started
        processes = graders_of(os.getpid()) - before
        assert len(processes) == 3
    assert seconds < 60
    assert not any(verdict.correct for verdict in verdicts[:20])
    assert all(verdict.correct for verdict in verdicts[20:])
    assert {verdict.reason for verdict in verdicts} <= set(REASONS)
    assert gone(processes)
    assert list(tmp_path.iterdir()) == []


def test_an_answer_is_asked_about_once(pool):
    item = (r"\boxed{\sqrt{54}}", r"3\sqrt{6}", "math")
    first, second = pool.grade([item]), pool.grade([item])
    assert first[0].correct
    assert first[0].seconds > 0
    assert second[0].correct
    assert second[0].seconds == 0


def test_same_goes_either_way(pool):
    pairs = [("28", "28%"), ("0.28", "28%"), ("1/2", "0.5"), (r"\sqrt{8}", r"2\sqrt{2}"),
             ("3", "4"), (r"2\sqrt{2}", r"\sqrt{8}"), ("x+1", "x+2"), ("", "")]  # fmt: skip
    assert pool.same(pairs) == [True, True, True, True, False, True, False, False]
    assert pool.same([("B", "(B)"), ("A", "B")], kind="choice") == [True, False]


@pytest.mark.parametrize(
    ("name", "reason", "limit"),
    [("spins", "deadline", 15), ("sleeps", "deadline", 15), ("allocates", "memory", 15),
     ("leaves", "died", 15), ("raises", "grader_error", 15), ("other", "grader_error", 15)],
)  # fmt: skip
def test_what_a_users_function_may_do(pool, name, reason, limit):
    kind, counted = f"own_graders:{name}", pool.counts.copy()
    started = time.monotonic()
    verdicts = pool.grade([("4", "4", kind), ("5", "5", "own_graders:right")])
    assert time.monotonic() - started < limit
    assert (verdicts[0].correct, verdicts[0].reason) == (False, reason)
    assert (verdicts[1].correct, verdicts[1].reason) == (True, "grader")
    assert pool.counts - counted == {reason: 1, "grader": 1}


def test_a_function_that_always_fails_is_a_bug(pool):
    items = [(str(n), "gold", "own_graders:raises") for n in range(8)]
    with pytest.raises(GraderError, match=r"own_graders:raises failed on all 8.*KeyError"):
        pool.grade(items)
    assert pool.grade([("a", "a", "own_graders:right")])[0].correct


@pytest.mark.parametrize(
    ("kind", "words"),
    [("nowhere_at_all:f", "No module named 'nowhere_at_all'"), ("own_graders:nothing", "nothing"),
     ("own_graders:number", "number is no function"), ("maths", "there is no kind of answer")],
)  # fmt: skip
def test_a_grader_that_is_not_there(pool, kind, words):
    with pytest.raises(GraderError, match=words):
        pool.grade([("4", "4", kind)])


def test_without_math_verify(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no math_verify here')")
    monkeypatch.syspath_prepend(tmp_path)
    with GraderPool(1) as pool:
        assert pool.grade([(r"\boxed{4}", "4", "math")])[0].correct
        with pytest.raises(
            GraderError, match=r"no math_verify here.*pip install 's3ac-jax\[grade\]'"
        ):
            pool.grade([ALGEBRA])


def in_background(pool: GraderPool, items: list) -> tuple[threading.Thread, list]:
    verdicts: list = []
    thread = threading.Thread(target=lambda: verdicts.extend(pool.grade(items)))
    thread.start()
    return thread, verdicts


def log_lines(folder: Path, count: int) -> list[list[int]]:
    """The first `count` lines (worker, supervisor) of the slow grader, once they are there."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        log = folder / "graders.log"
        lines = log.read_text().splitlines() if log.exists() else []
        if len(lines) >= count:
            return [list(map(int, line.split())) for line in lines]
        time.sleep(0.02)
    raise AssertionError("the grader never ran")


@pytest.mark.parametrize("column", [0, 1], ids=["worker", "supervisor"])
def test_killed_in_mid_item(pool, graders, column):
    (graders / "graders.log").unlink(missing_ok=True)
    items = [(str(n), "gold", "own_graders:slow") for n in range(6)]
    thread, verdicts = in_background(pool, items)
    victim = log_lines(graders, 2)[1][column]
    os.kill(victim, signal.SIGKILL)
    thread.join(60)
    assert [verdict.correct for verdict in verdicts] == [True] * 6
    processes = graders_of(os.getpid())
    assert victim not in processes
    assert len(processes) == 3


def test_any_thread_may_grade(pool):
    threads = [in_background(pool, [ALGEBRA, (rf"\boxed{{({n}+x)x}}", f"{n}x+x^2", "math")])
               for n in range(8)]  # fmt: skip
    for thread, _ in threads:
        thread.join(60)
    assert [[verdict.correct for verdict in found] for _, found in threads] == [[True, True]] * 8


def test_collected_pools_leave_nothing():
    before, pool = graders_of(os.getpid()), GraderPool(1)
    pool.start()
    pool.grade([ALGEBRA])
    processes = graders_of(os.getpid()) - before
    assert processes
    del pool
    gc.collect()
    assert gone(processes)


def test_a_closed_pool_says_so():
    pool = GraderPool(1)
    pool.close()
    pool.close()
    with pytest.raises(GraderError, match="closed"):
        pool.grade([ALGEBRA])


TRAINER = """
import sys, time
from s3ac_jax.rewards.pool import GraderPool
pool = GraderPool(2)
pool.grade([(r"\\boxed{\\sqrt{384}}", r"8\\sqrt{6}", "math")])
print("graded", flush=True)
if sys.argv[1] == "raise":
    raise SystemExit("an exception")
time.sleep(1000)
"""


@pytest.mark.parametrize("end", ["kill", "terminate", "raise"])
def test_nothing_outlives_the_trainer(end):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, end],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
    )  # fmt: skip
    assert trainer.stdout is not None
    with trainer:
        assert trainer.stdout.readline() == "graded\n"
        processes = graders_of(trainer.pid)
        if end != "raise":
            assert len(processes) == 2
            getattr(trainer, end)()
    assert gone(processes)


def test_workers_end_with_a_killed_supervisor():
    before = graders_of(os.getpid())
    with GraderPool(1) as pool:
        pool.grade([ALGEBRA])
        processes = graders_of(os.getpid()) - before
        supervisor = next(pid for pid in processes if processes - {pid} <= descendants(pid))
        os.kill(supervisor, signal.SIGKILL)
        assert gone(processes - {supervisor})
        assert pool.grade([(r"\boxed{\sqrt{24}}", r"2\sqrt6", "math")])[0].correct


def test_kinds_are_checked_before_there_are_responses(graders):
    with GraderPool(1) as pool:
        pool.check(["math", "choice"])
        assert pool._link is None  # nothing had to be started
        with pytest.raises(GraderError, match="no kind of answer 'maths'"):
            pool.check(["math", "maths"])
        with pytest.raises(GraderError, match="grader own_graders:number: number is no function"):
            pool.check(["own_graders:right", "own_graders:number"])
        pool.check(["own_graders:right"])
        pool.check_algebra()


def test_absent_algebra_is_told_before_there_are_responses(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no math_verify here')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with GraderPool(1) as pool, pytest.raises(GraderError, match=r"no math_verify here.*pip inst"):
        pool.check_algebra()
