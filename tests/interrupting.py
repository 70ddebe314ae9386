"""Ctrl-C in a test: one interrupt, raised where it is meant to be, and none that comes late."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.waiting import wait_until

__all__ = ["interrupted"]


@contextmanager
def interrupted(when: Callable[[], Any]) -> Iterator[list[float]]:
    """Interrupts the body once `when()` is true, which nothing but the body may make true, and expects it to end by that.

    Gives the times of sending. What Python could not raise, as in a destructor, is sent again, when that has been reported;
    so there is never an interrupt left, and a late one, which would end the whole run of tests, cannot come.
    """
    times: list[float] = []
    is_over, is_wanted = threading.Event(), threading.Semaphore()

    def send() -> None:
        try:
            wait_until(lambda: is_over.is_set() or when())
        finally:
            while is_wanted.acquire() and not is_over.is_set():
                time.sleep(0.01)  # who is about to wait for a lock does, and is woken
                times.append(time.monotonic())
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    report = sys.unraisablehook

    def send_again(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            is_wanted.release()
        else:
            report(unraisable)

    sys.unraisablehook = send_again
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    has_ended = False
    try:
        yield times
    except KeyboardInterrupt:
        has_ended = True
    finally:
        try:
            is_over.set()
            is_wanted.release()
            sender.join()
        except KeyboardInterrupt:  # the body failed at the same moment
            sender.join()
        sys.unraisablehook = report
    assert has_ended, "the body ended before it was interrupted"
