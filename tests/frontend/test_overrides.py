# SPDX-License-Identifier: Apache-2.0
"""The operator's flags for what requests may change, from the command line to every process."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.policy.overrides import RequestOverrides
from vllm_pyramid.policy.served_settings import SERVED_KEY, ServedSettings
from vllm_pyramid.tools.command_parts import parse_engine_args

POLICY = {"kv_policy": "pyramidkv", "kv_budget": "12%"}


def served(**settings: Any) -> ServedSettings:
    """What another process reads of these settings."""
    checked = KVSettings.from_additional_config({**POLICY, **settings})
    assert checked is not None
    own = checked.served()
    assert own is not None
    data = json.loads(json.dumps(own.as_data()))
    assert KVSettings.from_additional_config(checked.to_additional_config()) == checked
    read = ServedSettings.of(SimpleNamespace(additional_config={SERVED_KEY: data}))
    assert read == own
    return read


def test_settings_travel_to_every_process() -> None:
    assert served().overrides == RequestOverrides() and served().reports_cached
    limited = served(kv_request_overrides="budget,turns", kv_max_request_budget="25%")
    assert limited.overrides == RequestOverrides(("budget", "turns"), "25%")
    assert served(kv_request_overrides=["turns"]).overrides.allowed == ("turns",)
    assert served(kv_request_overrides=[]).overrides.allowed == ()
    assert served(kv_max_request_budget="512").overrides.max_budget == 512
    assert not served(kv_report_cached=False).reports_cached


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**POLICY, "kv_request_overrides": "bugdet"}, "did you mean 'budget'"),
        ({**POLICY, "kv_request_override": "none"}, "did you mean 'kv_request_overrides'"),
        ({**POLICY, "kv_max_request_budget": 0}, "kv_max_request_budget: budget 0 is out of"),
        ({**POLICY, "kv_max_request_budget": "120%"}, "at most 100%"),
        ({**POLICY, "kv_max_request_budget": 0.5}, "is a float"),
        ({"kv_policy": "full", "kv_max_request_budget": 512}, "would have no effect"),
        (
            {
                **POLICY,
                "kv_max_request_budget": 512,
                "kv_keep": "none",
                "kv_request_overrides": "none",
            },
            "nothing by default",
        ),
        ({"kv_request_overrides": "none"}, "kv_request_overrides without a kv_policy"),
        ({"kv_max_request_budget": 512}, "kv_max_request_budget without a kv_policy"),
        ({**POLICY, "kv_report_cached": 1}, "must be true or false, not 1"),
    ],
)
def test_wrong_settings(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVSettings.from_additional_config(config)


@pytest.mark.parametrize(
    ("flags", "hidden"), [([], True), (["--enable-prompt-tokens-details"], False)]
)
def test_a_server_reports_the_cache_where_vllm_does(flags: list[str], hidden: bool) -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_pyramid.plugin import register

    register()
    commands = FlexibleArgumentParser()
    parser = ServeSubcommand().subparser_init(commands.add_subparsers())

    def config_of(*given: str) -> Any:
        return commands.parse_args(["serve", "MODEL", *given, *flags]).additional_config

    own = ["--kv-policy", "snapkv", "--kv-request-overrides", "budget,turns"]
    config = config_of(*own, "--kv-max-request-budget", "25%")
    assert config.pop("kv_report_cached", True) == (not hidden)
    assert config == {
        "kv_policy": "snapkv",
        "kv_request_overrides": "budget,turns",
        "kv_max_request_budget": "25%",
    }
    said = ("--additional-config", '{"kv_policy": "snapkv", "kv_report_cached": true}')
    assert config_of(*said)["kv_report_cached"] is True
    assert config_of() == {}, "without a policy nothing is added"
    with pytest.raises(SystemExit):
        config_of(*own[:2], "--kv-request-overrides", "budgets")
    text = " ".join(action.help or "" for action in parser._actions)
    assert "policy,budget,min_tokens,application,top_n,turns," in text and "turn_mode" in text


def test_our_commands_take_them_as_engine_arguments() -> None:
    given = {"kv_request_overrides": ["budget"], "kv_max_request_budget": 512}
    assert parse_engine_args(json.dumps(given)) == given
