"""Worker threads: few, of one purpose, and nobody waits for what was left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from openengine.rpc.workers import Workers, in_own_thread
from tests.rpc.serving import ROOT


def test_no_more_calls_run_at_a_time_than_there_are_threads():
    running, most, lock = 0, 0, threading.Lock()

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1
        return 1

    async def main():
        workers = Workers(2, "test")
        assert sum(await asyncio.gather(*(workers.run(work) for _ in range(20)))) == 20
        workers.close()

    asyncio.run(main())
    assert most == 2


def test_a_call_that_waits_for_a_thread_leaves_nothing_when_it_is_cancelled():
    async def main():
        workers, go, ran = Workers(1, "test"), threading.Event(), []
        busy = asyncio.ensure_future(workers.run(go.wait))
        waiting = [asyncio.ensure_future(workers.run(ran.append, index)) for index in range(5)]
        await asyncio.sleep(0.01)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=1)
        assert all(task.cancelled() for task in waiting), "while the only thread is busy"
        go.set()
        assert await busy
        assert await workers.run(lambda: "free") == "free" and ran == []
        workers.close()

    asyncio.run(main())


def test_a_thread_whose_caller_has_left_counts_until_it_is_done_and_hands_its_result_over():
    async def main():
        workers, go, left = Workers(1, "test"), threading.Event(), []
        task = asyncio.ensure_future(workers.run(go.wait, when_left=left.append))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        next_one = asyncio.ensure_future(workers.run(lambda: list(left)))
        await asyncio.sleep(0.01)
        assert not next_one.done()
        go.set()
        assert await next_one == [True]
        workers.close()

    asyncio.run(main())


def test_errors_are_the_callers():
    def fail():
        raise KeyError("x")

    async def main():
        workers = Workers(1, "test")
        with pytest.raises(KeyError):
            await workers.run(fail)
        with pytest.raises(KeyError):
            await in_own_thread("test", fail)
        assert await workers.run(int, "7") == 7
        workers.close()

    asyncio.run(main())


_LEAVES_A_THREAD = """
import asyncio, time
from openengine.rpc.workers import Workers
async def main():
    task = asyncio.ensure_future(Workers(1, "test").run(time.sleep, 60))
    await asyncio.sleep(0.05)
    task.cancel()
asyncio.run(main())
"""


def test_a_process_ends_though_a_thread_is_still_at_work():
    subprocess.run([sys.executable, "-c", _LEAVES_A_THREAD], cwd=ROOT, check=True, timeout=20)
