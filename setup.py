"""Packaging of openengine. The version lives in openengine/__init__.py, which is read here and not imported.

The native kernels are an optional extension: without a C++ compiler the package installs and runs in plain PyTorch.
"""

import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError

ROOT = Path(__file__).resolve().parent
INIT = (ROOT / "openengine" / "__init__.py").read_text("utf-8")
VERSION = re.search(r'^__version__ = "([^"]+)"$', INIT, re.MULTILINE).group(1)
README = ROOT / "README.md"

EXTRAS = {
    "flash": ["flash-attn"],
    "guided": ["llguidance"],
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
        "sentencepiece",
        "transformers",
    ],
}
# flash-attn compiles against the CUDA toolkit and serves NVIDIA cards only, so `all` leaves it out.
EXTRAS["all"] = sorted({need for extra, needs in EXTRAS.items() if extra not in ("flash", "test") for need in needs})

# Every kernel file is compiled once per level; which one runs is decided on the machine that runs it (ops/native.py).
LEVELS = {"generic": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    LEVELS["avx512"] = [*LEVELS["avx2"], *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl"))]
    LEVELS["avx512_bf16"] = [*LEVELS["avx512"], "-mavx512vnni", "-mavx512bf16"]
ONCE = "cpu.cpp"  # compiled for any CPU, and not per level
CSRC = Path("openengine", "ops", "csrc")


class BuildNative(build_ext):
    """Builds the kernels as a plain shared object, opened with ctypes: it uses neither Python's nor PyTorch's headers."""

    def build_extension(self, ext):
        if self.compiler.compiler_type != "unix":
            raise BaseError(f"the kernels need GCC or Clang, not {self.compiler.compiler_type}")
        options = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
        options += ["-fno-exceptions", "-fno-rtti", "-w"]
        if platform.system() != "Darwin":  # whose compiler has no OpenMP: one thread
            # Compiled for OpenMP but not linked to it: the library is to use the runtime that PyTorch has loaded.
            options.append("-fopenmp")

        def compile_for(source, level):
            macros = [] if level is None else [("OE_LEVEL", level)]
            folder = os.path.join(self.build_temp, level or "once")
            flags = options + (LEVELS[level] if level else [])
            try:
                return self.compiler.compile([source], folder, macros=macros, extra_postargs=flags)
            except BaseError:
                if level in (None, "generic"):
                    raise
                return None

        once = [source for source in ext.sources if Path(source).name == ONCE]
        work = [(source, None) for source in once]
        work += [(source, level) for level in LEVELS for source in ext.sources if source not in once]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(compile_for, *zip(*work)))
        # A compiler that is too old for a level leaves all of it out.
        failed = {level for (_, level), objects in zip(work, results) if objects is None}
        objects = [name for (_, level), names in zip(work, results) if level not in failed for name in names]
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, target, target_lang="c++")

    def run(self):
        try:
            super().run()
        except BaseError as exc:  # also a platform without any compiler that setuptools knows
            self.warn(f"openengine: {exc}")
        missing = [ext.name for ext in self.extensions if not Path(self.get_ext_fullpath(ext.name)).exists()]
        if missing:
            self.warn(
                "openengine is installed WITHOUT its native kernels and will run in plain PyTorch, several times slower; "
                "for them, install a C++17 compiler (GCC 9+ or Clang 12+) and install openengine again"
            )


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
