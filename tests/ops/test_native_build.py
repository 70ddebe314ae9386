"""The library as it was built, and the package without it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

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
    assert re.search(r"not built.*install GCC 10.*install openengine-inference again.*kernels='torch'", message)


@pytest.fixture
def sources(tmp_path) -> Path:
    """A copy of what a build reads, with a library of older sources in place."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "openengine").mkdir()
    shutil.copy(ROOT / "openengine" / "__init__.py", tmp_path / "openengine")
    shutil.copytree(ROOT / "openengine" / "ops" / "csrc", tmp_path / "openengine" / "ops" / "csrc")
    library_in(tmp_path).touch()
    return tmp_path


def library_in(folder: Path) -> Path:
    return folder / "openengine" / "ops" / f"_native{EXTENSION_SUFFIXES[0]}"


def compiler_in(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_bytes(script.encode("latin-1"))
    path.chmod(0o755)
    return str(path)


# A compiler whose every result is "written": what it was given to do is the last of its arguments.
WRITES = 'for last; do :; done; [ "$1" = --version ] || echo written > "$last"\n'


def test_the_compiler_that_cxx_names_is_the_only_one_taken_and_no_older_library_stays(sources):
    assert "CXX names 'no-such-compiler', which is not there" in build(sources, CXX="no-such-compiler -O2")
    assert not library_in(sources).exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("no program\x00", "cannot be run"),
        ("#!/no/such/shell\n", "cannot be run"),
        ("#!/bin/sh\n", "succeeded without writing"),
        ('#!/bin/sh\nfor last; do :; done; [ "$1" = --version ] || : > "$last"\n', "succeeded without writing"),
        ("#!/bin/sh\nexit 1\n", "failed with 1 and said nothing"),
        ("#!/bin/sh\necho 'erreur \xe9' >&2; exit 1\n", "erreur"),
        ('#!/bin/sh\ncase "$*" in *-mavx2*linear.cpp*) echo killed >&2; exit 1;; esac\n' + WRITES, "killed"),
    ],
)
@pytest.mark.skipif(os.name != "posix" or platform.machine() != "x86_64", reason="runs shell scripts, names AVX2")
def test_a_compiler_that_fails_leaves_no_library_and_the_build_says_why(sources, script, reason):
    said = build(sources, CXX=compiler_in(sources, script))
    assert said.count("WITHOUT its native kernels") == 1 and reason in said
    assert not list(library_in(sources).parent.glob("_native*"))


@pytest.mark.skipif(os.name != "posix" or platform.machine() != "x86_64", reason="runs shell scripts, names AVX-512")
def test_a_level_that_the_compiler_does_not_know_is_left_out_and_the_build_says_so(sources):
    refuses = '#!/bin/sh\ncase "$*" in *-mavx512bf16*) echo unknown >&2; exit 1;; esac\n'
    said = build(sources, CXX=compiler_in(sources, refuses + WRITES))
    assert "built without those for avx512_bf16" in said and "unknown" in said and "WITHOUT" not in said
    assert library_in(sources).read_text() == "written\n"


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
    assert len({path for path in re.findall(r"/\S+", maps) if re.search(r"/lib(g|i)?omp\d?[.-]", path)}) == 1


@needs_library
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_no_code_is_shared_between_levels():
    """A function with weak linkage would be kept once, compiled for whichever level came first."""
    for options in ([], ["--dynamic"]):
        listing = subprocess.run(["nm", *options, LIBRARY.handle._name], check=True, capture_output=True, text=True)
        defined = [line.split() for line in listing.stdout.splitlines() if line[:1] != " "]
        assert {name for _, kind, name in defined if kind == "T"} >= {"oe_interface", "oe_cpu_levels"}
        assert not [name for _, kind, name in defined if kind in "WwVvu"]
    assert all(name.startswith("oe_") for _, _, name in defined)


@needs_library
def test_every_runnable_level_has_every_function():
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "openengine" / "ops" / "csrc").glob("*.cpp"))
    names = re.findall(r"^OE_(?:EXPORT|CHECKED)\((\w+)\)", sources, re.MULTILINE)
    assert len(names) >= 10
    for level in LIBRARY.levels:
        assert [name for name in names if not hasattr(LIBRARY.handle, f"oe_{name}_{level}")] == []


@needs_library
def test_every_level_that_this_cpu_runs_was_built():
    assert LIBRARY.levels == native.LEVELS[: LIBRARY.handle.oe_cpu_levels()]
    capability = torch.backends.cpu.get_cpu_capability()
    assert ("avx2" in LIBRARY.levels, "avx512" in LIBRARY.levels) == (
        capability in ("AVX2", "AVX512"),
        capability == "AVX512",
    )


@pytest.mark.parametrize("has", ["oe_interface", "oe_cpu_levels"])
def test_a_library_that_lacks_a_function_is_none(has, monkeypatch):
    def opened(_path):
        return SimpleNamespace(**{has: lambda: 1})

    monkeypatch.setattr(native.ctypes, "CDLL", opened)
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda _name: SimpleNamespace(origin="library"))
    assert "cannot be opened" in native._find()


def test_a_level_that_was_not_built_is_told(monkeypatch, caplog):
    handle = SimpleNamespace(
        oe_interface=lambda: native.INTERFACE, oe_cpu_levels=lambda: 3, oe_attention_generic=0, oe_attention_avx512=0
    )
    monkeypatch.setattr(native.ctypes, "CDLL", lambda _path: handle)
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda _name: SimpleNamespace(origin="library"))
    assert native._find().levels == ("generic", "avx512")
    assert "built without avx2, which this CPU runs" in caplog.text


def test_too_little_memory_is_an_error_that_names_the_function():
    with pytest.raises(MemoryError, match="oe_linear_avx2"):
        native._check_memory(0, SimpleNamespace(__name__="oe_linear_avx2"), ())
    assert native._check_memory(1, SimpleNamespace(), ()) is None
