"""The library as it was built, and the package without it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from openengine.ops import native

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = native.native_library()
needs_library = pytest.mark.skipif(LIBRARY is None, reason=native.native_absence() or "")


def run(code: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(folder: Path, **environment: str) -> str:
    """What the build of the library in `folder` says."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | environment
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def without(tmp_path_factory) -> Path:
    """A copy of the package in which no library was built, and what the build said."""
    copy = tmp_path_factory.mktemp("without")
    shutil.copytree(ROOT / "openengine", copy / "openengine", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "setup.py", copy)
    (copy / "said").write_text(build(copy, PATH=str(copy)))
    return copy


def test_without_a_compiler_the_build_succeeds_and_says_so_once(without):
    said = (without / "said").read_text()
    assert said.count("WITHOUT its native kernels") == 1
    assert "no C++ compiler was found" in said
    assert not list(without.rglob("_native*.so"))


def test_without_the_library_auto_is_torch_and_native_says_what_to_do(without):
    out = run(
        "import torch\n"
        "from openengine.errors import UnsupportedFeature\n"
        "from openengine.ops.attention import select_backend\n"
        "cpu = torch.device('cpu')\n"
        "print(select_backend(cpu, torch.bfloat16, 'auto').name)\n"
        "try:\n"
        "    select_backend(cpu, torch.bfloat16, 'native')\n"
        "except UnsupportedFeature as exc:\n"
        "    print(exc)\n",
        without,
    )
    name, message = out.splitlines()
    assert name == "torch"
    assert re.search(r"not built.*C\+\+17 compiler.*install openengine-inference again.*kernels='torch'", message)


def test_the_compiler_that_cxx_names_is_the_only_one_taken_and_no_older_library_stays(tmp_path):
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "openengine").mkdir()
    shutil.copy(ROOT / "openengine" / "__init__.py", tmp_path / "openengine")
    shutil.copytree(ROOT / "openengine" / "ops" / "csrc", tmp_path / "openengine" / "ops" / "csrc")
    older = tmp_path / "openengine" / "ops" / f"_native{EXTENSION_SUFFIXES[0]}"
    older.touch()
    assert "CXX names 'no-such-compiler', which is not there" in build(tmp_path, CXX="no-such-compiler -O2")
    assert not older.exists()


def test_source_and_module_name_the_same_interface():
    header = (ROOT / "openengine" / "ops" / "csrc" / "common.h").read_text("utf-8")
    assert re.search(r"#define OE_INTERFACE (\d+)", header).group(1) == str(native.INTERFACE)


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory map of Linux")
def test_the_library_shares_the_threads_of_torch():
    maps = run(
        "from openengine.ops.native import native_library\n"
        "assert native_library()\n"
        "print(open('/proc/self/maps').read())\n"
    )
    assert len({path for path in re.findall(r"/\S+", maps) if re.search(r"/lib(g|i)?omp[.\d-]", path)}) <= 1


@needs_library
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_no_code_is_shared_between_levels():
    """A function with weak linkage would be kept once, compiled for whichever level came first."""
    listing = subprocess.run(["nm", "--dynamic", LIBRARY.handle._name], check=True, capture_output=True, text=True)
    defined = [line.split() for line in listing.stdout.splitlines() if line[:1] != " "]
    assert {name for _, kind, name in defined if kind not in "wW"} >= {"oe_interface", "oe_cpu_levels"}
    assert all(name.startswith("oe_") for _, _, name in defined)


@needs_library
@pytest.mark.parametrize("name", ["attention", "attention_plan"])
def test_every_runnable_level_has_every_function(name):
    for level in LIBRARY.levels:
        assert LIBRARY.function(name, level=level)


@needs_library
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs AVX-512")
def test_an_avx512_machine_runs_the_avx512_level():
    assert "avx512" in LIBRARY.levels
