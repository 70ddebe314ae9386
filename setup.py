"""Packaging of openengine. The version lives in openengine/__init__.py, which is read here and not imported.

The native kernels are an optional extension: without a C++ compiler the package installs and runs in plain PyTorch.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
INIT = (ROOT / "openengine" / "__init__.py").read_text("utf-8")
VERSION = re.search(r'^__version__ = "([^"]+)"$', INIT, re.MULTILINE).group(1)
README = ROOT / "README.md"

EXTRAS = {
    "flash": ["flash-attn"],
    "guided": ["llguidance>=1.9,<2"],
    "hub": ["huggingface_hub"],
    "rpc": ["grpcio>=1.64", "grpcio-health-checking", "grpcio-reflection", "prometheus-client", "protobuf>=4.25"],
    "sentencepiece": ["sentencepiece"],
    "test": [
        "accelerate",
        "gguf",
        "grpcio",
        "grpcio-health-checking",
        "grpcio-reflection",
        "grpcio-tools",
        "hypothesis",
        "ipykernel",
        "llguidance",
        "matplotlib",
        "nbclient",
        "nbformat",
        "pandas",
        "prometheus-client",
        "protobuf",
        "psutil",
        "pytest",
        "pytest-timeout",
        "sentence-transformers",
        "sentencepiece",
        "transformers",
    ],
}
# flash-attn compiles against the CUDA toolkit and serves NVIDIA cards only, so `all` leaves it out.
EXTRAS["all"] = sorted({need for extra, needs in EXTRAS.items() if extra not in ("flash", "test") for need in needs})

# Every kernel file is compiled once per level; which one runs is decided on the machine that runs it (ops/native.py).
LEVELS = {"generic": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS["avx2"] = ["-mavx2", "-mfma"]
    LEVELS["avx512"] = [*LEVELS["avx2"], *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl"))]
    LEVELS["avx512_bf16"] = [*LEVELS["avx512"], "-mavx512vnni", "-mavx512bf16"]
ONCE = "cpu.cpp"  # compiled for any CPU, and not per level
CSRC = Path("openengine", "ops", "csrc")
OPTIONS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
OPTIONS += ["-fno-math-errno", "-fno-trapping-math"]
OPTIONS += ["-w"]  # what is told of a build is why it failed; below AVX-512 GCC warns of every vector that is passed


class BuildNative(build_ext):
    """Builds the kernels as a plain shared object that ctypes opens: no headers of Python's or PyTorch's are needed."""

    def run(self):
        if self.inplace:  # a library of older sources may be wrong, so it goes even if none is built after it
            for ext in self.extensions:
                self.in_place(ext).unlink(missing_ok=True)
        super().run()

    def copy_extensions_to_source(self):
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name))
            if built.exists():
                with whole(self.in_place(ext)) as copy:
                    shutil.copyfile(built, copy)

    def in_place(self, ext):
        *package, name = ext.name.split(".")
        return Path(ROOT, *package, self.get_ext_filename(name))

    def build_extension(self, ext):
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        try:
            self.build_library(ext)
        except CompileError as exc:
            self.warn(
                f"openengine is built WITHOUT its native kernels ({exc}): it will run in plain PyTorch, several times "
                "slower. For them, install GCC 10 or newer, or name it in CXX, and install openengine-inference again"
            )

    def build_library(self, ext):
        compiler = find_compiler()
        options, is_gcc = OPTIONS, "clang" not in run(*compiler, "--version")
        if is_gcc:
            # Compiled for OpenMP but linked to no runtime: the library is to use the one that PyTorch has loaded,
            # which serves GCC's calls and not those of Clang.
            options = [*options, "-fopenmp"]
        else:
            self.warn("openengine's native kernels are built by Clang: they run on one thread. GCC makes them use all")

        def compile_for(job):
            source, level = job
            target = Path(self.build_temp, f"{Path(source).stem}_{level}.o")
            flags = [*options, *LEVELS[level], f"-DOE_LEVEL={level}"] if level else options
            run(*compiler, *flags, "-c", source, "-o", str(target))
            return str(target)

        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        levels = [level for level in LEVELS if level == "generic" or self.compiles_for(compiler, level)]
        jobs = [(source, None) for source in ext.sources if Path(source).name == ONCE]
        jobs += [(source, level) for source in ext.sources if Path(source).name != ONCE for level in levels]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_for, jobs))
        undefined = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole(target) as linked:
            run(*compiler, "-shared", *undefined, *objects, "-o", str(linked))
            if not linked.exists() or not linked.stat().st_size:
                raise CompileError(f"{' '.join(compiler)} succeeded without writing a library")

    def compiles_for(self, compiler, level):
        """Whether the compiler knows the instructions of a level, asked with an empty file: a real one may fail otherwise."""
        empty = Path(self.build_temp, "empty.cpp")
        empty.touch()
        try:
            run(*compiler, *LEVELS[level], "-c", str(empty), "-o", f"{empty}_{level}.o")
        except CompileError as exc:
            self.warn(
                f"openengine's native kernels are built without those for {level}, which the compiler refuses: {exc}"
            )
            return False
        return True


@contextmanager
def whole(target):
    """A path to write what becomes `target` when it is whole: a library cut short kills the process that opens it."""
    part = target.with_name(f"{target.name}.part")
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def find_compiler():
    """The command of the C++ compiler, as a list: what CXX says, and nothing else where it says something."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for name in [chosen[0]] if chosen else ["g++", "c++", "clang++"]:
        if shutil.which(name):
            return chosen or [name]
    wanted = (
        f"CXX names {chosen[0]!r}, which is not there or not to be run"
        if chosen
        else "no g++, c++ or clang++, and no CXX"
    )
    raise CompileError(f"no C++ compiler was found: {wanted}")


def run(*command):
    try:
        done = subprocess.run(command, check=False, capture_output=True, encoding="utf-8", errors="replace")
    except OSError as exc:
        raise CompileError(f"{command[0]} cannot be run: {exc}") from exc
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"it failed with {done.returncode} and said nothing"
        raise CompileError(f"{' '.join(command)}: {said}")
    return done.stdout


SOURCES = sorted(str(path) for path in CSRC.glob("*.cpp"))
HEADERS = sorted(str(path) for path in CSRC.glob("*.h"))

setup(
    name="openengine-inference",
    version=VERSION,
    description="A small, readable inference engine for language models, in Python and PyTorch",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    cmdclass={"build_ext": BuildNative},
    ext_modules=[Extension("openengine.ops._native", SOURCES, depends=HEADERS, optional=True)] if SOURCES else [],
    packages=find_packages(include=["openengine", "openengine.*"]),
    package_data={"openengine": ["py.typed", "rpc/*.proto"]},
    install_requires=["jinja2", "numpy", "safetensors", "tokenizers", "torch>=2.11", "tqdm"],
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
