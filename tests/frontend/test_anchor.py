# SPDX-License-Identifier: Apache-2.0
"""Lines that are left out of system prompts (`--kv-anchor`)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from vllm_pyramid.frontend.anchor import MAX_LINE, MAX_LINES, Anchor, parse_anchor
from vllm_pyramid.frontend.settings import KVSettings

RULES = parse_anchor("billing,Request id: *")


def changed(rules: tuple[str, ...] = RULES, **body: Any) -> tuple[dict[str, Any], int]:
    left, count = Anchor(None, rules).without_lines(json.dumps(body).encode())
    return json.loads(left), count


def test_lines_are_left_out_of_system_texts_alone() -> None:
    line, other = "Request id: 1 € \ud800", "You are kind.\r\n"
    for role, expected in (("system", 1), ("developer", 1), ("user", 0)):
        body, count = changed(messages=[{"role": role, "content": f"{line}\n{other}"}, None, {}])
        assert count == expected
        assert body["messages"][0]["content"] == (other if expected else f"{line}\n{other}")
    parts = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"text": 5}, 5]
    body, count = changed(system=parts, instructions=f"a\n{line}\n{line}", input="x")
    assert count == 3 and body["instructions"] == "a" and body["system"][0]["text"] == ""
    body, count = changed(input=[{"role": "system", "content": [{"text": line}]}])
    assert count == 1 and body["input"][0]["content"] == [{"text": ""}]
    late = "\n" * MAX_LINES + line
    for text in (late, f" {line}", f"{line}{'x' * MAX_LINE}", "Request id:", 5, None, [[]]):
        body, count = changed(system=text)
        assert count == 0 and body["system"] == text
    for raw in (b"", b"{", b'"a"', b"\xff", b"[" * 100_000, b'{ "system": "a" }'):
        assert Anchor(None, RULES).without_lines(raw) == (raw, 0), "as it came"


def test_hostile_lines_take_no_time() -> None:
    """Patterns and lines with which a regular expression that backtracks would never end."""
    rules = parse_anchor(["aaaaaaaa" + "*a" * 90 + "b"])
    lines = "\n".join(["a" * MAX_LINE] * MAX_LINES)
    start = time.process_time()
    assert changed(rules, system=lines)[1] == 0
    assert time.process_time() - start < 1


def test_the_flag() -> None:
    assert parse_anchor(None) == () and RULES == ("x-anthropic-billing-header:*", "Request id: *")
    for wrong in (
        "",
        "*",
        "Req*",
        "Request?*x",
        "Request [id]*",
        "Request id\n*",
        5,
        [5],
        "x" * 201,
    ):
        with pytest.raises(ValueError, match="kv_anchor must be 1 to 8 patterns"):
            parse_anchor(wrong)
    with pytest.raises(ValueError, match="1 to 8"):
        parse_anchor(["Request id: *"] * 9)
    with pytest.raises(ValueError, match="--kv-anchor has an effect with a policy alone"):
        KVSettings("none", kv_anchor="billing")
    settings = KVSettings("snapkv", kv_anchor="billing,Request id: *")
    assert settings.kv_anchor == list(RULES)
    assert KVSettings.from_additional_config(settings.to_additional_config()) == settings
