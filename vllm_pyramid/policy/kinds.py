# SPDX-License-Identifier: Apache-2.0
"""Find the class of a `kind`, in `vllm_pyramid.methods` or in a module of the user's."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterable
from functools import cache, partial
from typing import Literal, TypeVar, get_origin

from pydantic import BeforeValidator

from vllm_pyramid.policy.component import Component

# The folder of the built-in kinds. It is imported by name, because it depends on this folder.
METHODS = "vllm_pyramid.methods"
_BUILT_IN = (f"{METHODS}.", "vllm_pyramid.policy.")

ComponentT = TypeVar("ComponentT", bound=Component)


def did_you_mean(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ` (did you mean 'x'?)` for the closest valid name, or an empty string."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


@cache
def built_in_kinds(base: type[ComponentT]) -> dict[str, type[ComponentT]]:
    """Return all classes of a section in `vllm_pyramid.methods`, by kind; folders export theirs."""
    root = importlib.import_module(METHODS)
    for module in pkgutil.iter_modules(root.__path__, f"{METHODS}."):
        importlib.import_module(module.name)
    found: dict[str, type[ComponentT]] = {}
    waiting = list(base.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        kind = cls.model_fields["kind"].default
        if isinstance(kind, str) and cls.__module__.startswith(_BUILT_IN):
            assert kind not in found, f"two classes of the kind {kind!r}"
            found[kind] = cls
    return dict(sorted(found.items()))


def _import_kind(base: type[ComponentT], kind: str) -> type[ComponentT]:
    module_name, _, class_name = kind.partition(":")
    if module_name == "__main__":
        raise ValueError(
            f"the {base.section} {kind!r} is defined in the script that is run, which the engine's "
            "processes cannot import: move it into a module of its own"
        )
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"cannot import the {base.section} {kind!r}: {error}; install the package that "
            "holds it, or add its folder to PYTHONPATH, which all processes of the engine read"
        ) from error
    except Exception as error:  # a mistake in the user's module, of whatever kind
        raise ValueError(
            f"cannot import the {base.section} {kind!r}: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"the {base.section} {kind!r} is not a subclass of {base.__name__}")
    found.check_class()
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ValueError(f"the {base.section} {kind!r} does not define {missing}")
    if get_origin(found.model_fields["kind"].annotation) is Literal:
        raise ValueError(
            f"the {base.section} {kind!r} inherits the kind of a built-in class, which other "
            "processes would load instead: declare `kind: str` in it"
        )
    return found


def resolve_kind(base: type[ComponentT], kind: object) -> type[ComponentT]:
    """Return the class of a `kind` in the section whose base class is `base`.

    ValueError: unknown kind (the message lists the valid ones), or a class that does nothing.
    """
    kinds = built_in_kinds(base)
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind]
    if isinstance(kind, str) and ":" in kind:
        return _import_kind(base, kind)
    hint = did_you_mean(kind, kinds) if isinstance(kind, str) else ""
    raise ValueError(
        f"unknown {base.section} kind {kind!r}{hint}; valid kinds: {', '.join(kinds)}, "
        "or 'package.module:ClassName'"
    )


def parse_component(base: type[ComponentT], value: object) -> ComponentT:
    """Build a part from a section of a preset: an instance, a kind, or a mapping with `kind` and
    fields.

    `kind` may be left out if the section has only one. ValueError: unknown kind or field, or a bad
    value.
    """
    if isinstance(value, base):
        return value
    if isinstance(value, str):
        value = {"kind": value}
    if isinstance(value, dict) and "kind" not in value and len(built_in_kinds(base)) == 1:
        value = {"kind": next(iter(built_in_kinds(base))), **value}
    if not isinstance(value, dict) or "kind" not in value:
        raise ValueError(
            f"{base.section} must be a kind or a mapping with a `kind`, not {value!r}; valid "
            f"kinds: {', '.join(built_in_kinds(base))}"
        )
    cls = resolve_kind(base, value["kind"])
    for key in value:
        if key not in cls.model_fields:
            raise ValueError(
                f"unknown key {key!r} in {base.section} {value['kind']!r}"
                f"{did_you_mean(str(key), cls.model_fields)}; valid keys: "
                f"{', '.join(cls.model_fields)}"
            )
    try:
        written = json.dumps(value)
    except TypeError:
        return cls.model_validate(value)
    # Validated as JSON, like YAML files and what travels between processes: lists become tuples or
    # sets, and values become enumerations. No other type is converted.
    return cls.model_validate_json(written)


def parsed_by(base: type[ComponentT]) -> BeforeValidator:
    """Return the validator of a field that holds a part; arguments as of `parse_component`."""
    return BeforeValidator(partial(parse_component, base))
