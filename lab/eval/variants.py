# SPDX-License-Identifier: Apache-2.0
"""The policies of a run: names, preset files, and either with arguments of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_pyramid.frontend.setting_values import parse_policy_args
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.capabilities import Feature
from vllm_pyramid.tools.command_parts import split_cache_dtype

# Behind an @: requests say where their conversation's earlier turns ended.
TURNS = "turns"
# A name, then the brace of its arguments, the comma of the next policy, or the end.
_NAME = re.compile(r"\s*([^,{]*?)\s*(:?)\s*([,{]|$)")


@dataclass(frozen=True)
class Variant:
    """One policy as it is measured.

    Attributes:
        policy: a preset's name or the path of a `.yaml` file.
        args: replace values of it, as `--kv-policy-args` does.
        cache_dtype: of the KV cache, as `--kv-cache-dtype` names it; None for the model's.
        turns: whether requests say where their conversation's earlier turns ended (`kv_turns`),
            and are evicted there.
    """

    policy: str
    args: Mapping[str, Any] = field(default_factory=dict)
    cache_dtype: str | None = None
    turns: bool = False

    @property
    def label(self) -> str:
        """Return what tables, pictures and rows call it: `snapkv@fp8(kernel_size=11)`.

        Equal arguments make equal labels, in whatever order or nesting they are given.
        """
        kinds = [self.cache_dtype] * (self.cache_dtype is not None) + [TURNS] * self.turns
        args = f"({', '.join(sorted(_written(self.args)))})" if self.args else ""
        return "@".join([self.policy, *map(str, kinds)]) + args

    @property
    def engine_args(self) -> dict[str, Any]:
        """Return the engine arguments that it needs in addition to the policy."""
        return {} if self.cache_dtype is None else {"kv_cache_dtype": self.cache_dtype}

    def load(self, budget: str | None = None) -> Policy:
        """Load the policy itself.

        Raises:
            ValueError: see `load_policy`.
        """
        return load_policy(self.policy, budget, self.args)

    def definition(self) -> str:
        """Return all that decides what the policy keeps, but for its budget."""
        return self.load().model_dump_json(exclude={"budget"})

    @property
    def attends_in_part(self) -> str | None:
        """Return why no full attention of a prompt is computed to be measured; None if it is."""
        policy = self.load()
        if policy.allocator.thins_prompts:
            return "thins prompts between layers"
        if policy.inner_policy is not None:
            return "evicts inside the prompt"
        return "evicts where earlier turns ended" if self.turns else None


def budgets_of(policy: Policy, budgets: Sequence[str]) -> list[str | None]:
    """Return the budgets to measure a policy at: one of None if it has none."""
    return list(dict.fromkeys(budgets)) if policy.has_budget else [None]


def _written(args: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for key, value in args.items():
        if isinstance(value, Mapping):
            yield from _written(value, f"{section}{key}.")
        else:
            shown = value if isinstance(value, str) else json.dumps(value)
            yield f"{section}{key}={shown}"


def parse_variants(text: str, flag: str) -> tuple[Variant, ...]:
    """Parse a list of policies such as `full,mine.yaml,snapkv:{"kernel_size":11}`, each once.

    Args:
        flag: where the list comes from, for messages.

    Raises:
        ValueError: there are none, one is unknown, or its arguments are no JSON object or do not
            suit it.
    """
    found: dict[str, Variant] = {}
    place = 0
    while (match := _NAME.match(text, place)) and place < len(text):
        name, colon, following = match.groups()
        place = match.end()
        args: dict[str, Any] = {}
        if following == "{":
            if not name or not colon:
                raise ValueError(
                    f"{flag}: arguments follow a policy's name and a colon, as in "
                    f"'snapkv:{{\"kernel_size\":11}}', not {name + colon!r}"
                )
            args, place = _arguments(text, place - 1, f"{flag}: the arguments of {name!r}")
        elif not name + colon:
            continue
        try:
            name += colon * (following != "{")
            without = name.removesuffix(f"@{TURNS}")
            policy, cache_dtype = split_cache_dtype(without)
            variant = Variant(policy, args, cache_dtype, turns=without != name)
            reason = variant.load().why_not(Feature.KV_TURNS)
            if variant.turns and reason is not None:
                raise ValueError(f"{variant.label!r}: the policy takes no kv_turns: {reason}")
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from None
        found.setdefault(variant.label, variant)
    if not found:
        raise ValueError(f"{flag} is empty: give at least one, separated by commas")
    return tuple(found.values())


def _arguments(text: str, place: int, what: str) -> tuple[dict[str, Any], int]:
    """Return the JSON object at a place, and where the list goes on behind its comma."""
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
    return args, len(text) - len(rest) + 1
