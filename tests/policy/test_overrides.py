# SPDX-License-Identifier: Apache-2.0
"""What the operator lets requests change."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.overrides import OVERRIDES, Layers, RequestOverrides, parse_overrides
from vllm_pyramid.policy.request import TEMPLATE_KEY, resolve, with_template
from vllm_pyramid.policy.request_keys import REQUEST_KEYS, RequestKeys

GIVEN: dict[str, Any] = {
    "kv_policy": "full",
    "kv_budget": 64,
    "kv_min_tokens": 0,
    "kv_application": "mail",
    "kv_top_n": 8,
    "kv_turns": [],
    "kv_keep": [0, 4],
    "kv_attend_budget": "6%",
    "kv_turn_mode": "exact",
    "kv_session": "a",
}


def check_kept(
    overrides: RequestOverrides,
    extra: dict[str, Any],
    prompt_len: int,
    *,
    policy: str = "pyramidkv",
    budget: str | int = "12%",
    args: dict[str, Any] | None = None,
    max_tokens: int = 100,
) -> None:
    served = load_policy(policy, budget, args)
    request = with_template(resolve(served, RequestKeys.parse(extra)), extra)
    overrides.check_kept(request, served, prompt_len, max_tokens, Layers(4, 16))


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        ("none", ()),
        (["none"], ()),
        ([], ()),
        ("budget", ("budget",)),
        ("turns, budget", ("budget", "turns")),
        (("turns", "budget", "turns"), ("budget", "turns")),
        (",".join(OVERRIDES), OVERRIDES),
    ],
)
def test_lists_of_settings(value: object, allowed: tuple[str, ...]) -> None:
    assert parse_overrides(value) == allowed


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "names '', which is no setting"),
        ("budgets", "'budgets', which is no setting of a request .did you mean 'budget'"),
        ("kv_budget", "did you mean 'budget'"),
        ("none,budget", "names none and other settings"),
        (3, "must be a list of settings, not 3"),
        ([3], r"must be a list of settings, not \[3\]"),
        ({"budget": True}, "must be a list of settings"),
    ],
)
def test_wrong_lists(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_overrides(value)


@pytest.mark.parametrize("key", REQUEST_KEYS)
def test_each_setting_can_be_forbidden(key: str) -> None:
    assert set(GIVEN) == set(REQUEST_KEYS)
    own = key.removeprefix("kv_")
    others = RequestOverrides(tuple(name for name in OVERRIDES if name != own))
    for overrides in (RequestOverrides(()), others):
        with pytest.raises(ValueError, match=f"{key} is not open .*--kv-request-overrides"):
            overrides.check_keys({"other": 1, key: GIVEN[key]})
        overrides.check_keys({"other": 1, key: None})
    others.check_keys({other: value for other, value in GIVEN.items() if other != key})
    RequestOverrides((own,)).check_keys({key: GIVEN[key]})
    RequestOverrides().check_keys(GIVEN)
    RequestOverrides(()).check_keys(None)


def test_whoever_may_name_a_session_may_have_its_turns() -> None:
    """The front end puts them into the request, and the scheduler checks it again."""
    followed = {"kv_session": "a", "kv_turns": [200]}
    RequestOverrides(("session",)).check_keys(followed)
    for allowed, extra in ((("session",), {"kv_turns": [200]}), (("budget",), followed)):
        with pytest.raises(ValueError, match="kv_turns is not open to requests"):
            RequestOverrides(allowed).check_keys(extra)


@pytest.mark.parametrize(
    ("limit", "extra", "prompt_len", "numbers"),
    [
        ("25%", {"kv_budget": "26%"}, 1000, "keep 260 of 1000 tokens .* allows 250 "),
        ("25%", {"kv_budget": 300}, 1000, "keep 300 of 1000 tokens"),
        ("25%", {"kv_policy": "full"}, 100_000, "keep 100000 of 100000 .* allows 25000"),
        ("25%", {"kv_min_tokens": 2**31 - 1}, 4000, "keep 4000 of 4000 .* allows 1000"),
        ("25%", {"kv_budget": "10%", "kv_min_tokens": 2000}, 4000, "keep 2000 of 4000"),
        (512, {"kv_budget": 513}, 1000, "keep 513 of 1000 .*kv-max-request-budget 512"),
        (512, {"kv_budget": "60%"}, 1000, "keep 600 of 1000 tokens"),
        (512, {"kv_policy": "full"}, 513, "keep 513 of 513 .* allows 512"),
        # Also below the server's own budget: a request cannot raise what it keeps.
        ("5%", {"kv_budget": "13%"}, 1000, "keep 130 of 1000 .* allows 120 .* keeps 120"),
        # A request's own spans are among what it may keep.
        ("25%", {"kv_keep": [0, 200]}, 1000, "296 .*, 200 of them for its spans .* allows 250"),
        ("25%", {"kv_keep": [5, 200, 300, 992]}, 1000, "887 of them for its spans .* allows 250"),
        (512, {"kv_keep": [0, 500], "kv_turns": [400]}, 1000, "keep 560 of 1000 .* allows 512 "),
        # Those of the template are beside it.
        (
            "25%",
            {TEMPLATE_KEY: [0, 700], "kv_budget": "26%"},
            1000,
            r"keep 778 .*, 700 .* allows 775 \(--kv-max-request-budget 25% beside 700 .* 736\)",
        ),
        ("25%", {TEMPLATE_KEY: [0, 700], "kv_keep": [700, 750]}, 1000, "780 .*, 750 .* allows 775"),
        ("25%", {TEMPLATE_KEY: [0, 700], "kv_policy": "full"}, 1000, "keep 1000 of 1000 .* 775"),
    ],
)
def test_more_than_the_limit(limit, extra, prompt_len, numbers) -> None:
    overrides = RequestOverrides(max_budget=limit)
    with pytest.raises(ValueError, match=numbers):
        check_kept(overrides, extra, prompt_len, args={"min_tokens": 0})
    check_kept(RequestOverrides(), extra, prompt_len)


@pytest.mark.parametrize(
    ("limit", "extra", "prompt_len"),
    [
        ("25%", {}, 1000),
        ("25%", {"kv_budget": "25%"}, 1000),
        ("25%", {"kv_budget": 250}, 1000),
        ("25%", {"kv_min_tokens": 250}, 1000),
        (512, {"kv_budget": "60%"}, 800),
        (512, {"kv_budget": 100_000}, 512),
        (512, {"kv_policy": "full"}, 512),
        (512, {"kv_policy": "pyramidkv"}, 100_000),  # 12,000 of its own accord
        ("5%", {"kv_budget": "12%"}, 1000),
        ("25%", {"kv_keep": [0, 140]}, 1000),
        ("25%", {TEMPLATE_KEY: [0, 700]}, 1000),
        ("25%", {TEMPLATE_KEY: [0, 700], "kv_turns": [600, 800]}, 1000),
        ("25%", {TEMPLATE_KEY: [0, 700], "kv_budget": "25%", "kv_turns": [710, 800]}, 1000),
        ("25%", {TEMPLATE_KEY: [0, 700], "kv_keep": [690, 730]}, 1000),
        ("1%", {TEMPLATE_KEY: [0, 1000]}, 1000),
    ],
)
def test_up_to_the_limit(limit: str | int, extra: dict[str, Any], prompt_len: int) -> None:
    check_kept(RequestOverrides(max_budget=limit), extra, prompt_len, args={"min_tokens": 0})


def test_the_servers_own_floor_is_no_excess() -> None:
    overrides = RequestOverrides(max_budget="25%")
    floor: dict[str, Any] = {"args": {"min_tokens": 256}}
    check_kept(overrides, {"kv_budget": "20%"}, 300, **floor)
    check_kept(overrides, {"kv_policy": "full"}, 256, **floor)
    with pytest.raises(ValueError, match=r"keep 257 of 257 .* allows 256 .* keeps 256"):
        check_kept(overrides, {"kv_policy": "full"}, 257, **floor)


def test_generated_tokens_count_where_the_policy_evicts_them() -> None:
    overrides, full = RequestOverrides(max_budget=512), {"kv_policy": "full"}
    check_kept(overrides, full, 500, max_tokens=4000)
    with pytest.raises(ValueError, match="keep 4500 of 4500 tokens"):
        check_kept(overrides, full, 500, policy="h2o", budget=256, max_tokens=4000)
    share = {"kv_budget": "50%"}  # of all that is computed by then
    check_kept(overrides, share, 500, policy="h2o", budget=256, max_tokens=500)
    with pytest.raises(ValueError, match="keep 1000 of 2000 tokens"):
        check_kept(overrides, share, 500, policy="h2o", budget=256, max_tokens=1500)


@pytest.mark.parametrize(
    ("allowed", "policy", "budget", "reason"),
    [
        (OVERRIDES, "full", None, "'full' keeps every token"),
        (OVERRIDES, "kcache", None, "'kcache' keeps every token"),
        (OVERRIDES, "snapkv", "100%", "is 100% already"),
        (("turns", "top_n"), "snapkv", "12%", "lets no request change its policy"),
        ((), "snapkv", "12%", "lets no request change its policy"),
    ],
)
def test_limits_without_effect(allowed, policy, budget, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        RequestOverrides(allowed, 512).check_policy(load_policy(policy, budget), keeps_tools=False)
    RequestOverrides(allowed).check_policy(load_policy(policy, budget), keeps_tools=False)


def test_turns_do_not_raise_what_a_prompt_holds() -> None:
    """A request whose evictions are used up holds up to 1,023 tokens on top of its budget."""
    overrides = RequestOverrides(max_budget="25%")
    # Until 2,047 tokens, 64 evictions and one more: all are paid for by turns up to 1,024 tokens.
    turns = [*range(960, 1025), 1030]
    floor = {"min_tokens": 0}
    with pytest.raises(ValueError, match=r"would hold 1\d\d\d of 2047 .* behind its 66 turns"):
        check_kept(overrides, {"kv_budget": 511, "kv_turns": turns}, 2047, args=floor)
    check_kept(overrides, {"kv_budget": 511}, 2047, args=floor)
    # The same turns hold about as much with the server's own policy and with a share.
    check_kept(overrides, {"kv_turns": turns}, 2047, args=floor)
    check_kept(overrides, {"kv_budget": "25%", "kv_turns": turns}, 2047, args=floor)
    # With few turns the same budget is what it says.
    check_kept(overrides, {"kv_budget": 511, "kv_turns": [1000]}, 2047, args=floor)


@given(data=st.data())
@settings(max_examples=100)
def test_turns_within_the_limit_are_served(data: st.DataObject) -> None:
    """Whatever the turns, a share up to the limit passes, and so does a request for nothing."""
    steps = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=120))
    turns = list(accumulate(steps, initial=data.draw(st.integers(1, 1500))))
    length = turns.pop() + data.draw(st.integers(1, 40))
    share = data.draw(st.integers(12, 25))
    overrides = RequestOverrides(max_budget="25%")
    system = min(data.draw(st.integers(0, 3000)), length)
    template = {TEMPLATE_KEY: [0, system]} if system else {}
    for own in ({}, {"kv_budget": f"{share}%"}):
        for floor in (0, 256):
            asked = {**own, **template, "kv_turns": turns}
            check_kept(overrides, asked, length, args={"min_tokens": floor})


@pytest.mark.parametrize("extra", [{"kv_budget": 300}, {"kv_policy": "full"}])
def test_where_prompts_stay_the_answer_is_limited(extra: dict[str, Any]) -> None:
    """However long the prompt is: the server keeps all of it by itself."""
    limited = RequestOverrides(max_budget=200)
    keeps = {"policy": "h2o", "budget": 100, "args": {"schedule.prompt": "keep"}}
    for prompt_len in (50, 5000):
        for fitting in ({}, {"kv_budget": 200}, {"kv_keep": [0, 40]}):
            check_kept(limited, fitting, prompt_len, max_tokens=900, **keeps)
        check_kept(limited, extra, prompt_len, max_tokens=200, **keeps)  # no more is generated
        with pytest.raises(ValueError, match=r"would keep \d+ of 900 tokens .* allows 200"):
            check_kept(limited, extra, prompt_len, max_tokens=900, **keeps)
