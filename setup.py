"""Packaging of openengine. The version lives in openengine/__init__.py, which is read here and not imported."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
INIT = (ROOT / "openengine" / "__init__.py").read_text("utf-8")
VERSION = re.search(r'^__version__ = "([^"]+)"$', INIT, re.MULTILINE).group(1)
README = ROOT / "README.md"

EXTRAS = {
    "flash": ["flash-attn"],
    "guided": ["llguidance"],
    "hub": ["huggingface_hub"],
    "rpc": ["grpcio", "grpcio-health-checking", "grpcio-reflection", "prometheus-client", "protobuf"],
    "sentencepiece": ["sentencepiece"],
    "test": [
        "accelerate",
        "gguf",
        "hypothesis",
        "ipykernel",
        "matplotlib",
        "nbclient",
        "nbformat",
        "pandas",
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

setup(
    name="openengine-inference",
    version=VERSION,
    description="A small, readable inference engine for language models, in Python and PyTorch",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["openengine", "openengine.*"]),
    package_data={"openengine": ["py.typed"]},
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
