"""The architecture's rules, read from the source: who may import whom, and what a module may not do."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "openengine"

# A module imports modules of a lower rank, or of its own without cycles. The longest prefix decides.
RANKS = {
    "openengine.errors": 0,
    "openengine.types": 0,
    "openengine.results": 0,
    "openengine.validation": 0,
    "openengine.hosts": 0,
    "openengine.names": 0,
    "openengine.service_types": 0,
    "openengine.event_types": 0,
    "openengine.task_types": 0,
    "openengine.task_results": 0,
    "openengine.tokenizer_types": 0,
    "openengine.progress": 0,
    "openengine.demo": 1,
    "openengine.ops": 1,
    "openengine.core": 3,
    "openengine.core.blocks": 2,
    "openengine.core.cache_keys": 2,
    "openengine.core.config": 2,
    "openengine.core.encoder_scheduler": 2,
    "openengine.core.events": 2,
    "openengine.core.runtime_events": 2,
    "openengine.core.scheduler": 2,
    "openengine.core.sequence": 2,
    "openengine.core.shared_prefix": 2,
    "openengine.core.stats": 2,
    "openengine.core.step_plan": 2,
    "openengine.core.subscription": 2,
    "openengine.core.task_kinds": 2,
    "openengine.core.task_work": 2,
    "openengine.core.loop": 4,
    "openengine": 5,  # engine.py and what stands beside it
    "openengine.__main__": 7,
    "openengine.rpc": 7,
}

# What may be imported from outside the standard library while a module loads, by rank.
REQUIRED = {"jinja2", "numpy", "safetensors", "tokenizers", "torch", "tqdm"}
AT_IMPORT = {0: {"numpy"}, 1: {"numpy", "torch"}, 2: {"numpy"}, 3: REQUIRED, 4: REQUIRED, 5: REQUIRED}
RPC_AT_IMPORT = {"google", "grpc", "grpc_health", "grpc_reflection", "numpy", "prometheus_client"}
# Imported only inside the functions that need them, and absent from most machines.
OPTIONAL = {"PIL", "flash_attn", "huggingface_hub", "llguidance", "sentencepiece"}


class Import(NamedTuple):
    module: str
    line: int
    deferred: bool  # inside a function
    typing_only: bool  # under `if TYPE_CHECKING`


@cache
def modules() -> dict[str, ast.Module]:
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        trees[name] = ast.parse(path.read_text("utf-8"), str(path))
    return trees


def rank(module: str) -> int:
    if module == "openengine":
        return 6  # It names everything, so only what is built on the whole may import it.
    return RANKS[max((name for name in RANKS if f"{module}.".startswith(f"{name}.")), key=len)]


def imports(module: str) -> Iterator[Import]:
    def visit(node: ast.AST, deferred: bool, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, deferred, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import; write the full name"
            for alias in node.names:
                if (node.module, alias.name) == ("openengine", "__version__"):
                    continue  # A constant, there before anything else is imported.
                inner = f"{node.module}.{alias.name}"
                yield Import(inner if inner in modules() else node.module, node.lineno, deferred, typing_only)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                yield from visit(child, deferred, True)
            for child in node.orelse:
                yield from visit(child, deferred, typing_only)
        else:
            deferred = deferred or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, deferred, typing_only)

    return visit(modules()[module], False, False)


def is_ours(module: str) -> bool:
    return module.split(".")[0] == "openengine"


def is_foreign(module: str) -> bool:
    top = module.split(".")[0]
    return top not in sys.stdlib_module_names and top != "openengine"


def every_module() -> list[str]:
    # The package itself imports for type checkers only.
    return [name for name in modules() if name != "openengine"]


@pytest.mark.parametrize("module", every_module())
def test_a_module_imports_its_own_rank_or_lower(module):
    wrong = [
        f"{module}:{item.line} (rank {rank(module)}) imports {item.module} (rank {rank(item.module)})"
        for item in imports(module)
        if is_ours(item.module) and rank(item.module) > rank(module)
    ]
    assert not wrong


# The package, and what an engine and a remote client do alike before and around their requests.
PUBLIC = {
    "openengine",
    "openengine.batches",
    "openengine.hosts",
    "openengine.names",
    "openengine.options",
    "openengine.progress",
    "openengine.task_options",
    "openengine.task_results",
    "openengine.task_types",
    "openengine.validation",
}


def test_rpc_uses_public_names_only():
    wrong = [
        f"{module}:{item.line} imports {item.module}"
        for module in every_module()
        if module.startswith("openengine.rpc")
        for item in imports(module)
        if is_ours(item.module) and item.module not in PUBLIC and not item.module.startswith("openengine.rpc")
    ]
    assert not wrong


def test_imports_have_no_cycles():
    graph = {
        name: {item.module for item in imports(name) if is_ours(item.module) and not item.typing_only}
        for name in every_module()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " imports ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in sorted(graph.get(name, ())):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("module", every_module())
def test_a_module_loads_only_the_packages_of_its_rank(module):
    allowed = RPC_AT_IMPORT if module.startswith("openengine.rpc") else AT_IMPORT.get(rank(module), set())
    wrong = [
        f"{module}:{item.line} imports {item.module} while loading"
        for item in imports(module)
        if is_foreign(item.module) and not item.deferred and not item.typing_only
        if item.module.split(".")[0] not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("module", [name for name in every_module() if rank(name) in (0, 2)])
def test_values_and_policy_never_import_torch(module):
    assert not [item.line for item in imports(module) if item.module.split(".")[0] == "torch"]


@pytest.mark.parametrize("module", every_module())
def test_every_package_imported_anywhere_is_declared(module):
    known = REQUIRED | OPTIONAL | (RPC_AT_IMPORT if module.startswith("openengine.rpc") else set())
    wrong = [
        f"{module}:{item.line} imports {item.module}"
        for item in imports(module)
        if is_foreign(item.module) and item.module.split(".")[0] not in known
    ]
    assert not wrong


@pytest.mark.parametrize("module", [name for name in every_module() if name != "openengine.demo"])
def test_the_environment_is_read_in_demo_only(module):
    names = ("environ", "environb", "getenv", "getenvb")
    wrong = [
        f"{module}:{node.lineno} reads the environment"
        for node in ast.walk(modules()[module])
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names))
    ]
    assert not wrong


@pytest.mark.parametrize("module", [name for name in every_module() if not name.endswith(".__main__")])
def test_library_code_never_prints(module):
    wrong = [
        f"{module}:{node.lineno} prints"
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong


@pytest.mark.parametrize("module", every_module())
def test_every_module_says_what_it_is_and_what_it_offers(module):
    tree = modules()[module]
    if not tree.body or module.endswith(("_pb2", "_pb2_grpc")):
        return  # An empty __init__.py, or generated code.
    assert ast.get_docstring(tree), f"{module} has no docstring"
    if len(tree.body) > 1:
        names = [t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
        assert "__all__" in names, f"{module} has no __all__"
