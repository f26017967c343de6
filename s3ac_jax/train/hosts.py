"""Several processes of one run, one per host: how they join, go on together, and end together.

Whatever ends one of them ends all, with the same line: the first one leaves it with jax's
coordination service, where the others look every second. A process that can't leave a word any
more is missed by its heartbeat; then jax ends the others, and `supervise` says so.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from s3ac_jax.config.flags import CommandLineError
from s3ac_jax.core.errors import RunError
from s3ac_jax.parallel import hosts
from s3ac_jax.parallel.hosts import HostError
from s3ac_jax.train.supervise import Link, link_to_supervisor, supervise

_ENDED, _HEARD = "s3ac/ended/", "s3ac/heard/"
_LOOK_SECONDS = 1.0
# Process 0 keeps the words of the others: it leaves when they have heard, or after so long.
_HEARD_WITHIN_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Wanted:
    """How this process finds the others. distributed: by what the cluster tells.

    heartbeat_s: not heard of for so long, a process is lost and all end. join_s: how long all may
    take to come.
    Raises CommandLineError on a combination that can't be.
    Source: ours; jax.distributed.
    """

    distributed: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat_s: int = 60
    join_s: int = 300

    def __post_init__(self):
        given = [
            name for name in ("coordinator", "num_processes", "process_id")
            if getattr(self, name) is not None
        ]  # fmt: skip
        if self.distributed and given:
            raise CommandLineError(
                f"--distributed finds the others by itself; leave it out, or --{given[0]}"
            )
        if given and (self.coordinator is None or self.num_processes is None):
            raise CommandLineError(
                "--coordinator=HOST:PORT, --num_processes and --process_id go together, and "
                "--distributed finds them by itself"
            )
        if not given:
            return
        host, colon, port = str(self.coordinator).rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise CommandLineError(f"--coordinator must be HOST:PORT, got {self.coordinator!r}")
        number = self.num_processes or 0
        if number < 1:
            raise CommandLineError(f"--num_processes must be at least 1, got {number}")
        if self.process_id is None or not 0 <= self.process_id < number:
            raise CommandLineError(
                f"--process_id must be in 0..{number - 1} (--num_processes={number}), got "
                f"{self.process_id}"
            )

    @property
    def several(self) -> bool:
        """Whether this process is to join others. Source: ours."""
        return self.distributed or self.coordinator is not None


def run_on_hosts(wanted: Wanted, workdir: str, main: Callable[[], Any]) -> None:
    """main(), in a process that has joined the others where that is wanted.

    Raises what main raises; of several processes, a RunError of the same line in each of them.
    Source: ours.
    """
    if not wanted.several:
        main()
        return
    link = link_to_supervisor()
    if link is None:
        supervise(workdir, wanted.heartbeat_s, wanted.join_s, wanted.coordinator)
    else:
        _Member(wanted, link).run(main)


class _Member:
    """One process of several."""

    def __init__(self, wanted: Wanted, link: Link):
        self._wanted, self._link = wanted, link
        self._leaving = threading.Lock()

    def run(self, main: Callable[[], Any]) -> None:
        try:
            self._join()
            threading.Thread(target=self._listen, daemon=True).start()
            main()
            # Nobody leaves while another may still fail.
            hosts.exchange("end", b"")
        except BaseException as error:
            self._end(error)
        with self._leaving:
            jax.distributed.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            # Threads of jax may wait for each other at the interpreter's end.
            os._exit(0)

    def _join(self) -> None:
        wanted = self._wanted
        self._link.tell(joining={"process_id": wanted.process_id})
        # Its signal handler would take SIGTERM away from ours.
        jax.config.update("jax_enable_preemption_service", False)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if wanted.process_id == 0:
            _check_port(str(wanted.coordinator))
        try:
            jax.distributed.initialize(
                wanted.coordinator,
                wanted.num_processes,
                wanted.process_id,
                initialization_timeout=wanted.join_s,
                heartbeat_timeout_seconds=wanted.heartbeat_s,
                shutdown_timeout_seconds=wanted.heartbeat_s,
                # Given by hand, they are not looked for.
                cluster_detection_method=None if wanted.distributed else "deactivate",
            )
        except (ValueError, RuntimeError) as error:
            if wanted.distributed:
                raise HostError(
                    f"--distributed found no cluster that it knows (Cloud TPU, GKE, SLURM, MPI): "
                    f"{_first_line(error)}; give --coordinator, --num_processes and --process_id"
                ) from error
            raise
        self._link.tell(joined=f"{hosts.index()} of {hosts.count()}")
        _check_numbers()

    def _listen(self) -> None:
        client = hosts.service()
        while True:
            time.sleep(_LOOK_SECONDS)
            try:
                told = client.key_value_dir_get(_ENDED)
            except Exception:
                return  # process 0 is gone, of which jax takes care, or this one is ending
            if told:
                self._leave(json.loads(min(told)[1]))

    def _end(self, error: BaseException) -> NoReturn:
        if _may_be_anothers(error) and hosts.count() > 1:
            # If a process was lost, or ended with a word, this process is ended here.
            time.sleep(self._wanted.heartbeat_s + 2 * _HEARD_WITHIN_SECONDS)
        if isinstance(error, KeyboardInterrupt):
            told = {
                "line": "stopped at once; the same command goes on from what is saved",
                "code": 130,
            }
        elif isinstance(error, RunError):
            told = {"line": " ".join(str(error).split()), "code": error.exit_code}
            if any(word in ("--traceback", "--traceback=true") for word in sys.argv):
                traceback.print_exception(error)
        else:
            traceback.print_exception(error)
            told = {
                "line": f"process {hosts.index()} ended with {type(error).__name__}: "
                f"{_first_line(error)}; its traceback is in its own output",
                "code": 1,
            }
        self._leave(told, tell=True)

    def _leave(self, told: dict[str, Any], *, tell: bool = False) -> NoReturn:
        """Ends this process; the first thread that wants it."""
        self._leaving.acquire()
        client = hosts.service()
        if client is not None:
            # Without process 0 there is nobody to tell, and jax ends the others.
            with contextlib.suppress(Exception):
                if tell:
                    client.key_value_set(f"{_ENDED}{hosts.index():06d}", json.dumps(told))
                if hosts.is_first():
                    _wait_for_the_others(client)
                else:
                    client.key_value_set(f"{_HEARD}{hosts.index()}", "")
        self._link.tell(ended=told)
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # a live view hides the cursor
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: jax would wait for the others to leave too.
        os._exit(told["code"])


def _wait_for_the_others(client: Any) -> None:
    end, heard = time.monotonic() + _HEARD_WITHIN_SECONDS, 0
    while heard < hosts.count() - 1 and time.monotonic() < end:
        time.sleep(0.1)
        heard = len(client.key_value_dir_get(_HEARD))


def _check_port(address: str) -> None:
    """Or jax would end with a segmentation fault."""
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise HostError(
                f"--coordinator={address}: this machine can't listen at port {port} "
                f"({error.strerror}); take another port"
            ) from error


def _check_numbers() -> None:
    """Before the first meeting, in which processes of different counts would wait forever."""
    client = hosts.service()
    if hosts.is_first():
        client.key_value_set("s3ac/count", str(hosts.count()))
    expected = int(client.blocking_key_value_get("s3ac/count", 60_000))
    if expected != hosts.count():
        raise HostError(
            f"process {hosts.index()} was started with --num_processes={hosts.count()}, process 0 "
            f"with {expected}; give all processes the same"
        )


def _may_be_anothers(error: BaseException) -> bool:
    """Whether an error is what the end of another process may look like from here."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, jax.errors.JaxRuntimeError):
            return "RESOURCE_EXHAUSTED" not in str(seen)
        seen = seen.__cause__ or seen.__context__
    return False


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"
