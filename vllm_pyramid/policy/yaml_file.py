# SPDX-License-Identifier: Apache-2.0
"""Reading YAML files so that a mistake is reported with its file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

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
