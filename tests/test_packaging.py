"""The package from outside: what importing it costs, what it offers, and that what is built is complete."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import openengine

ROOT = Path(__file__).resolve().parent.parent
SETUP_AND_TEST = (
    'python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[test]" && .venv/bin/python -m pytest'
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_brings_neither_torch_nor_any_optional_package():
    out = run(
        "import sys, time\n"
        "start = time.perf_counter()\n"
        "import openengine\n"
        "print(f'import openengine: {time.perf_counter() - start:.4f} s')\n"
        "heavy = {'torch', 'numpy', 'grpc', 'google', 'tokenizers', 'transformers', 'sentencepiece', 'tqdm', 'PIL'}\n"
        "heavy |= {'jinja2', 'safetensors', 'llguidance'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    print(out)  # The time is a measurement, not a test.
    assert out.splitlines()[-1] == "[]"


def test_values_and_errors_come_without_torch():
    assert (
        run("import sys, openengine\nopenengine.SamplingParams(temperature=0)\nprint('torch' in sys.modules)")
        == "False\n"
    )


def test_all_is_sorted_and_has_no_duplicates():
    assert openengine.__all__ == sorted(set(openengine.__all__))


@pytest.mark.parametrize("name", openengine.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(openengine, name) is not None
    assert name in dir(openengine)


@pytest.mark.parametrize(
    "home",
    [
        "errors",
        "types",
        "results",
        "service_types",
        "event_types",
        "task_types",
        "task_results",
        "tokenizer_types",
    ],
)
def test_every_type_and_error_is_public(home):
    module = importlib.import_module(f"openengine.{home}")
    assert set(module.__all__) <= set(openengine.__all__)
    assert all(getattr(openengine, name) is getattr(module, name) for name in module.__all__)


def test_every_error_is_of_the_one_tree():
    public = [getattr(openengine, name) for name in openengine.__all__]
    errors = [kind for kind in public if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(errors) > 12 and all(issubclass(kind, openengine.OpenEngineError) for kind in errors)


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        openengine.nonsense


def test_the_version_is_written_once():
    written = [
        path
        for path in [
            *ROOT.glob("*.py"),
            *ROOT.glob("*.toml"),
            *ROOT.glob("*.cfg"),
            *(ROOT / "openengine").rglob("*.py"),
        ]
        if f'"{openengine.__version__}"' in path.read_text("utf-8")
    ]
    assert written == [ROOT / "openengine" / "__init__.py"]


def test_the_wheel_holds_every_module_and_what_it_needs(tmp_path):
    """Built from a copy, so that nothing is left in the checkout."""
    sources = [path.relative_to(ROOT) for path in (ROOT / "openengine").rglob("*") if "__pycache__" not in path.parts]
    sources = [path for path in sources if path.suffix in (".proto", ".py", ".typed")]
    for path in [*sources, Path("setup.py"), Path("pyproject.toml"), Path("LICENSE")]:
        (tmp_path / "copy" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / path).write_bytes((ROOT / path).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(tmp_path / "copy")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if "connection broken" in done.stdout + done.stderr:
        pytest.skip("needs setuptools from the package registry, which cannot be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("openengine_inference-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        text = archive.read(metadata).decode("utf-8")
    assert {path.as_posix() for path in sources} <= set(names)
    assert any(name.endswith("LICENSE") for name in names)
    assert f"Version: {openengine.__version__}" in text
    assert "Requires-Python: >=3.10" in text
    assert re.search(r"Requires-Dist: torch>=2\.11", text)
    extras = set(re.findall(r"Provides-Extra: (\w+)", text))
    assert extras == {"all", "flash", "guided", "hub", "rpc", "sentencepiece", "test"}
    of_all = set(re.findall(r"Requires-Dist: ([\w.-]+).*extra == .all.", text))
    of_others = set(re.findall(r"Requires-Dist: ([\w.-]+).*extra == .(?:guided|hub|rpc|sentencepiece).", text))
    assert of_all == of_others


def test_constraints_pin_every_dependency_that_is_installed():
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in pinned}
    needed = set(re.findall(r'^ +"([\w.-]+)",$', (ROOT / "setup.py").read_text("utf-8"), re.MULTILINE))
    assert {"jinja2", "numpy", "safetensors", "tokenizers", "torch", "tqdm"} <= pinned
    assert {re.sub(r"[-_.]+", "-", name).lower() for name in needed} <= pinned


def test_continuous_integration_runs_the_readme_command():
    assert SETUP_AND_TEST in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert SETUP_AND_TEST in (ROOT / "README.md").read_text("utf-8")
