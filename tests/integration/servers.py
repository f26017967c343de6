"""Rollout servers as processes of their own, for tests."""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time

from tests.integration import runs

APP = str(runs.ROOT / "launch" / "serve.py")
TINY = {"rollout.slots": 16, "rollout.insert_batch": 8}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass
class Server:
    process: subprocess.Popen
    port: int
    http_port: int
    lines: list

    def text(self):
        return "\n".join(self.lines)

    def wait_for(self, true, seconds=120):
        end = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, (self.text(), self.process.stderr.read())
            assert time.monotonic() < end, self.text()
            time.sleep(0.02)


def app(*arguments):
    return subprocess.Popen(
        [sys.executable, "-W", "error", APP, *arguments],
        env={**os.environ, "PYTHONPATH": str(runs.ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@contextlib.contextmanager
def served(*arguments):
    port, http_port = free_port(), free_port()
    process = app(*arguments, f"--port={port}", f"--http_port={http_port}")
    server = Server(process, port, http_port, [])
    reader = threading.Thread(
        target=lambda: server.lines.extend(line.rstrip("\n") for line in process.stdout)
    )
    reader.start()
    try:
        server.wait_for(lambda: "ready" in server.lines)
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()


def overrides(changes):
    return [f"--config.{name}={value}" for name, value in changes.items()]
