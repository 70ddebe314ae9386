"""An engine and its process: exit, fork, memory.

`pytest -m soak` also measures the memory of a real model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]


# ---- processes -----------------------------------------------------------------------------------


def run_python(code: str, *arguments: object, timeout: float = 100) -> str:
    prelude = """
        import asyncio, gc, os, sys, threading, time
        from pathlib import Path
        import torch
        torch.set_num_threads(1)
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Fatal" not in done.stderr, done.stderr
    return done.stdout


SCRIPTED = """
    from tests.scripted import hashed, scripted_engine
    ABC = ["<eos>", *"abcdefghijklmnopqrstuvwxyz"]
    def slow(history):
        time.sleep(0.005)
        return hashed(27)(history)
    engine = scripted_engine(Path(sys.argv[1]), slow, ABC, context=4000, num_kv_blocks=1000)
    ENDLESS = {"ignore_eos": True, "max_tokens": None}
"""


def test_the_interpreter_exits_at_once_with_requests_running_and_waited_for(tmp_path):
    started = time.monotonic()
    out = run_python(
        SCRIPTED
        + """
    waiters = [threading.Thread(target=lambda: engine.generate("abc", **ENDLESS), daemon=True) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    handle, stream = engine.submit("abc", **ENDLESS), engine.stream("abc", **ENDLESS)
    next(stream)
    print(handle.done)
    """,
        tmp_path,
    )
    assert out.strip() == "False" and time.monotonic() - started < 60


def test_a_forked_child_is_told_so_and_exits_while_the_parent_goes_on(tmp_path):
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    out = run_python(
        """
    import warnings
    warnings.simplefilter("ignore")
    """
        + SCRIPTED
        + """
    from openengine import PreconditionFailed
    handle = engine.submit("abc", **ENDLESS)
    next(iter(handle))
    child = os.fork()
    if not child:
        calls = [lambda: engine.generate("a"), lambda: engine.generate(["a"]), lambda: engine.submit("a"),
                 lambda: engine.stream("a"),
                 lambda: asyncio.run(engine.agenerate("a")), engine.clear_prefix_cache, engine.drain,
                 lambda: engine.abort("x"), lambda: engine.abort(all_requests=True)]
        told = 0
        for call in calls:
            try:
                call()
            except PreconditionFailed as exc:
                told += "another process" in exc.message
        handle.cancel()
        assert engine.health(include_inference_probe=True).state == "not_ready"
        engine.close()
        print("child", told == len(calls), flush=True)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    print("status", status, "done", handle.done)
    handle.cancel()
    print(handle.result(20).finish_reason, len(engine.generate("abc", max_tokens=3, ignore_eos=True).token_ids))
    """,
        tmp_path,
    )
    assert out.split("\n")[:3] == ["child True", "status 0 done False", "cancelled 3"]


# ---- memory --------------------------------------------------------------------------------------


MEMORY = """
    import ctypes
    import psutil
    from openengine import Engine
    process = psutil.Process()
    class Mallinfo(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # of glibc 2.33 and later
    if mallinfo is not None:
        mallinfo.restype = Mallinfo
    def rss():
        return process.memory_info().rss / 2**20
    def in_use():
        if mallinfo is None:
            return 0.0
        info = mallinfo()
        return (info.uordblks + info.hblkhd) / 2**20
    options = {"num_kv_blocks": 64, "block_size": 16, "max_num_seqs": 8, "max_model_len": 256, "dtype": "float32"}
    def use(engine):
        prompts = [[5 + (i * j) % 300 for j in range(1, 60)] for i in range(1, 9)]
        engine.generate(prompts, max_tokens=16, ignore_eos=True, logprobs=2, progress=False)
        list(engine.stream(prompts[0], max_tokens=4))
        engine.generate([[], prompts[0]], on_error="return", max_tokens=2)
    def opened_and_closed():
        engine = Engine(sys.argv[1], **options)
        use(engine)
        used = rss()
        engine.close()
        return engine.info().attributes["weight_bytes"] / 2**20, used - rss()
    def opened_and_dropped():
        gc.disable()
        engine = Engine(sys.argv[1], **options)
        use(engine)
        del engine
        gc.enable()
    print(*opened_and_closed())
    for make, count in ((opened_and_closed, 5), (opened_and_dropped, 3)):
        first_in_use, first_rss, grown = in_use(), rss(), []
        for _ in range(count):
            make()
            grown.append((in_use() - first_in_use, rss() - first_rss))
        print(*map(max, zip(*grown)))
    print(threading.active_count())
"""


def check_memory(path) -> None:
    """Bytes that the allocator has handed out show any leak. Those that the process holds move with its arenas, by tens of
    MiB, and show only that no engine stays as a whole."""
    weights, freed, *growth, threads = map(float, run_python(MEMORY, path).split())
    assert weights > 40 and freed > 0.5 * weights, "closing gave the weights back"
    for what, in_use, rss in (("close", *growth[:2]), ("del", *growth[2:])):
        assert in_use < 0.5 and rss < 1.5 * weights, (what, in_use, rss, weights)
    assert threads == 1


def test_memory_returns_after_close_and_after_del_five_times(tmp_path):
    # 50 MiB of weights, so that one engine that stays shows.
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
    check_memory(write_checkpoint(tmp_path, "llama", **sizes))


@pytest.mark.soak
def test_memory_returns_after_close_and_after_del_on_smollm2(smollm2, request):
    if request.config.option.markexpr != "soak":
        pytest.skip("the small checkpoint shows it by default; pytest -m soak runs this one")
    check_memory(smollm2)
