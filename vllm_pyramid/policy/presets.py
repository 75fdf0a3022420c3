# SPDX-License-Identifier: Apache-2.0
"""Load policies: packaged presets, the user's preset files, and changes to either."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from vllm_pyramid.plan import Budget
from vllm_pyramid.policy.kinds import built_in_kinds, did_you_mean, resolve_kind
from vllm_pyramid.policy.policy import SECTIONS, Policy

# `auto` is the preset with the best measured quality on a real model (docs/quality.md).
AUTO, RECOMMENDED = "auto", "snapkv-expected"
_PRESET_KEYS = tuple(Policy.model_fields)
_PLAIN_KEYS = tuple(
    key for key in _PRESET_KEYS if key not in {"name", "description", "paper", "budget", *SECTIONS}
)


def _configs_dir() -> Path:
    """Return the folder of the packaged presets: in the package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "pyramidkv.yaml").is_file():
            return folder
    raise FileNotFoundError(
        f"the presets of vllm-pyramid are not in or next to {package}: reinstall"
    )


@lru_cache(maxsize=1)
def _preset_files() -> dict[str, Path]:
    paths = sorted(_configs_dir().glob("*.yaml"), key=lambda path: path.stem)
    return {path.stem: path for path in paths}


def policy_names() -> list[str]:
    return list(_preset_files())


def load_presets() -> list[Policy]:
    return [load_policy(name) for name in policy_names()]


def load_policy(
    name_or_path: str,
    budget: str | int | Budget | None = None,
    args: Mapping[str, Any] | None = None,
) -> Policy:
    """Load a policy from a packaged preset or a YAML file and apply changes.

    Args:
        name_or_path: a preset's name, `auto` for the recommended one, or a `.yaml` or `.yml` path.
        budget: replaces the preset's: `512`, `"512"` or `"12%"`. If `args` make the policy find its
            own total (`retention`), the budget is an upper limit, and `100%` by default.
        args: replaces further values. A plain key is looked up in the whole preset (`"beta"` is
            `allocator.beta`), a dotted one or a nested mapping names its section. A section whose
            kind changes starts from the new kind's defaults.

    Raises:
        ValueError: unknown name, key or kind, unreadable file (with its line), or values that do
            not go together.
    """
    if name_or_path == AUTO:
        name_or_path = RECOMMENDED
    data, lines = _read(name_or_path)
    where = f"policy {name_or_path!r}"
    policy = _build(data, where, lines)
    if budget is None and not args:
        return policy
    changed = policy.model_dump()
    if args:
        _apply_args(changed, args, where)
    if budget is not None:
        changed["budget"] = Budget.parse(budget)
    result = _build(changed, where, {})
    own = result.allocator.default_budget()
    if budget is None and own is not None and policy.allocator.default_budget() is None:
        return result.model_copy(update={"budget": own})
    return result


def _read(name_or_path: str) -> tuple[dict[Any, Any], dict[tuple[str, ...], int]]:
    if name_or_path in _preset_files():
        path = _preset_files()[name_or_path]
    elif name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path).expanduser()
    else:
        names = policy_names()
        raise ValueError(
            f"unknown policy {name_or_path!r}{did_you_mean(name_or_path, [AUTO, *names])}; valid "
            f"policies: {AUTO}, {', '.join(names)}, or the path of a .yaml file"
        )
    data, lines = read_yaml_mapping(path)
    data.setdefault("name", path.stem)
    data.setdefault("description", f"read from {path.name}")
    data.setdefault("paper", "")
    for key in data:
        if key not in _PRESET_KEYS:
            raise ValueError(
                f"unknown key {key!r} in {path}, line {lines.get((str(key),), 1)}"
                f"{did_you_mean(str(key), _PRESET_KEYS)}; valid keys: {', '.join(_PRESET_KEYS)}"
            )
    return data, lines


def _build(data: dict[Any, Any], where: str, lines: Mapping[tuple[str, ...], int]) -> Policy:
    """Validate the data; errors are one line that names keys, values and lines of the file."""
    try:
        return Policy.model_validate(data)
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            key = tuple(str(part) for part in item["loc"])
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "missing":
                message = "this key is missing"
            elif item["type"] != "value_error":
                message = f"{message}, not {item['input']!r}"
            at = f" (line {lines[key[:1]]})" if key and key[:1] in lines else ""
            problems.append(f"{where}: {'.'.join(key)}{at}: {message}" if key else message)
        raise ValueError("; ".join(problems)) from None


def _apply_args(data: dict[str, Any], args: Mapping[str, Any], where: str) -> None:
    flat: dict[str, Any] = {}
    for key, value in args.items():
        if key in SECTIONS and isinstance(value, Mapping):
            nested = {f"{key}.{field}": inner for field, inner in value.items()}
        elif key in SECTIONS:
            nested = {f"{key}.kind": value}
        else:
            nested = {key: value}
        for name, inner in nested.items():
            if name in flat:
                raise ValueError(f"{where}: the argument {name!r} is given twice")
            flat[name] = inner
    # Kinds first: they decide which other keys there are.
    for section, base in SECTIONS.items():
        if f"{section}.kind" in flat:
            kind = flat.pop(f"{section}.kind")
            resolve_kind(base, kind)
            if kind != data[section]["kind"]:
                data[section] = {"kind": kind}
    targets: set[tuple[str | None, str]] = set()
    for key, value in flat.items():
        section_name, field = _resolve_key(data, key, where)
        if (section_name, field) in targets:
            raise ValueError(f"{where}: the argument {key!r} is given twice")
        targets.add((section_name, field))
        (data if section_name is None else data[section_name])[field] = value


def _resolve_key(data: dict[str, Any], key: str, where: str) -> tuple[str | None, str]:
    """Return the section (None: the top level) and the field that an argument's key means."""
    if key == "budget":
        raise ValueError(
            f"{where}: set the budget with --kv-budget (kv_budget), not as an argument"
        )
    if key in _PLAIN_KEYS:
        return None, key
    fields = _section_fields(data)
    section, dot, field = key.partition(".")
    if dot and field in fields.get(section, ()):
        return section, field
    owners = [name for name, names in fields.items() if key in names or key == "kind"]
    if len(owners) == 1:
        return owners[0], key
    if owners:
        options = " or ".join(repr(f"{owner}.{key}") for owner in owners)
        raise ValueError(f"{where}: the argument {key!r} is ambiguous: write {options}")
    valid = [*_PLAIN_KEYS, *(f"{name}.kind" for name in SECTIONS)]
    valid += [f"{name}.{field}" for name, names in fields.items() for field in names]
    kinds = ", ".join(f"{name} {data[name]['kind']!r}" for name in SECTIONS)
    hint = did_you_mean(key, [*valid, *(name.rpartition(".")[2] for name in valid)])
    if elsewhere := [
        f"{name} {kind!r}"
        for name, base in SECTIONS.items()
        for kind, cls in built_in_kinds(base).items()
        if key.removeprefix(f"{name}.") in cls.model_fields
    ]:
        hint = f" (it belongs to {', '.join(elsewhere)})"
    raise ValueError(
        f"{where}: unknown argument {key!r}{hint}; with {kinds} the valid ones are: "
        f"{', '.join(valid)} (the part before a dot may be left out where it is clear)"
    )


def _section_fields(data: dict[str, Any]) -> dict[str, list[str]]:
    """Return the fields of every section except `kind`, for the kinds that `data` has now."""
    return {
        name: [
            field
            for field in resolve_kind(base, data[name]["kind"]).model_fields
            if field != "kind"
        ]
        for name, base in SECTIONS.items()
    }


KeyLines = dict[tuple[str, ...], int]


def read_yaml_mapping(path: Path) -> tuple[dict[Any, Any], KeyLines]:
    """Read the top-level mapping of a YAML file, and the line (from 1) of every key by its path.

    ValueError: missing or unreadable file, malformed YAML, a key given twice, or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the policy file {path}: {error}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: KeyLines = {}
        if root is not None:
            _collect(root, (), lines, path)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"malformed YAML in {path}{at}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"malformed YAML in {path}: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(
            f"{path}, line 1: a policy file is a mapping of keys, not a {type(data).__name__}"
        )
    return data, lines


def _collect(node: yaml.Node, prefix: tuple[str, ...], lines: KeyLines, path: Path) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = (*prefix, str(key_node.value))
        line = key_node.start_mark.line + 1
        if key in lines:
            raise ValueError(
                f"{path}, line {line}: {'.'.join(key)!r} is given twice, first in line {lines[key]}"
            )
        lines[key] = line
        _collect(value_node, key, lines, path)
