# SPDX-License-Identifier: Apache-2.0
"""Write what is refused into docs/limits.md: `python scripts/write_limits.py`.

The tables between two marks are made from the table of capabilities
(`vllm_pyramid/policy/capabilities.py`). `make format` runs this, and a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from vllm_pyramid.frontend.refusals import EVERY_POLICY
from vllm_pyramid.methods.kvpress_presses import KvpressScorer
from vllm_pyramid.policy import load_policy, load_presets
from vllm_pyramid.policy.capabilities import Refusal, refusals, unsupported_by
from vllm_pyramid.policy.chunk import EvictionPoints
from vllm_pyramid.policy.component import Component
from vllm_pyramid.policy.kinds import built_in_kinds, parse_component
from vllm_pyramid.policy.page_scorer import PageScorer
from vllm_pyramid.policy.policy import SECTIONS
from vllm_pyramid.policy.request import TOGETHER
from vllm_pyramid.policy.schedules import PressureSchedule

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "limits.md"
MARKS = "<!-- Written by scripts/write_limits.py -->\n", "<!-- As far as here -->\n"


class OwnPages(PageScorer):
    """A page scorer of a user's own."""

    kind: str = "module:Class"


# Parts whose fields say what they do not support.
EXAMPLES = (
    EvictionPoints(tokens=512),
    PressureSchedule(answers=1024),
    KvpressScorer(press="SnapKVPress"),
    KvpressScorer(press="TOVAPress"),
    OwnPages(),
)


def parts() -> Iterator[Component]:
    """Yield a part of each kind, and some with other fields."""
    for base in (*SECTIONS.values(), PageScorer):
        for kind in built_in_kinds(base):
            with suppress(ValueError):  # a field has no default
                yield parse_component(base, kind)
    yield from EXAMPLES


def rows() -> list[Refusal]:
    """Return the rows of all parts, each once."""
    found = {
        row: None
        for part in parts()
        for row in refusals(unsupported_by(part), f"{part.section}: {part.kind}")
    }
    return [*found, *load_policy("snapkv", None, {"fill_blocks": False}).refusals]


def _code(text: str) -> str:
    """Return the text with flags and keys as code."""
    flag = r"--[a-z0-9-]+(?: (?:none|pooling|ray|external_launcher|bfloat16|fp8\w*|FLASH_ATTN))?"
    names = r"`[^`]*`", r"{.*?}", flag, r"\b(?:kv_[a-z_]+|attention_config\.\w+|prompt_logprobs)"
    return re.sub("|".join(names), lambda found: f"`{found[0].strip('`')}`", text)


def _table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    rule = "|---" * len(head) + "|\n"
    first, *others = (f"| {' | '.join(line)} |\n" for line in (head, *lines))
    return "".join((first, rule, *others))


def _words(what: dict[str, dict[str, None]]) -> str:
    """Return things, and the places in which each does not work, in words."""
    by_places: dict[str, list[str]] = {}
    for things, places in what.items():
        by_places.setdefault(" and ".join(filter(None, places)), []).append(things)
    return "; ".join(
        f"{', '.join(things)} {places}".strip() for places, things in by_places.items()
    )


def tables() -> str:
    """Return both tables, the second with one line for each reason."""
    policies: dict[str, list[str]] = {}
    for policy in load_presets():
        for row in policy.refusals:
            names = policies.setdefault(row.part, [])
            names += [] if policy.name in names else [policy.name]
    together: dict[str, tuple[dict[str, None], dict[str, dict[str, None]]]] = {}
    for row in rows():
        fix = row.fix.replace(f"choose a policy without `{row.part}`", "choose another policy")
        who, what = together.setdefault(f"{row.reason}; {fix}", ({}, {}))
        names = ", ".join(policies.get(row.part, ()))
        who[f"`{row.part}`" + (f" ({names})" if names else "")] = None
        things = " and ".join(one.words for one in row.features if not one.is_place)
        what.setdefault(things, {})[" ".join(one.words for one in row.features if one.is_place)] = (
            None
        )
    every = (
        (_code(row.what().removeprefix("with ")), _code(f"{row.reason}; {row.fix}"))
        for row in (*EVERY_POLICY, *TOGETHER)
    )
    some = (
        (", ".join(who), _code(_words(what)), _code(why)) for why, (who, what) in together.items()
    )
    return "\n".join(
        (
            _table(("No policy works with", "Why, and what to do"), every),
            _table(("Part of a policy", "Does not work with", "Why, and what to do"), some),
        )
    )


def written(text: str) -> str:
    """Return the page with the tables of now."""
    begin, end = MARKS
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"{OUTPUT} has lost its marks {MARKS}"
    return f"{before}{begin}\n{tables()}\n{end}{after}"


if __name__ == "__main__":
    OUTPUT.write_text(written(OUTPUT.read_text(encoding="utf-8")), encoding="utf-8")
