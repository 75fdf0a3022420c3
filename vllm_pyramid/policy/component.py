# SPDX-License-Identifier: Apache-2.0
"""The parts of a policy (scorer, allocator, selector, schedule) and how a preset names them.

A section of a preset is a mapping with a `kind` and the fields of that kind, or the kind alone:

    allocator: {kind: arithmetic, beta: 20}
    allocator: uniform

Built-in kinds have short names. `kind: "package.module:ClassName"` uses a class of your own; it
must derive from the section's base class and be importable in every process of the engine.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict


class Component(BaseModel):
    """Base of all parts: immutable, hashable, compared by value, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    section: ClassVar[str]
    kind: str


ComponentT = TypeVar("ComponentT", bound=Component)


def did_you_mean(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """` (did you mean 'x'?)` for the closest valid name, or nothing."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _import_kind(base: type[ComponentT], kind: str) -> type[ComponentT]:
    module_name, _, class_name = kind.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import the {base.section} {kind!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"the {base.section} {kind!r} is not a subclass of {base.__name__}")
    return found


def resolve_kind(
    base: type[ComponentT], kinds: dict[str, type[ComponentT]], kind: object
) -> type[ComponentT]:
    """The class behind a `kind`.

    Raises:
        ValueError: unknown kind; the message lists the valid ones.
    """
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind]
    if isinstance(kind, str) and ":" in kind:
        return _import_kind(base, kind)
    hint = did_you_mean(kind, kinds) if isinstance(kind, str) else ""
    raise ValueError(
        f"unknown {base.section} kind {kind!r}{hint}; valid kinds: {', '.join(sorted(kinds))}, "
        "or 'package.module:ClassName'"
    )


def parse_component(
    base: type[ComponentT], kinds: dict[str, type[ComponentT]], value: object
) -> ComponentT:
    """Build a part from a section of a preset.

    Args:
        base: the section's base class. kinds: its built-in classes by kind.
        value: an instance, the name of a kind, or a mapping with `kind` and that kind's fields.

    Raises:
        ValueError: unknown kind or field (the valid ones are listed), or a bad value.
    """
    if isinstance(value, base):
        return value
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, dict) or "kind" not in value:
        raise ValueError(
            f"{base.section} must be a kind or a mapping with a `kind`, not {value!r}; valid "
            f"kinds: {', '.join(sorted(kinds))}"
        )
    fields: dict[Any, Any] = value
    cls = resolve_kind(base, kinds, fields["kind"])
    for key in fields:
        if key not in cls.model_fields:
            raise ValueError(
                f"unknown key {key!r} in {base.section} {fields['kind']!r}"
                f"{did_you_mean(str(key), cls.model_fields)}; valid keys: "
                f"{', '.join(cls.model_fields)}"
            )
    return cls.model_validate(fields)
