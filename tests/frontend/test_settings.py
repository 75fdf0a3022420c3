# SPDX-License-Identifier: Apache-2.0
"""Settings of an engine and of single requests."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from vllm_pyramid.frontend.setting_values import parse_policy_args
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.plan import Budget
from vllm_pyramid.policy import load_policy, policy_names
from vllm_pyramid.policy.request import (
    ALLOCATOR_KEY,
    ServedRequest,
    check_request,
    for_request,
    resolve,
)
from vllm_pyramid.policy.request_keys import RequestKeys
from vllm_pyramid.policy.served_settings import SERVED_KEY, ServedSettings


def test_there_and_back() -> None:
    config = {
        "kv_policy": "pyramidkv",
        "kv_budget": 512,
        "kv_min_tokens": 0,
        "kv_policy_args": {"beta": 14},
        "kv_trace": "traces",
    }
    settings = KVSettings.from_additional_config({**config, "somebody_else": 1})
    assert settings is not None
    assert settings.to_additional_config() == config
    assert KVSettings.from_additional_config(settings.to_additional_config()) == settings
    assert settings.policy() == load_policy("pyramidkv", 512, {"beta": 14, "min_tokens": 0})
    assert settings.policy() is settings.policy()
    assert pickle.loads(pickle.dumps(settings)).policy() == settings.policy()


@pytest.mark.parametrize("value", [0, -1, "x", True, float("nan"), 2**20, [1]])
def test_wrong_sizes_of_the_host_cache(value: Any) -> None:
    with pytest.raises(ValueError, match="kv_host_cache must be a number of GiB above 0"):
        KVSettings("pyramidkv", kv_host_cache=value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_host_cache_dir": "kv"}, "give kv_host_cache, too"),
        ({"kv_host_cache": 1, "kv_host_cache_dir": ""}, "must be the path of a folder, not ''"),
        ({"kv_host_cache": 1, "kv_host_cache_dir": 5}, "must be the path of a folder, not 5"),
        ({"kv_host_cache": 1, "kv_host_cache_dir_gib": 1}, "without a kv_host_cache_dir"),
        (
            {"kv_host_cache": 1, "kv_host_cache_dir": "kv", "kv_host_cache_dir_gib": 0},
            "kv_host_cache_dir_gib must be a number of GiB above 0",
        ),
    ],
)
def test_wrong_folders_of_the_host_cache(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVSettings("pyramidkv", **given)


def test_the_host_cache_and_the_mode_of_turns() -> None:
    with pytest.raises(ValueError, match="kv_host_cache and kv_turn_mode without a kv_policy"):
        KVSettings(kv_host_cache=1, kv_turn_mode="exact")
    with pytest.raises(ValueError, match="kv_turn_mode must be auto, resume or exact, not 'fresh'"):
        KVSettings("pyramidkv", kv_turn_mode="fresh")
    settings = KVSettings("full", kv_host_cache="0.5", kv_turn_mode="exact")
    served = settings.served()
    assert served is not None and served.host_cache_bytes == 2**29 and served.turn_mode == "exact"
    config = {"kv_policy": "full", "kv_host_cache": 0.5, "kv_turn_mode": "exact"}
    assert settings.to_additional_config() == config
    plain = KVSettings("full").served()
    assert plain is not None and plain.host_cache_bytes is None and plain.turn_mode == "auto"


@pytest.mark.parametrize(
    ("policy", "keep", "expected"),
    [
        ("auto", None, (None, True)),
        ("auto", "none", (None, False)),
        ("auto", "template+2", (2, False)),
        ("h2o", None, (None, False)),
        ("snapkv-chunked", None, (None, False)),
        ("select", None, (None, False)),
    ],
)
def test_what_stays_of_chats(policy: str, keep: Any, expected: tuple[Any, bool]) -> None:
    """By default the template of chats with tools, where the policy can keep it."""
    served = KVSettings(policy, kv_keep=keep).served()
    assert served is not None and (served.keep_template, served.keep_tools) == expected
    assert ServedSettings.of(SimpleNamespace(additional_config={SERVED_KEY: served.as_data()}))


@pytest.mark.parametrize("name", ["snapkv", "full", "xkv", "h2o"])
def test_an_exact_turn_is_planned_without_turns(name: str) -> None:
    """By request or by the server; with every policy, since nothing is resumed."""
    policy = load_policy(name)
    asked = RequestKeys.parse({"kv_turns": [100, 900], "kv_turn_mode": "exact"})
    left_open = RequestKeys.parse({"kv_turns": [100, 900]})
    fresh = resolve(policy, RequestKeys.parse({})).plan(2000, 4, 16)
    for served in (resolve(policy, asked), resolve(policy, left_open, "exact")):
        assert served.exact and served.turns == (100, 900) and served.resumed_turns is None
        assert served.plan(2000, 4, 16) == fresh
        served.check_turns(901)
        with pytest.raises(ValueError, match="ends at 900 tokens"):
            served.check_turns(900)
    again = RequestKeys.parse({"kv_turns": [100, 900], "kv_turn_mode": "resume"})
    if name != "snapkv":
        with pytest.raises(ValueError, match=r"work with kv_turns: .* or send kv_turn_mode"):
            resolve(policy, again, "exact")
        served = resolve(policy, left_open)
        assert served == resolve(policy, left_open, "exact")._replace(why_exact=served.why_exact)
        assert served.why_exact.startswith(f"policy {name!r} (")
        return
    resumed = resolve(policy, again, "exact")
    assert not resumed.exact and len(resumed.plan(2000, 4, 16).inner) == 2
    assert for_request(policy, {"kv_turns": [100, 900]}, "exact").exact


@pytest.mark.parametrize(
    ("extra", "why", "words"),
    [
        ({"kv_keep": [40, 60]}, None, "spans of kv_keep that begin behind token 0 and kv_turns: "),
        ({}, "it has stages", "kv_turns does not work on this server: it has stages"),
        ({"kv_session": "a"}, "it has stages", "kv_session does not work on this server: it has"),
    ],
)
def test_a_turn_that_cannot_resume_is_exact(extra: dict[str, Any], why: Any, words: str) -> None:
    """The worker plans the same; only a mode fixed by the request or the server is refused."""
    policy, extra = load_policy("snapkv"), {"kv_turns": [100, 900], **extra}
    served = check_request(policy, SamplingParams(extra_args=extra), why)
    assert served.exact and not served.auto and words in served.why_exact
    assert for_request(policy, extra, why_no_turns=why) == served
    for mode, own in (("resume", extra), ("auto", {**extra, "kv_turn_mode": "resume"})):
        with pytest.raises(ValueError, match=words):
            check_request(policy, SamplingParams(extra_args=own), why, mode)


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
        ({"kv_policy": "snapkv", "kv_budget": 5}, "at least 9"),
        ({"kv_policy": "snapkv", "kv_policy_args": {"x": 1}}, "unknown argument 'x'"),
        ({"kv_policy": "snapkv", "kv_policy_args": "{"}, "not valid JSON.*line 1, column 2"),
        ({"kv_policy": "snapkv", "kv_trace": True}, "kv_trace must be"),
        ({"kv_policy": "snapkv", "kv_evict": "never"}, "always or pressure, not 'never'"),
        ({"kv_policy": "h2o", "kv_evict": "pressure"}, "also while it generates"),
        (
            {
                "kv_policy": "snapkv",
                "kv_evict": "always",
                "kv_policy_args": {"schedule": "pressure"},
            },
            "does not always evict",
        ),
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


def test_the_page_is_a_servers_and_needs_a_policy() -> None:
    from vllm_pyramid import LLM

    settings = KVSettings.from_additional_config({"kv_policy": "snapkv", "kv_page": True})
    assert settings is not None and settings.to_additional_config()["kv_page"] is True
    assert (served := settings.served()) is not None and served.page
    for config, message in (
        ({"kv_page": True}, "choose one with --kv-policy"),
        ({"kv_policy": "snapkv", "kv_page": 1}, "must be true or false"),
    ):
        with pytest.raises(ValueError, match=message):
            KVSettings.from_additional_config(config)
    with pytest.raises(ValueError, match="a page of the API server"):
        LLM("nowhere", kv_policy="snapkv", additional_config={"kv_page": True})


@pytest.mark.parametrize(
    "extra", [None, {}, {"other": 1}, {"kv_transfer_params": {}}, {"kv_budget": None}]
)
def test_a_request_that_asks_for_nothing(extra: Any) -> None:
    assert RequestKeys.parse(extra) == RequestKeys()
    policy = load_policy("snapkv", 512)
    assert resolve(policy, RequestKeys.parse(extra)) == ServedRequest(policy)
    assert for_request(policy, extra).policy is policy


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kv_budget": 0}, "kv_budget of the request: budget 0 is out of range"),
        ({"kv_policy": 3}, "not 3"),
        ({"kv_policy": ""}, "not ''"),
        ({"kv_polcy": "full"}, "did you mean 'kv_policy'"),
    ],
)
def test_requests_that_cannot_be_read(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(load_policy("snapkv", 512), SamplingParams(extra_args=extra))


def test_the_worker_never_raises_and_falls_back_to_the_served_policy() -> None:
    policy = load_policy("pyramidkv", 64)
    assert for_request(policy, {"kv_budget": 32}) == ServedRequest(policy, Budget.parse(32))
    for wrong, reason in (
        ({"kv_budget": -1}, "out of range"),
        ({"kv_policy": "snapkv"}, "not served here"),
        ({"kv_top_n": 3}, "kv_top_n has no effect"),
    ):
        served = for_request(policy, wrong)
        assert served[:3] == (policy, None, "")
        assert served.error is not None and reason in served.error


def test_the_application_of_a_request() -> None:
    keys = RequestKeys.parse({"kv_application": "mail", "kv_budget": 64})
    assert keys == RequestKeys(budget=Budget.parse(64), application="mail")
    assert RequestKeys.parse({"kv_application": "mail"}) == RequestKeys(application="mail")
    policy = load_policy("xkv", 32, {"sample_first": 2})
    assert resolve(policy, keys) == ServedRequest(policy, Budget.parse(64), "mail")
    for name, key in (("xkv", {}), ("snapkv", {}), ("full", {}), ("xkv", {"kv_policy": "full"})):
        served = policy if key else load_policy(name)
        params = SamplingParams(extra_args={"kv_application": "mail", **key})
        with pytest.raises(ValueError, match=r"kv_application has no effect on policy .*leave it"):
            check_request(served, params)
    for nothing in ("", None):
        assert RequestKeys.parse({"kv_application": nothing}) == RequestKeys()
    for wrong in (3, ["mail"], "x" * 257, "half \ud83d"):
        with pytest.raises(ValueError, match="must be a name of at most 256 characters"):
            RequestKeys.parse({"kv_application": wrong})
    with pytest.raises(ValueError, match="did you mean 'kv_application'"):
        check_request(policy, SamplingParams(extra_args={"kv_aplication": "mail"}))


def test_another_allocator_comes_from_the_scheduler_alone() -> None:
    policy = load_policy("xkv", 64)
    sent = {ALLOCATOR_KEY: {"kind": "shares", "shares": [1.0, 3.0]}}
    served = for_request(policy, {**sent, "kv_budget": 32})
    assert served.error is None and served.budget == Budget.parse(32)
    plan = served.policy.plan(500, 2, 1, served.budget)
    assert not plan.is_deferred and plan.end.keep.tolist() == [20, 44]
    assert served.policy is for_request(policy, sent).policy, "made once"
    check_request(policy, SamplingParams(extra_args={"kv_budget": 32}))
    with pytest.raises(ValueError, match="cannot be set by requests"):
        check_request(policy, SamplingParams(extra_args=sent))


@pytest.mark.parametrize("name", ["pyramidinfer", "snapkv-chunked"])
def test_prompt_logprobs_of_prompts_that_are_not_attended_to_in_full(name: str) -> None:
    params = SamplingParams(prompt_logprobs=1)
    with pytest.raises(ValueError, match=r"prompt_logprobs: .*full"):
        check_request(load_policy(name), params)
    check_request(load_policy("pyramidkv"), params)
    params = SamplingParams(prompt_logprobs=1, extra_args={"kv_policy": "full"})
    assert check_request(load_policy(name), params).policy == load_policy("full")


@pytest.mark.parametrize("name", policy_names())
def test_prompts_start_by_what_is_expected_where_a_policy_evicts(name: str) -> None:
    served = KVSettings(kv_policy=name).served()
    keep_all = ("full", "kcache", "quest", "select")
    assert served is not None and served.forecasts == (name not in keep_all)
    for admission, forecasts in (("forecast", True), ("prompt", False)):
        settings = KVSettings(kv_policy=name, kv_admission=admission)
        served = settings.served()
        assert served is not None and served.forecasts == forecasts
        assert settings.to_additional_config()["kv_admission"] == admission


@pytest.mark.parametrize("name", policy_names())
def test_the_last_chunk_is_long_enough_for_a_trace(name: str) -> None:
    """Recall is taken from as many queries as the scheduler leaves for the last chunk."""
    policy = load_policy(name)
    traced = KVSettings(kv_policy=name, kv_trace="somewhere").served()
    assert traced is not None and traced.policy.scorer == policy.scorer
    assert traced.min_last_chunk >= policy.trace_window >= 1
    plain = KVSettings(kv_policy=name).served()
    assert plain is not None and plain.min_last_chunk == policy.min_last_chunk


# What the other processes are told ----------------------------------------------------------------


@pytest.mark.parametrize("name", policy_names())
def test_settings_travel_as_data(name: str, tmp_path: Path) -> None:
    settings = KVSettings(
        kv_policy=name,
        kv_trace="somewhere",
        kv_swap_space=0.5 if name == "kcache" else None,
        kv_admission="prompt",
    )
    served = settings.served()
    assert served is not None and served.policy is settings.policy()
    assert served.swap_space_bytes == (2**29 if name == "kcache" else None)
    served = replace(served, backend="TRITON_ATTN")
    data = json.loads(json.dumps(served.as_data()))
    assert data == served.as_data(), "vLLM hashes its configuration as JSON"
    given = settings.to_additional_config()
    config = SimpleNamespace(additional_config={**given, SERVED_KEY: data})
    assert ServedSettings.of(config) == served
    config = pickle.loads(pickle.dumps(config))
    assert ServedSettings.of(config) == served
    assert KVSettings.from_additional_config(given) == settings
    with pytest.raises(ValueError, match="is set by this package"):
        KVSettings.from_additional_config(config.additional_config)


def test_no_other_process_opens_the_policys_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("budget: 64\nwindow: 4\nscorer: observation_window\n")
    settings = KVSettings(kv_policy=str(file), kv_policy_args={"window": 6})
    served = settings.served()
    assert served is not None
    file.unlink()
    again = ServedSettings.of(SimpleNamespace(additional_config={SERVED_KEY: served.as_data()}))
    assert again == served and again.policy.window == 6 and again.policy.name == "mine"


@pytest.mark.parametrize("additional", [None, {}, {"kv_policy": "pyramidkv"}, [1]])
def test_nothing_is_served_where_nothing_was_finished(additional: Any) -> None:
    assert KVSettings().served() is None
    assert ServedSettings.of(SimpleNamespace(additional_config=additional)) is None
