# SPDX-License-Identifier: Apache-2.0
"""The policies of a run: names, preset files, and either with arguments of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_pyramid.config import parse_policy_args
from vllm_pyramid.policy import Policy, load_policy

__all__ = ["Variant", "parse_variants"]

_NAME = re.compile(r"[^,{]*")


@dataclass(frozen=True)
class Variant:
    """One policy as it is measured.

    Attributes:
        policy: a preset's name or the path of a `.yaml` file.
        args: replace values of it, as `--kv-policy-args` does.
    """

    policy: str
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What tables, pictures and rows call it: `snapkv(kernel_size=11)`.

        Equal arguments make equal labels, in whatever order or nesting they are given.
        """
        if not self.args:
            return self.policy
        return f"{self.policy}({', '.join(sorted(_written(self.args)))})"

    def load(self, budget: str | None = None) -> Policy:
        """The policy itself.

        Raises:
            ValueError: see `load_policy`.
        """
        return load_policy(self.policy, budget, self.args)


def _written(args: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for key, value in args.items():
        if isinstance(value, Mapping):
            yield from _written(value, f"{section}{key}.")
        else:
            shown = value if isinstance(value, str) else json.dumps(value)
            yield f"{section}{key}={shown}"


def parse_variants(text: str, flag: str) -> tuple[Variant, ...]:
    """The policies of a list such as `full,mine.yaml,snapkv:{"kernel_size":11}`, each once.

    Args:
        flag: where the list comes from, for messages.

    Raises:
        ValueError: there are none, one is unknown, or its arguments are no JSON object or do not
            suit it.
    """
    found: dict[str, Variant] = {}
    place = 0
    while place < len(text):
        match = _NAME.match(text, place)
        assert match is not None
        name, place = match[0].strip(), match.end()
        args: dict[str, Any] = {}
        if text[place : place + 1] == "{":
            name = _before_arguments(name, flag)
            args, place = _arguments(text, place, f"{flag}: the arguments of {name!r}")
        elif not name:
            place += 1
            continue
        place += 1  # the comma
        variant = Variant(name, args)
        try:
            variant.load()
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from None
        found.setdefault(variant.label, variant)
    if not found:
        raise ValueError(f"{flag} is empty: give at least one, separated by commas")
    return tuple(found.values())


def _before_arguments(name: str, flag: str) -> str:
    if not name.endswith(":") or not name.removesuffix(":").strip():
        raise ValueError(
            f"{flag}: arguments follow a policy's name and a colon, as in "
            f"'snapkv:{{\"kernel_size\":11}}', not {name!r}"
        )
    return name.removesuffix(":").strip()


def _arguments(text: str, place: int, what: str) -> tuple[dict[str, Any], int]:
    """The JSON object at a place, and where the list goes on."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, place)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{what} are not valid JSON: {error.msg} in {text[place:]!r}; quote the list for the "
            f"shell, as in --policies 'full,snapkv:{{\"kernel_size\":11}}'"
        ) from None
    try:
        args = parse_policy_args(text[place:end])
    except ValueError as error:  # a key given twice, NaN
        raise ValueError(f"{what}: {error}") from None
    rest = text[end:].lstrip()
    if rest and not rest.startswith(","):
        raise ValueError(f"{what} end before {rest!r}: a comma goes between policies")
    return args, len(text) - len(rest)
