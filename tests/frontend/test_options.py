# SPDX-License-Identifier: Apache-2.0
"""Every engine argument of the installed vLLM stands in the list of docs/limits.md."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

LIMITS = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
HEADING = "## vLLM's options, one by one"
# Named twice: with what it belongs to, and for the value of it that is refused.
TWICE = {"--data-parallel-backend"}


def test_every_option_is_listed_once() -> None:
    """A new option of vLLM has to be looked at before it is in this list."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    section = LIMITS.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    rows = section.splitlines()
    counts = Counter(re.findall(r"`(--[a-z0-9-]+)", section))
    later = {
        flag
        for row in rows
        if row.startswith("| of 0.33 alone")
        for flag in re.findall(r"`(--[a-z0-9-]+)", row)
    }
    options = {
        "--" + field.name.replace("_", "-")
        for field in fields(AsyncEngineArgs)
        if not field.name.startswith("_")
    }
    assert not options - set(counts), "look at these together with a policy, and list them"
    assert not set(counts) - options - later, "vLLM has none of these"
    assert {flag for flag, count in counts.items() if count > 1} == TWICE
