# SPDX-License-Identifier: Apache-2.0
"""Settings of an engine and of single requests."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tests.plans import plan_for
from vllm_pyramid.config import KVSettings, parse_policy_args, trace_window
from vllm_pyramid.policy import Budget, load_policy
from vllm_pyramid.policy.registry import policy_names
from vllm_pyramid.request_config import (
    SHARES_KEY,
    RequestOverride,
    refuse_internal,
    resolve,
    settle,
)

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("config", [None, {}, {"other": 1}, {"kv_connector_thing": 1}])
def test_no_keys_of_ours(config: Any) -> None:
    assert KVSettings.from_additional_config(config) is None


def test_there_and_back() -> None:
    config = {
        "kv_policy": "pyramidkv",
        "kv_budget": 512,
        "kv_policy_args": {"beta": 14},
        "kv_trace": "traces",
    }
    settings = KVSettings.from_additional_config({**config, "somebody_else": 1})
    assert settings is not None
    assert settings.to_additional_config() == config
    assert KVSettings.from_additional_config(settings.to_additional_config()) == settings
    assert settings.policy() == load_policy("pyramidkv", 512, {"beta": 14})
    assert settings.policy() is settings.policy()
    assert pickle.loads(pickle.dumps(settings)).policy() == settings.policy()


def test_none_keeps_the_plugin_inert() -> None:
    for settings in (KVSettings(), KVSettings.from_additional_config({"kv_policy": "none"})):
        assert settings is not None
        assert settings.policy() is None
        assert settings.to_additional_config() == {"kv_policy": "none"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_polciy": "snapkv"}, "unknown key 'kv_polciy' .*did you mean 'kv_policy'"),
        ({"kv_policy": "snapkv", "kv_budgets": 5}, "did you mean 'kv_budget'"),
        ({"kv_policy_arg": {}}, "did you mean 'kv_policy_args'"),
        ({"kv_budget": 512}, "kv_budget without a kv_policy"),
        ({"kv_policy": "none", "kv_budget": 0}, "kv_budget without a kv_policy"),
        ({"kv_trace": "x"}, "kv_trace without a kv_policy"),
        ({"kv_policy": 3}, "not 3"),
        ({"kv_policy": ""}, "not ''"),
        ({"kv_policy": "snap"}, "unknown policy 'snap'"),
        ({"kv_policy": "snapkv", "kv_budget": 0}, "out of range"),
        ({"kv_policy": "snapkv", "kv_budget": -1}, "out of range"),
        ({"kv_policy": "snapkv", "kv_budget": "120%"}, "at most 100%"),
        ({"kv_policy": "snapkv", "kv_budget": 5}, "at least 9"),
        ({"kv_policy": "snapkv", "kv_budget": 0.5}, "is a float"),
        ({"kv_policy": "snapkv", "kv_policy_args": {"x": 1}}, "unknown argument 'x'"),
        ({"kv_policy": "snapkv", "kv_policy_args": "{"}, "not valid JSON.*line 1, column 2"),
        ({"kv_policy": "snapkv", "kv_trace": True}, "kv_trace must be"),
        ({"kv_policy": "snapkv", "kv_admission": "later"}, "forecast or prompt, not 'later'"),
        ({"kv_policy": "snapkv", "kv_admission": True}, "forecast or prompt, not True"),
        ({"kv_admission": "forecast"}, "kv_admission without a kv_policy"),
        ({"kv_policy": "snapkv", "kv_admision": "prompt"}, "did you mean 'kv_admission'"),
    ],
)
def test_wrong_settings(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVSettings.from_additional_config(config)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "line 1, column 2"),
        ('{"a": 1,}', "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("3", "must be a JSON object"),
        ("", "not valid JSON"),
        ('{"a": 1, "a": 2}', "gives 'a' twice"),
        ('{"beta": NaN}', "NaN, which is not a JSON number"),
        (3, "must be a JSON object"),
        ({3: 1}, "must be a JSON object"),
    ],
)
def test_wrong_policy_args(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_policy_args(value)


def test_policy_args() -> None:
    assert parse_policy_args(None) == {}
    assert parse_policy_args('{"allocator": {"beta": 14}}') == {"allocator": {"beta": 14}}


@pytest.mark.parametrize(
    "extra", [None, {}, {"other": 1}, {"kv_transfer_params": {}}, {"kv_budget": None}]
)
def test_a_request_that_asks_for_nothing(extra: Any) -> None:
    assert RequestOverride.parse(extra) is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kv_budget": 0}, "kv_budget of the request: budget 0 is out of range"),
        ({"kv_budget": -3}, "out of range"),
        ({"kv_budget": True}, "is a bool"),
        ({"kv_budget": 100.0}, "is a float"),
        ({"kv_budget": "120%"}, "at most 100%"),
        ({"kv_budget": "many"}, "cannot be read"),
        ({"kv_budget": [1]}, "is a list"),
        ({"kv_policy": 3}, "not 3"),
        ({"kv_policy": ""}, "not ''"),
        ({"kv_polcy": "full"}, "did you mean 'kv_policy'"),
        ({"kv_budge": 5}, "did you mean 'kv_budget'"),
    ],
)
def test_requests_that_cannot_be_read(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestOverride.parse(extra)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kv_policy": "pyramidkv"}, "not served here: .* 'snapkv' or 'full'"),
        ({"kv_policy": "nonsense"}, "not served here"),
        ({"kv_policy": "none"}, "not served here"),
        ({"kv_budget": 8}, "budget 8 is too small .* at least 9"),
        ({"kv_policy": "full", "kv_budget": 256}, "keeps every token"),
    ],
)
def test_requests_that_do_not_suit_the_policy(extra: dict[str, Any], message: str) -> None:
    policy = load_policy("snapkv", 512)
    override = RequestOverride.parse(extra)
    with pytest.raises(ValueError, match=message):
        resolve(policy, override)
    with pytest.raises(ValueError, match=message):
        plan_for(policy, override, 1000, 4, 16)


def test_plans_of_requests() -> None:
    policy = load_policy("pyramidkv", 512)

    def keep(extra: dict[str, Any] | None) -> list[int]:
        return plan_for(policy, RequestOverride.parse(extra), 2048, 4, 16).keep.tolist()

    assert keep(None) == policy.plan(2048, 4, 16).keep.tolist()
    assert keep({"kv_policy": "full"}) == [2048] * 4
    assert keep({"kv_policy": "full", "kv_budget": "100%"}) == [2048] * 4
    assert keep({"kv_policy": "pyramidkv"}) == keep(None)
    assert sum(keep({"kv_budget": 256})) == 4 * 256
    assert keep({"kv_budget": "256"}) == keep({"kv_budget": 256})
    assert sum(keep({"kv_budget": "12%"})) == 4 * 246
    assert keep({"kv_budget": 4096}) == [2048] * 4


def test_full_serves_only_full() -> None:
    policy = load_policy("full")
    assert resolve(policy, RequestOverride.parse({"kv_policy": "full"})) == (policy, None)
    with pytest.raises(ValueError, match=r"may ask for 'full'$"):
        resolve(policy, RequestOverride.parse({"kv_policy": "snapkv"}))
    with pytest.raises(ValueError, match="keeps every token"):
        resolve(policy, RequestOverride.parse({"kv_budget": 256}))


def test_settle_never_raises_and_falls_back_to_the_served_policy() -> None:
    policy = load_policy("pyramidkv", 64)
    assert settle(policy, {"kv_budget": 32}) == (policy, Budget.parse(32), None)
    chosen, budget, error = settle(policy, {"kv_budget": -1})
    assert (chosen, budget) == (policy, None)
    assert error is not None and "out of range" in error


def test_the_application_of_a_request() -> None:
    override = RequestOverride.parse({"kv_application": "mail", "kv_budget": 64})
    assert override == RequestOverride(None, Budget.parse(64), "mail")
    assert RequestOverride.parse({"kv_application": "mail"}) == RequestOverride(None, None, "mail")
    for nothing in ("", None):
        assert RequestOverride.parse({"kv_application": nothing}) is None
    for wrong in (3, ["mail"], "x" * 257):
        with pytest.raises(ValueError, match="must be a name of at most 256 characters"):
            RequestOverride.parse({"kv_application": wrong})
    with pytest.raises(ValueError, match="did you mean 'kv_application'"):
        RequestOverride.parse({"kv_aplication": "mail"})


def test_shares_come_from_the_scheduler_alone() -> None:
    policy = load_policy("xkv", 64)
    chosen, budget, error = settle(policy, {SHARES_KEY: [1.0, 3.0], "kv_budget": 32})
    assert error is None and budget == Budget.parse(32)
    assert chosen.solver is None and chosen.plan(500, 2, 1, budget).keep.tolist() == [20, 44]
    assert chosen is settle(policy, {SHARES_KEY: [1.0, 3.0]})[0]
    refuse_internal({"kv_budget": 32})
    with pytest.raises(ValueError, match="not for requests to set"):
        refuse_internal({SHARES_KEY: [1.0, 3.0]})


@pytest.mark.parametrize("name", policy_names())
def test_prompts_start_by_what_is_expected_where_a_policy_evicts(name: str) -> None:
    assert KVSettings(kv_policy=name).looks_ahead == (name not in ("full", "kcache"))
    for admission, looks_ahead in (("forecast", True), ("prompt", False)):
        settings = KVSettings(kv_policy=name, kv_admission=admission)
        assert settings.looks_ahead == looks_ahead
        assert settings.to_additional_config()["kv_admission"] == admission


@pytest.mark.parametrize("name", policy_names())
def test_the_last_chunk_is_long_enough_for_a_trace(name: str) -> None:
    """Recall is taken from as many queries as the scheduler leaves for the last chunk."""
    policy = load_policy(name)
    traced = KVSettings(kv_policy=name, kv_trace="somewhere").min_last_chunk(policy)
    assert traced >= trace_window(policy) >= 1
    assert KVSettings(kv_policy=name).min_last_chunk(policy) == policy.min_last_chunk
