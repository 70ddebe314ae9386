"""What memory there is for a pool: the least of what the machine, control groups and `ulimit -v` leave."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from openengine.core import memory

CPU = torch.device("cpu")
MIB = 1 << 20


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def v2(folder, limit, used, cached=0):
    group(folder, memory__max=limit, memory__current=used, memory__stat=f"anon 5\ninactive_file {cached}")


@pytest.fixture
def second(tmp_path):
    hierarchy = memory._Hierarchy(tmp_path / "cgroup", "memory.max", "memory.current", "inactive_file")
    hierarchy.root.mkdir()
    return hierarchy


def test_the_least_of_a_group_and_those_around_it_counts(second):
    v2(second.root / "system" / "unit", "max", 7)
    v2(second.root / "system", 100 * MIB, 60 * MIB, cached=10 * MIB)
    group(second.root, memory__stat="anon 1")  # the root of a machine has no limit
    assert list(second.available("/system/unit")) == [50 * MIB]
    v2(second.root / "system" / "unit", 30 * MIB, 10 * MIB)
    assert min(second.available("/system/unit")) == 20 * MIB


def test_a_container_sees_its_own_group_at_the_root_whatever_its_name_outside(second):
    v2(second.root, 100 * MIB, 130 * MIB)
    assert list(second.available("/docker/0123")) == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="limits and counts as Linux has them")
def test_a_limit_of_address_space_is_one_of_memory():
    code = (
        "import torch, resource\n"
        "from openengine.core.memory import available_bytes\n"
        "before = available_bytes(torch.device('cpu'))\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)\n"
        "print(before, available_bytes(torch.device('cpu')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert before > 64 * MIB >= after > 60 * MIB


def test_what_is_available_is_part_of_the_machine():
    assert 0 < memory.available_bytes(CPU) < 1 << 50
    assert memory.usable_cpus() >= 1
