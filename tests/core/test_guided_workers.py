"""The threads that compile guides: a call that exceeds its time holds up nobody, not even the end of the process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from openengine.core.guides.workers import Workers
from openengine.errors import InvalidArgument, Overloaded, PreconditionFailed


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


def stuck(workers: Workers, release: threading.Event, seconds: float = 0.02) -> None:
    with workers.time_limit(seconds, lambda: InvalidArgument("too long")):
        release.wait(30)


def test_a_call_that_exceeds_its_time_is_given_up_and_others_go_on(release):
    workers = Workers(1, name="test")
    late = [workers.submit(stuck, workers, release) for _ in range(3)]
    assert workers.submit(lambda: 5).result(5) == 5
    for future in late:
        with pytest.raises(InvalidArgument, match="too long"):
            future.result(5)
    workers.close()


def test_while_too_many_calls_are_given_up_new_ones_are_refused_and_then_taken_again(release):
    workers = Workers(2, name="test")
    late = [workers.submit(stuck, workers, release) for _ in range(12)]
    errors = [future.exception(5) for future in late]
    assert {type(error) for error in errors} == {InvalidArgument, Overloaded}
    with pytest.raises(Overloaded, match="try again"):
        workers.submit(int)
    release.set()
    deadline = time.monotonic() + 5
    while True:
        try:
            assert workers.submit(int).result(5) == 0
            break
        except Overloaded:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    workers.close()


def test_closing_refuses_what_runs_and_what_waits_and_ends_idle_threads(release):
    workers = Workers(1, name="test-closing")
    futures = [workers.submit(stuck, workers, release, 30) for _ in range(2)]
    time.sleep(0.02)
    workers.close()
    for future in futures:
        with pytest.raises(PreconditionFailed, match="closed"):
            future.result(5)
    with pytest.raises(PreconditionFailed, match="closed"):
        workers.submit(int)
    release.set()
    deadline = time.monotonic() + 5
    while any(thread.name == "test-closing" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_quick_job_does_not_wait_for_slow_ones_and_their_substitutes_end():
    workers, release = Workers(2, name="test-substitutes"), threading.Event()
    slow = [workers.submit(release.wait, 30) for _ in range(4)]
    assert workers.submit(lambda: 5).result(10) == 5
    assert not any(future.done() for future in slow)
    release.set()
    assert all(future.result(10) for future in slow)
    deadline = time.monotonic() + 10
    while sum(thread.name == "test-substitutes" for thread in threading.enumerate()) > 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert workers.submit(lambda: 6).result(10) == 6
    workers.close()


def test_slow_jobs_get_six_substitutes_at_most(monkeypatch):
    monkeypatch.setattr("openengine.core.guides.workers._SLOW_S", 0.01)
    workers, release, begun = Workers(2, name="test-most"), threading.Event(), []

    def wait() -> None:
        begun.append(threading.current_thread())
        release.wait(30)

    slow = [workers.submit(wait) for _ in range(12)]
    deadline = time.monotonic() + 10
    while len(begun) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(begun) == 8
    release.set()
    for future in slow:
        future.result(10)
    assert len(begun) == 12 and len(set(begun)) == 8
    workers.close()


def test_small_jobs_go_first_and_one_that_waits_too_long_is_refused(monkeypatch):
    monkeypatch.setattr("openengine.core.guides.workers._SLOW_S", 0.05)
    monkeypatch.setattr("openengine.core.guides.workers._MAX_SUBSTITUTES", 0)
    workers, release, order = Workers(1, name="test-order", max_wait_s=0.5), threading.Event(), []
    first = workers.submit(release.wait, 30)
    late = workers.submit(order.append, "late", size=100)
    with pytest.raises(Overloaded, match=r"waited 0\.5 s for others"):
        late.result(10)
    sizes = (30, 20, 10, 20)
    jobs = [workers.submit(order.append, number, size=size) for number, size in enumerate(sizes)]
    release.set()
    assert first.result(10) and [job.result(10) for job in jobs] == [None] * 4
    assert order == [2, 1, 3, 0]
    workers.close()


def test_the_process_ends_while_a_call_goes_on():
    script = (
        "import time\nfrom openengine.core.guides import workers\nworkers._MAX_EXIT_S = 0.3\n"
        "workers.Workers(1, name='test').submit(time.sleep, 60)\ntime.sleep(0.1)\n"
    )
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=30).returncode == 0
    assert time.monotonic() - began < 20
