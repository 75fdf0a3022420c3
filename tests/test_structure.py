# SPDX-License-Identifier: Apache-2.0
"""The package by its syntax trees: no import cycles, private names of vLLM in one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vllm_pyramid"


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package, by its dotted name."""
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from _walk(other)
            continue
        yield node
        yield from _walk(node)


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Module and name of each import, those inside functions too; the name is empty for `import`.

    Raises:
        AssertionError: a relative import.
    """
    for node in _walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, ast.unparse(node)
            yield from ((node.module or "", alias.name) for alias in node.names)


@cache
def graph() -> dict[str, set[str]]:
    """Which module imports which, at whatever time."""
    edges: dict[str, set[str]] = {}
    for module, tree in trees().items():
        edges[module] = set()
        for imported, name in _imports(tree):
            for target in (f"{imported}.{name}", imported):
                if target in trees():
                    edges[module].add(target)
                    break
    return edges


def _cycle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a ring, or nothing."""
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(module: str) -> list[str]:
        state[module] = 1
        path.append(module)
        for target in sorted(edges[module]):
            if state.get(target) == 1:
                return [*path[path.index(target) :], target]
            if target not in state and (found := visit(target)):
                return found
        state[module] = 2
        path.pop()
        return []

    for module in sorted(edges):
        if module not in state and (found := visit(module)):
            return found
    return []


def test_a_ring_would_be_found() -> None:
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not _cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_no_module_imports_itself_through_others_even_lazily() -> None:
    assert not _cycle(graph())


def test_the_package_imports_neither_the_lab_nor_tests() -> None:
    for module, tree in trees().items():
        foreign = {name.split(".")[0] for name, _ in _imports(tree)} & {"lab", "tests", "scripts"}
        assert not foreign, f"{module} imports {sorted(foreign)}"


# The folders from the bottom up: each imports those before it (docs/structure.md).
ORDER = [
    *("plan", "kernels", "policy", "step", "compat", "methods"),
    *("kv_cache", "scheduler", "attention", "worker", "transfer", "frontend", "tools"),
]
# What is loaded where torch and vLLM must not be names the records of a step for the type checker.
LIGHT = ("policy", "methods", "frontend")


def _folder(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def test_only_entry_points_are_loose_and_every_folder_has_its_place() -> None:
    loose = {name for name in trees() if name.count(".") == 1 and f"{name}." not in _prefixes()}
    assert loose == {f"{PACKAGE}.{name}" for name in ("llm", "plugin", "version")}
    assert {_folder(name) for name in trees()} - {"", "llm", "plugin", "version"} == set(ORDER)


@cache
def _prefixes() -> frozenset[str]:
    return frozenset(f"{name.rpartition('.')[0]}." for name in trees())


@pytest.mark.parametrize("lower", ORDER)
def test_folders_import_downwards_only(lower: str) -> None:
    """Lazy imports count too; those for the type checker are looked at below."""
    above = set(ORDER[ORDER.index(lower) + 1 :])
    for module, targets in graph().items():
        if _folder(module) == lower:
            wrong = {target for target in targets if _folder(target) in above}
            assert not wrong, f"{module} imports {sorted(wrong)}"


def _type_checking_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from (source for source, _ in _imports(node))


def test_type_checking_stands_where_torch_must_not_load() -> None:
    for module, tree in trees().items():
        ours = [name for name in _type_checking_imports(tree) if name.startswith(PACKAGE)]
        climbs = [
            name
            for name in ours
            if module.count(".") and ORDER.index(_folder(name)) > ORDER.index(_folder(module))
        ]
        assert _folder(module) in LIGHT or not climbs, f"{module} climbs to {climbs}"


# Of methods beyond scoring.
WORDS = ("thinn", "top_n", "swap", "solver", "h2o", "kcache", "keyformer", "accumulat")
WORDS += ("sparse", "ridge", "lasting", "infllm", "streaming", "antidiagonal")
WORDS += ("summar", "solv")
CORE = ("scheduler", "kv_cache", "attention", "worker", "step", "plan")
# Words with other meanings: to resolve a plan, to dissolve a bundle; `--kv-swap-space`.
OTHER = re.compile("resolv|dissolv|swap_space_bytes")


def _names(tree: ast.Module) -> Iterator[str]:
    """All names of a module: of variables, attributes, arguments, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def test_the_core_knows_no_method() -> None:
    """It imports no method, and no name of one stands in its source."""
    for module, tree in trees().items():
        if _folder(module) not in CORE:
            continue
        for target in graph()[module]:
            assert _folder(target) != "methods", (module, target)
        names = {name: OTHER.sub("", name.lower()) for name in _names(tree)}
        found = {name for name, left in names.items() if any(word in left for word in WORDS)}
        assert not found, (module, found)


def test_only_the_layout_of_single_heads_knows_lanes() -> None:
    """No name in the core has the word, and no docstring or comment."""
    own = {f"{PACKAGE}.kv_cache.head_layout"}
    own |= {name for name in trees() if name.startswith(f"{PACKAGE}.attention.per_head")}
    assert len(own) > 4
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if _folder(_name(path)) in ("scheduler", "kv_cache", "attention", "worker", "step", "plan"):
            found[_name(path)] = re.search(r"((?<![a-z])lane|Lane)s?(?![a-z])", source)
    assert {name for name, word in found.items() if word} == own


def test_plans_and_parts_are_told_apart_by_questions_not_by_class() -> None:
    """`isinstance` of a part or of an open plan stands in the modules that own it, and nowhere."""
    owned = ("Scorer", "Allocator", "Selector", "Schedule", "Values", "DeferredPlan")
    for module, tree in trees().items():
        if _folder(module) in ("methods", "policy", "step"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                classes = ast.unparse(node.args[1])
                assert not classes.endswith(owned), (module, ast.unparse(node))


@cache
def _own_names() -> frozenset[str]:
    """Underscore names that this package defines itself, outside compat."""
    found: set[str] = set()
    for module, tree in trees().items():
        if module.startswith(f"{PACKAGE}.compat"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(name.id for name in targets if isinstance(name, ast.Name))
    return frozenset(found)


FOREIGN = {"_asdict", "_make", "_replace", "_C"}  # of torch and of named tuples


@cache
def _defined_in_vllm() -> frozenset[str]:
    """Underscore methods and attributes that vLLM's classes define."""
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    found: set[str] = set()
    folder = Path(spec.origin).parent
    for part in (
        "v1/core",
        "v1/worker",
        "v1/attention",
        "v1/engine",
        "engine",
        "platforms",
        "config",
    ):
        for path in (folder / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(node.name)
    return frozenset(n for n in found if n.startswith("_") and not n.startswith("__"))


@pytest.mark.long  # reads vLLM's sources
def test_private_names_of_vllm_stand_in_compat_only() -> None:
    own, theirs = _own_names(), _defined_in_vllm()
    for module, tree in trees().items():
        if module.startswith(f"{PACKAGE}.compat"):
            continue
        imported = {name for source, name in _imports(tree) if source.split(".")[0] == "vllm"}
        assert not {name for name in imported if name.startswith("_")}, module
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                known = node.attr.startswith("__") or node.attr in own | FOREIGN
                assert known, f"{module} uses {ast.unparse(node)}, which is not its own"
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and _derives_from_vllm(node, tree):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and not item.name.startswith("__"):
                        assert item.name not in theirs, f"{module}: {node.name}.{item.name}"


def _derives_from_vllm(node: ast.ClassDef, tree: ast.Module) -> bool:
    names = {name for source, name in _imports(tree) if source.split(".")[0] == "vllm"}
    return any(ast.unparse(base) in names for base in node.bases)


def test_the_ledger_names_every_private_name_in_compat() -> None:
    from vllm_pyramid import compat

    ledger = compat.__doc__ or ""
    missing: set[str] = set()
    for module, tree in trees().items():
        if not module.startswith(f"{PACKAGE}.compat"):
            continue
        for node in ast.walk(tree):
            name = ""
            if isinstance(node, ast.Attribute):
                name = node.attr
            elif isinstance(node, ast.FunctionDef):
                name = node.name
            if name.startswith("_") and not name.startswith("__") and name in _defined_in_vllm():
                missing |= {name} if name not in ledger else set()
    assert not missing, f"not in the ledger of compat/__init__.py: {sorted(missing)}"
