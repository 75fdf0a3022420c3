# SPDX-License-Identifier: Apache-2.0
"""The engine's report of what a request kept: what is accepted, and what is an error."""

from __future__ import annotations

import pytest

from vllm_pyramid.tools.eval.result import EvictionReport


def report() -> dict[str, object]:
    return {
        "kv_policy": "pyramidkv",
        "prompt_tokens": 1000,
        "kept_tokens": [400, 200, 100, 20],
        "evicted_tokens": 3280,
        "blocks_before": 252,
        "blocks_after": 63,
    }


def test_a_complete_report_is_accepted() -> None:
    checked = EvictionReport.checked(report(), "pyramidkv")
    assert checked.model_dump(exclude_none=True) == report() | {"computed_tokens": 1000}
    assert checked.memory == 0.25
    # Of two layers whose KV heads have lengths of their own.
    of_heads = EvictionReport.checked(report() | {"kv_heads": 2}, "pyramidkv")
    assert of_heads.kv_heads == 2 and of_heads.memory == 0.25
    # Of one whose generated tokens read some of the pages that they saw, and of one without any.
    assert checked.read is None
    for read, visible, share in ((9, 36, 0.25), (0, 0, None)):
        pages = {"pages_read": read, "pages_visible": visible}
        assert EvictionReport.checked(report() | pages, "pyramidkv").read == share
    # Of an eviction during generation.
    later = report() | {"computed_tokens": 1100, "evicted_tokens": 3680, "kv_budget": 180}
    assert EvictionReport.checked(later, "pyramidkv").computed_tokens == 1100


@pytest.mark.parametrize("missing", [None, {}])
def test_a_missing_report_is_an_error(missing: dict[str, object] | None) -> None:
    with pytest.raises(RuntimeError, match="the plugin is not active"):
        EvictionReport.checked(missing, "pyramidkv")


@pytest.mark.parametrize("key", sorted(report()))
def test_an_incomplete_report_is_an_error(key: str) -> None:
    known = report()
    del known[key]
    with pytest.raises(RuntimeError, match=rf"(?s)'pyramidkv' kept is wrong: .*{key}"):
        EvictionReport.checked(known, "pyramidkv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_policy": "full"}, "ran 'full' instead of 'pyramidkv'"),
        ({"evicted_tokens": 0}, "contradicts itself"),
        ({"kept_tokens": [], "evicted_tokens": 0}, "is wrong"),
    ],
)
def test_a_wrong_report_is_an_error(change: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        EvictionReport.checked(report() | change, "pyramidkv")
