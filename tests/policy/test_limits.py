# SPDX-License-Identifier: Apache-2.0
"""What requests may ask for: names of keys, sizes of values, short messages, and the documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.plan import budget
from vllm_pyramid.plan.quoted import MAX_QUOTED, quoted
from vllm_pyramid.policy import limits, load_policy
from vllm_pyramid.policy.limits import MAX_KEYS, MAX_SPANS, MAX_TURNS
from vllm_pyramid.policy.request import ServedRequest, check_request, for_request
from vllm_pyramid.policy.request_keys import REQUEST_KEYS

SNAPKV = load_policy("snapkv", 512)


def _check(extra: dict[str, Any]) -> ServedRequest:
    params = SamplingParams()
    params.extra_args = extra  # vLLM's own check of numbers comes only with its constructor
    return check_request(SNAPKV, params)


def test_the_documents_list_every_limit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "usage.md").read_text(encoding="utf-8")
    table = page.partition("(`vllm_pyramid/policy/limits.py`):")[2].partition("\n\nKeys")[0]
    rows = dict(re.findall(r"^\| (?:all of )?`(\w+)` \| (.+) \|$", table, re.M))
    numbers = {key: re.findall(r"\d[\d,]*", row) for key, row in rows.items()}
    listed = {key: [int(one.replace(",", "")) for one in found] for key, found in numbers.items()}
    assert listed == {
        "vllm_xargs": [limits.MAX_KEYS],
        "kv_budget": [1, budget.MAX_TOKENS, 0, 100, budget.MAX_DECIMALS, budget.MAX_TEXT],
        "kv_min_tokens": [0, budget.MAX_TOKENS],
        "kv_policy": [limits.MAX_NAME],
        "kv_application": [limits.MAX_NAME, limits.MAX_APPLICATIONS],
        "kv_top_n": [1, limits.MAX_TOP_N],
        "kv_attend_budget": [],
        "kv_turns": [limits.MAX_TURNS, limits.FREE_EVICTIONS, limits.TOKENS_PER_EVICTION],
        "kv_keep": [limits.MAX_SPANS],
        "kv_turn_mode": [],
        "kv_session": [
            *(1, limits.MAX_SESSION_NAME, limits.MAX_TURNS, limits.MAX_SESSION_TURNS),
            *(limits.MAX_SESSIONS, limits.MAX_SESSIONS_TURNS),
        ],
    }
    assert listed.keys() == {"vllm_xargs", *REQUEST_KEYS}


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("kv-budget", "kv_budget"),
        ("kvBudget", "kv_budget"),
        ("KV_BUDGET", "kv_budget"),
        ("Kv_budget", "kv_budget"),
        (" kv_budget", "kv_budget"),
        ("_kv_budget", "kv_budget"),
        ("kvMinTokens", "kv_min_tokens"),
        ("kv_7x", None),
        ("kv", None),
        ("kv_" + "x" * 1_000_000, None),
        ("KV" + "budget" * 100_000, None),
    ],
    ids=quoted,
)
def test_keys_that_look_like_ours_are_refused(key: str, meant: str | None) -> None:
    with pytest.raises(
        ValueError, match=r"unknown key .*the keys of vllm-pyramid there are: "
    ) as e:
        _check({key: 1})
    message = str(e.value)
    assert all(name in message for name in REQUEST_KEYS) and len(message) < 400
    assert (f"did you mean {meant!r}?" in message) == (meant is not None)
    config = {"kv_policy": "snapkv", key: 5}
    with pytest.raises(ValueError, match=r"in additional_config.*the keys of vllm-pyramid"):
        KVSettings.from_additional_config(config)


def test_other_softwares_keys_pass() -> None:
    """vLLM's own begin with `kv`, too; without a policy, those of other plugins may."""
    others = {"kv_transfer_params": {}, "kv_cache_report_mode": "incremental", "top": [1], "k": "v"}
    assert _check(others) == ServedRequest(SNAPKV)
    assert _check({f"other-{i}": "x" * 10_000 for i in range(MAX_KEYS)}) == ServedRequest(SNAPKV)
    with pytest.raises(ValueError, match=f"has {MAX_KEYS + 1} keys, .* at most {MAX_KEYS}"):
        _check({f"other-{i}": 1 for i in range(MAX_KEYS + 1)})
    assert KVSettings.from_additional_config({"kv_cache_kind": "int8", "KVQuant": 1}) is None
    for key in ("kvPolicy", "kv_polcy", "KV-POLICY"):
        with pytest.raises(ValueError, match="did you mean 'kv_policy'"):
            KVSettings.from_additional_config({key: "snapkv"})


DEEP: list[Any] = []
for _ in range(900):
    DEEP = [DEEP]
HUGE = 10**60_000
LONG = "x" * 60_000
HOSTILE: list[Any] = [
    *(LONG, "", " " * 60_000, "\0", "٣", "१२%", "9" * 60_000, "9" * 4000, f"12.{'3' * 4200}%"),
    *(f"12.{'3' * 60_000}%", "1e400", "NaN%", "-1", "-0.5%", "12.3456789%", "0.0000000%", "½%"),
    *(HUGE, -HUGE, 10**4000, 0, -1, 2**31, 2**63, True, False, 1.5, float("nan"), float("inf")),
    *([], [LONG], [HUGE], DEEP, [[1]], [1] * 20_000, [1.0], ["1"], [True], [0], [-1], [2, 1]),
    *(list(range(1, 20_000)), [2**31], [2**63], {"a": 1}, {LONG: LONG}, b"12", None),
]


@pytest.mark.parametrize("key", REQUEST_KEYS)
def test_no_hostile_value_is_accepted_or_repeated(key: str) -> None:
    """What is accepted is within the limits, in the front end and in a worker alike."""
    accepted = []
    for value in HOSTILE:
        served = for_request(SNAPKV, {key: value})
        if served.error is None:
            assert _check({key: value}) == served
            accepted.append(value)
            continue
        assert len(served.error) < 400, served.error[:1000]
        with pytest.raises(ValueError, match=f"^{re.escape(served.error)}$"):
            _check({key: value})
    assert accepted == {
        "kv_policy": [None],
        "kv_budget": [None],
        "kv_min_tokens": [0, None],
        "kv_application": ["", None],
        "kv_top_n": [None],
        "kv_turns": [[], None],
        "kv_keep": [[], None],
        "kv_attend_budget": [None],
        "kv_turn_mode": [None],
        "kv_session": [None],
    }.get(key)


@pytest.mark.parametrize(
    "setting", ["12.123456%", "100.000000%", "0.000001%", "00000000000000012%"]
)
def test_budgets_at_the_limits(setting: str) -> None:
    assert _check({"kv_budget": setting}).budget is not None
    with pytest.raises(ValueError, match=r"cannot be read|7 decimals"):
        _check({"kv_budget": setting.replace("%", "0%") if "." in setting else f"000{setting}"})


def test_turns_at_the_limit() -> None:
    turns = list(range(1, MAX_TURNS + 1))
    assert _check({"kv_turns": turns}).turns == tuple(turns)
    with pytest.raises(ValueError, match=f"has {MAX_TURNS + 1} turns, and at most {MAX_TURNS}"):
        _check({"kv_turns": [*turns, MAX_TURNS + 1]})


def test_spans_at_the_limit() -> None:
    spans = list(range(2 * MAX_SPANS))
    assert len(_check({"kv_keep": spans}).keep) == MAX_SPANS
    with pytest.raises(ValueError, match=f"at most {MAX_SPANS} spans are kept"):
        _check({"kv_keep": [*spans, 5000, 5001]})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"),
        ("kv", "'kv'"),
        (None, "None"),
        (True, "True"),
        ([1, 2], "[1, 2]"),
        ([1, "x"], "a list of 2"),
        ({}, "a dict of 0"),
        (10**5000, "a number of 16610 bits"),
        (LONG, f"'{'x' * (MAX_QUOTED - 4)}... of 60000 characters"),
        (b"x", "a bytes"),
    ],
    ids=quoted,
)
def test_values_in_messages(value: object, text: str) -> None:
    assert quoted(value) == text


def test_no_value_makes_a_long_message() -> None:
    assert all(len(quoted(value)) <= MAX_QUOTED + 25 for value in [*HOSTILE, "\0" * 60, "ÿ" * 99])
