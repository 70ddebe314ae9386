"""Checkpoints: a model on disk, found and described without reading its weights.

    path or hub id ─ open_checkpoint ─ Checkpoint (config, tokens, file list; no weights)

What is done with the weights belongs to `loader`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from openengine.core.models import EncoderConfig, ModelConfig, read_config
from openengine.core.safetensors_reader import SafetensorsFile
from openengine.errors import InvalidArgument, ModelNotFound, UnsupportedFeature

if TYPE_CHECKING:
    from openengine.core.gguf import GgufFile
    from openengine.core.gguf_models import HfTensor
    from openengine.core.tokenizer import Tokenizer

__all__ = ["DTYPES", "Checkpoint", "WeightSource", "listed", "open_checkpoint"]

_INDEX = "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_CHUNK_VALUES = 1 << 21  # values dequantized at a time on their way to another dtype: 8 MiB
_LISTED = 10  # names in a message before it counts the rest


class WeightSource(Protocol):
    """A stored tensor that has not been read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def holds_same(self, other: WeightSource) -> bool:
        """Whether the values, of equal shapes and from the same checkpoint, are equal."""

    def copy_to(self, destination: Tensor) -> None:
        """Write the values to a tensor of the same shape, casting them to its dtype."""

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """The values by ranges of the first dimension, in order; each may be overwritten by the next."""


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk whose weights have not been read. `format` is `safetensors` or `gguf`.

    `files` are those that hold the weights, in name order. `index` maps tensor names to file names, where the
    checkpoint has an index; it then decides which file a tensor comes from. `gguf` is the parsed file, mapped until the
    checkpoint is dropped, so that its long vocabulary is read once.
    """

    path: Path
    format: str
    config: ModelConfig | EncoderConfig
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    files: tuple[Path, ...]
    index: Mapping[str, str] | None = field(default=None, repr=False)
    gguf: GgufFile | None = field(default=None, repr=False)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer: those of the generation config, else of the config; may be empty."""
        return _token_ids("eos_token_id", self.generation_config, self.hf_config)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the configs name one."""
        ids = _token_ids("bos_token_id", self.generation_config, self.hf_config)
        return ids[0] if ids else None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype the config names, None when it names none that can be computed in."""
        nested = self.hf_config.get("text_config") or {}
        for values in (nested, self.hf_config):
            name = values.get("dtype") or values.get("torch_dtype")
            if isinstance(name, str):
                return DTYPES.get(name.removeprefix("torch."))
        return None

    @cached_property
    def revision(self) -> str:
        """`sha256:` + hex over name, size and digest of the config and of every weight file, in name order.

        Reads all files on first use.
        """
        files = list(self.files)
        if self.format == "safetensors":
            files.append(self.path / "config.json")
        total = hashlib.sha256()
        for file in sorted(files, key=lambda file: file.name):
            total.update(f"{file.name}\n{file.stat().st_size}\n{_digest(file)}\n".encode())
        return f"sha256:{total.hexdigest()}"

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer that belongs to the weights."""
        from openengine.core import tokenizer

        if self.gguf is not None:
            return tokenizer.tokenizer_from_gguf(self.gguf.metadata)
        return tokenizer.load_tokenizer(self.path)

    @contextmanager
    def weights(self) -> Iterator[Mapping[str, WeightSource]]:
        """Stored tensors by Hugging Face name, readable while the context is open."""
        if self.gguf is not None:
            from openengine.core.gguf_models import hf_tensors

            yield {tensor.name: _GgufWeight(tensor) for tensor in hf_tensors(self.gguf)}
            return
        with ExitStack() as stack:
            by_file = {file.name: stack.enter_context(SafetensorsFile(file)).tensors for file in self.files}
            if self.index is None:
                yield {name: tensor for tensors in by_file.values() for name, tensor in tensors.items()}
                return
            lost = [name for name, file in self.index.items() if name not in by_file[file]]
            if lost:
                raise InvalidArgument(f"{self.path / _INDEX} names tensors their files do not hold {listed(lost)}")
            yield {name: by_file[file][name] for name, file in self.index.items()}


def open_checkpoint(path: str | Path, *, progress: bool = False) -> Checkpoint:
    """Find a checkpoint and read its configuration: a directory, a `.gguf` file, or the id of a hub model.

    An `org/name` that does not exist locally is fetched from the hub, with progress bars if `progress`.

    Raises:
        ModelNotFound: nothing exists there, or the hub has no such model or cannot be reached.
        InvalidArgument: what is there is no checkpoint, or a file of it is malformed.
        UnsupportedFeature: the format or the model is not supported.
    """
    if not str(path):
        raise InvalidArgument("the model path is empty; give a directory, a .gguf file or a hub id")
    try:
        local = Path(path).expanduser()
        exists = local.exists()
    except (OSError, RuntimeError, ValueError) as exc:  # a name too long, an unknown user, a NUL
        raise ModelNotFound(f"no model at {str(path)!r:.120}: {exc}") from exc
    if not exists:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path)):
            raise ModelNotFound(
                f"no model at {str(path)!r}: no such file or directory{_suggestion(local)}; give a directory with "
                "config.json and weights, a .gguf file, or a hub id of the form org/name"
            )
        local = _download(str(path), progress)
    if local.is_file():
        if local.suffix == ".safetensors":
            raise InvalidArgument(f"{local} holds weights alone; give its directory, {local.parent}, with config.json")
        if local.suffix != ".gguf":
            raise InvalidArgument(f"{local} is no model: give a .gguf file or a directory with config.json and weights")
        return _open_gguf(local)
    if not local.is_dir():
        raise InvalidArgument(f"{local} is neither a regular file nor a directory")
    return _open_directory(local)


def listed(names: list[str]) -> str:
    """Their number and the first of them, for a message."""
    shown = ", ".join(names[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"({len(names)}): {shown}{more}"


def _open_directory(path: Path) -> Checkpoint:
    names = sorted(file.name for file in path.iterdir())
    if "config.json" not in names:
        models = [name for name in names if name.endswith(".gguf") and not _LATER_PART.search(name)]
        if len(models) == 1:
            return _open_gguf(path / models[0])
        found = (
            f"it holds {len(models)} GGUF files, name one of them"
            if models
            else ("a model directory has config.json, *.safetensors and a tokenizer")
        )
        raise InvalidArgument(f"{path} is no model directory: config.json is missing; {found}")
    hf_config = _read_json(path / "config.json")
    config = read_config(hf_config)
    generation_config = _read_json(path / "generation_config.json") if "generation_config.json" in names else {}
    index = _read_index(path) if _INDEX in names else None
    files = sorted(set(index.values())) if index is not None else [_single_file(path, names)]
    if absent := [name for name in files if name not in names]:
        raise InvalidArgument(f"{path / _INDEX} names files that are not there: {listed(absent)}")
    return Checkpoint(
        path=path,
        format="safetensors",
        config=config,
        hf_config=hf_config,
        generation_config=generation_config,
        files=tuple(path / name for name in files),
        index=index,
    )


def _single_file(path: Path, names: list[str]) -> str:
    """The one weight file of a directory without an index."""
    tensors = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in tensors:
        return "model.safetensors"
    if tensors == ["consolidated.safetensors"]:
        raise UnsupportedFeature(
            f"{path} holds consolidated.safetensors, which has other tensor names; convert it to Hugging Face format"
        )
    if len(tensors) == 1:
        return tensors[0]
    if tensors:
        raise InvalidArgument(f"{path} holds several weight files but no {_INDEX}: {listed(tensors)}")
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        raise UnsupportedFeature(
            f"{path} holds weights only as pickle files {listed(pickles)}; convert them to safetensors "
            "(transformers: `model.save_pretrained(directory)`)"
        )
    raise InvalidArgument(f"{path} holds no weights: model.safetensors, or shards with {_INDEX}, are missing")


def _read_index(path: Path) -> dict[str, str]:
    weight_map = _read_json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidArgument(f"{path / _INDEX} has no 'weight_map' of tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise InvalidArgument(f"{path / _INDEX} gives {file!r} for {name!r}, expected a file name in its directory")
    return weight_map


def _open_gguf(path: Path) -> Checkpoint:
    from openengine.core.gguf import GgufFile
    from openengine.core.gguf_models import generation_defaults, hf_config

    file = GgufFile(path)
    config = hf_config(file.metadata, file.tensors)
    return Checkpoint(
        path=path,
        format="gguf",
        config=read_config(config),
        hf_config=config,
        generation_config=generation_defaults(file.metadata),
        files=tuple(file.paths),
        gguf=file,
    )


class _GgufWeight:
    """A GGUF tensor as a `WeightSource`: dequantized to float32, in place where it can be, else by ranges of rows."""

    def __init__(self, tensor: HfTensor) -> None:
        self._tensor = tensor
        self.shape = tensor.shape

    def holds_same(self, other: _GgufWeight) -> bool:
        mine, theirs = self._tensor.source, other._tensor.source
        return mine.type == theirs.type and np.array_equal(mine.data, theirs.data)

    def copy_to(self, destination: Tensor) -> None:
        direct = destination.dtype == torch.float32 and destination.is_contiguous()
        if direct and destination.device.type == "cpu":
            self._tensor.load(destination.numpy())
        else:
            for rows, values in self.chunks():
                destination[rows].copy_(values)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        return ((rows, torch.from_numpy(values)) for rows, values in self._tensor.chunks(_CHUNK_VALUES))


def _download(name: str, progress: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm
    except ImportError as exc:
        raise UnsupportedFeature(
            f"{name!r} does not exist here{_suggestion(Path(name))}, and fetching it from the hub needs the package "
            'huggingface_hub: pip install "openengine-inference[hub]"'
        ) from exc

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": not progress})

    wanted, unwanted = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"], ["*consolidated*", "original/*"]
    try:
        found = snapshot_download(name, allow_patterns=wanted, ignore_patterns=unwanted, tqdm_class=Bar)
    except Exception as exc:  # the hub's client raises errors of several libraries; each means that there is no model
        reason = " ".join(str(exc).split())
        raise ModelNotFound(
            f"{name!r} does not exist here{_suggestion(Path(name))}, and could not be fetched from the hub: {reason}"
        ) from exc
    return Path(found)


def _suggestion(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; {path.parent} does not exist either"
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()])
    return f"; did you mean {', '.join(str(path.parent / name) for name in near)}?" if near else ""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InvalidArgument(f"{path} is no regular file")
    try:
        value = json.loads(path.read_bytes())
    except OSError as exc:
        raise InvalidArgument(f"{path} cannot be read: {exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} holds {type(value).__name__}, expected an object")
    return value


def _token_ids(key: str, *configs: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids under `key` in the first config, or its text_config, that has them."""
    for config in configs:
        for values in (config, config.get("text_config") or {}):
            value = values.get(key)
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(type(item) is int and item >= 0 for item in ids):
                raise InvalidArgument(f"'{key}' is {value!r}, expected a token id or a list of them")
            return tuple(ids)
    return ()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
