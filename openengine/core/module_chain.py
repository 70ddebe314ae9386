"""modules.json of a sentence-transformers directory: which modules follow each other, and where their files lie.

Does not own what the modules' own files say (sentence_transformers.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from openengine.core.json_settings import JsonSettings
from openengine.core.tokenizer_files import is_present, read_json_file
from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = ["read_module_chain"]

_KNOWN = ("Dense", "Dropout", "LogitScore", "MLMTransformer", "Normalize", "Pooling", "SpladePooling", "Transformer")
# Where the library has kept its modules; a file of the module's name may follow.
_PACKAGES = frozenset(
    {
        "base.modules",
        "cross_encoder.modules",
        "models",
        "sentence_transformer.modules",
        "sparse_encoder.models",
        "sparse_encoder.modules",
    }
)


def read_module_chain(directory: Path) -> list[tuple[str, Path]]:
    """Kind and folder of each module, the transformer first; what changes nothing in use (Dropout) is left out.

    Raises: InvalidArgument for a damaged file, UnsupportedFeature for a module or key that is not implemented.
    """
    path = directory / "modules.json"
    entries = read_json_file(path)
    if not isinstance(entries, list) or not entries:
        raise InvalidArgument(f"{path} holds no list of modules")
    modules = []
    for index, entry in enumerate(entries):
        kind, folder = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise InvalidArgument(f"{path}: entry {index} is {entry!r:.120}, expected an object with 'type' and 'path'")
        _check_entry(JsonSettings(path, entry, key=f"entry {index}: "))
        name = kind.rpartition(".")[2]
        if not _is_known(kind):
            raise UnsupportedFeature(
                f"{path}: module {index} is a {kind:.120}, which is not implemented; implemented are {', '.join(_KNOWN)} "
                "of sentence_transformers"
            )
        if ".." in Path(folder).parts or Path(folder).is_absolute():
            raise InvalidArgument(f"{path}: the path {folder!r} of module {index} leads out of the directory")
        if (index == 0) != name.endswith("Transformer"):
            raise UnsupportedFeature(
                f"{path}: module {index} is a {name}; exactly the first one must be the transformer"
            )
        if index == 0 and folder:
            raise UnsupportedFeature(
                f"{path}: the transformer lies in {folder!r}; move its files beside modules.json and make its path empty"
            )
        if is_present(directory / folder) and not os.path.isdir(directory / folder):
            raise InvalidArgument(f"{path}: the path {folder!r:.120} of module {index} is no directory")
        if name != "Dropout":
            modules.append((name, directory / folder))
    return modules


def _check_entry(entry: JsonSettings) -> None:
    for key in ("idx", "name", "path", "type"):
        entry.take(key)
    entry.refuse("kwargs", neutral=[])
    entry.refuse_others()


def _is_known(kind: str) -> bool:
    """Whether it is the full name of a known module; "models.Pooling" and "models.Pooling.Pooling" have both been written."""
    library, _, rest = kind.partition(".")
    package, _, name = rest.rpartition(".")
    outer, _, file = package.rpartition(".")
    is_file = file.replace("_", "").lower() == name.lower()
    return library == "sentence_transformers" and name in _KNOWN and (outer if is_file else package) in _PACKAGES
