"""How the driver's threads wait, and how others wait for them."""

import contextlib
import queue
import threading
from concurrent.futures import Future
from typing import Any


def next_of(backlog: queue.Queue[Any]) -> Any:
    """What comes next; None when the process ends, for which it waits for this thread alone.

    Source: ours.
    """
    while threading.main_thread().is_alive():
        with contextlib.suppress(queue.Empty):
            return backlog.get(timeout=1.0)
    return None


def firm_future() -> Future:
    """A future that a waiter who leaves can't cancel under the thread that will set it.

    Source: ours.
    """
    done: Future = Future()
    done.set_running_or_notify_cancel()
    return done
