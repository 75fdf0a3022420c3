# SPDX-License-Identifier: Apache-2.0
"""torch.compile's key has of our settings what a compiled graph depends on, and no more."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from vllm_pyramid.compat.config_hash import SettingsWithKey, install
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.policy.served_settings import ServedSettings


class ReadsTheModel(Scorer):
    """A scorer of a user's, whose hooks may change the model's forward pass."""

    kind: str
    depth: int = 1

    def score(self, batch: Any) -> Any:
        raise AssertionError("no engine runs here")

    def worker_hooks(self, policy: Any, context: Any) -> Any:
        return None


class OnlyScores(Scorer):
    """A scorer of a user's that sees a layer's queries and keys alone."""

    kind: str
    depth: int = 1

    def score(self, batch: Any) -> Any:
        raise AssertionError("no engine runs here")


@pytest.fixture(scope="module")
def config_of(random_model: Path) -> Any:
    """Make the configuration of an engine with an `additional_config`, as vLLM makes it."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.compat.platform import defaults
    from vllm_pyramid.plugin import register

    register()
    defaults.withdraw()  # what other tests' engines left
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield lambda **given: EngineArgs(
            str(random_model),
            max_model_len=512,
            enable_prefix_caching=False,  # policies that cannot have it switch it off
            additional_config=given,
        ).create_engine_config()


@pytest.fixture(scope="module")
def key(config_of: Any) -> Any:
    """Return torch.compile's key of an engine."""
    return lambda **settings: config_of(**settings).compute_hash()


@pytest.fixture(scope="module")
def known(key: Any) -> str:
    found: str = key(kv_policy="pyramidkv", kv_budget="12%")
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_policy": "pyramidkv", "kv_budget": "25%"},
        {"kv_policy": "auto"},
        {"kv_policy": "full"},
        {"kv_policy": "h2o", "kv_budget": 256},
        {"kv_policy": "quest"},
        {"kv_policy": "kcache"},
        {"kv_policy": "adakv"},
        {"kv_policy": "pyramidkv-chunked"},
        {"kv_policy": "pyramidkv", "kv_budget": "12%", "kv_admission": "prompt"},
        {"kv_policy": "pyramidkv", "kv_budget": "12%", "kv_report_cached": False},
    ],
)
def test_policies_and_budgets_share_what_is_compiled(key, known, settings) -> None:
    assert key(**settings) == known


def test_policies_that_thin_share_a_key_of_their_own(key: Any, known: str) -> None:
    thinned = key(kv_policy="pyramidinfer")
    assert key(kv_policy="pyramidinfer", kv_policy_args={"decay_ratio": 0.5}) == thinned != known


def test_keys_of_other_software_stay_in_the_key(key: Any, known: str) -> None:
    own = {key(kv_policy="pyramidkv", kv_budget=b, own=[o]) for b in (64, 128) for o in (1, 2)}
    assert len(own) == 2 and known not in own


def test_without_a_policy_the_key_is_stock_vllms(key: Any, known: str) -> None:
    stock = key()
    assert key(kv_policy="none") == stock != known  # the backend of attention is another
    assert key(kv_policy="none", own=1) == key(own=1) != stock


def test_what_names_a_measured_cache_and_a_server_has_all_settings(config_of: Any) -> None:
    """vLLM keeps a plan of its memory, and tells clients which configuration answers."""
    from vllm.entrypoints.serve.utils.fingerprint import get_system_fingerprint
    from vllm.v1.worker import startup_plan

    configs = [config_of(kv_policy="pyramidkv", kv_budget=budget) for budget in ("12%", "25%")]
    for kept in ({}, {"include_version": False}):
        assert len({config.compute_hash(**kept) for config in configs}) == 1
    assert len({get_system_fingerprint(config) for config in configs}) == 2
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_device_capability", "get_device_name", "get_device_total_memory"):
            patch.setattr(startup_plan.current_platform, name, lambda: 1, raising=False)
        plans = {startup_plan.compute_plan_fingerprint(config, 0, 1) for config in configs}
    assert len(plans) == 2


def test_it_travels_as_a_dictionary(config_of: Any) -> None:
    """To other processes, into logs, and into the configurations that vLLM derives from one."""
    from vllm.config.utils import replace as replace_config

    config = config_of(kv_policy="pyramidkv", own=1)
    settings = config.additional_config
    assert isinstance(settings, SettingsWithKey) and settings["own"] == 1
    assert settings.of_graph["own"] == 1 and "kv_policy" not in settings.of_graph
    copies = [
        pickle.loads(pickle.dumps(settings)),
        cloudpickle.loads(cloudpickle.dumps(settings)),  # as Ray does
        copy.copy(settings),
        copy.deepcopy(settings),
        pickle.loads(pickle.dumps(config)).additional_config,
        copy.deepcopy(config).additional_config,
        replace_config(config).additional_config,
    ]
    for found in copies:
        assert type(found) is SettingsWithKey
        assert found == settings and found.of_graph == settings.of_graph
    assert json.loads(json.dumps(settings)) == settings
    assert ServedSettings.of(config) == ServedSettings.of(pickle.loads(pickle.dumps(config)))
    before = config.compute_hash()
    install()  # again
    assert config.compute_hash() == before
    # An ordinary copy is hashed whole: slower, and never wrong.
    config.additional_config = {**settings}
    assert config.compute_hash() != before


def _of_graph(policy: str, **settings: Any) -> dict[str, Any]:
    served = KVSettings(policy, **settings).served()
    assert served is not None
    return served.of_graph


def test_the_kernels_and_the_version_are_in_the_key() -> None:
    served = KVSettings("pyramidkv").served()
    assert served is not None
    found = {json.dumps(replace(served, backend=b).of_graph) for b in ("FLASH_ATTN", "TRITON_ATTN")}
    assert len(found) == 2 and served.of_graph["version"]


@pytest.mark.parametrize(("name", "counts"), [("ReadsTheModel", True), ("OnlyScores", False)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_users_own_part_counts_where_it_has_hooks(name: str, counts: bool, inside: bool) -> None:
    """They get the model. So does a scorer that scores at evictions inside the prompt."""

    def key(depth: int) -> dict[str, Any]:
        scorer = {"kind": f"{__name__}:{name}", "depth": depth}
        args = {"chunk": {"tokens": 512, "scorer": scorer}} if inside else {"scorer": scorer}
        return _of_graph("snapkv", kv_budget=256, kv_policy_args=args)

    assert (key(1) != key(2)) is counts
    assert (key(1) != _of_graph("snapkv")) is counts
