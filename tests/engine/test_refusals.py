# SPDX-License-Identifier: Apache-2.0
"""What cannot work beside eviction is refused before an engine starts, and names the flag."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.families import make_family
from tests.engine.support import Models, greedy
from vllm_pyramid.policy.served_settings import ServedSettings

NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
OWN_PAGES = {
    "kv_policy": "select",
    "kv_policy_args": {"attend.scorer": {"kind": "tests.methods.test_pages:OwnMean"}},
}


def _config(model: Path, policy: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """What an engine would be built from."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.plugin import register

    register()
    if policy is None:
        policy = {"kv_policy": "pyramidkv"}
    args = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=arguments.pop("max_model_len", 512),
        additional_config=policy,
        **arguments,
    )
    return args.create_engine_config()


def test_what_works_is_not_refused(random_model: Path) -> None:
    config = _config(random_model)
    assert config.scheduler_config.scheduler_cls.endswith("PyramidScheduler")
    assert config.parallel_config.worker_cls.endswith("PyramidCpuWorker")
    assert config.cache_config.enable_prefix_caching is True  # vLLM's own default


@pytest.mark.parametrize(
    ("policy", "reason"), [("h2o", "adds up"), ("pyramidinfer", "between the layers")]
)
def test_policies_without_prefix_caching_say_why(random_model, policy, reason, caplog) -> None:
    chosen = {"kv_policy": policy}
    with pytest.raises(ValueError, match=f"--enable-prefix-caching: .*{reason}"):
        _config(random_model, chosen, enable_prefix_caching=True)
    with caplog.at_level("INFO", logger="vllm.vllm_pyramid"):
        config = _config(random_model, chosen)
    assert config.cache_config.enable_prefix_caching is False
    config = _config(random_model, chosen, enable_prefix_caching=False)
    assert config.cache_config.enable_prefix_caching is False


def test_prefix_caching_of_hybrid_models(tmp_path: Path) -> None:
    """Windows are found with the rest; a state is not."""
    windows = make_family("gemma3", tmp_path / "gemma3")
    assert _config(windows).cache_config.enable_prefix_caching is True
    states = make_family("granite4", tmp_path / "granite4")
    assert _config(states).cache_config.enable_prefix_caching is False
    with pytest.raises(ValueError, match=r"--enable-prefix-caching.*keep states"):
        _config(states, enable_prefix_caching=True)


def test_without_a_policy_vllm_is_left_alone(random_model: Path) -> None:
    for policy in ({}, {"kv_policy": "none"}):
        config = _config(random_model, policy, enable_prefix_caching=True)
        assert config.cache_config.enable_prefix_caching is True
        assert "pyramid" not in str(config.scheduler_config.scheduler_cls).lower()
        assert "pyramid" not in config.parallel_config.worker_cls.lower()


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (
            {"pipeline_parallel_size": 2, "speculative_config": NGRAM},
            "--pipeline-parallel-size and --speculative-config",
        ),
        (
            {"pipeline_parallel_size": 2, "spec_method": "ngram", "spec_tokens": 2},
            "--pipeline-parallel-size and --speculative-config",
        ),
        (
            {"pipeline_parallel_size": 2, "async_scheduling": True},
            "--pipeline-parallel-size and --async-scheduling",
        ),
        (
            {"distributed_executor_backend": "external_launcher"},
            "--distributed-executor-backend external_launcher",
        ),
        ({"data_parallel_size": 2, "data_parallel_backend": "ray"}, "--data-parallel-backend ray"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"enable_fault_tolerance": True}, "--enable-fault-tolerance"),
        ({"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
        ({"kv_cache_metrics": True}, "--kv-cache-metrics"),
        ({"prefix_match_unit": 8}, "--prefix-match-unit"),
        ({"prefix_cache_retention_interval": 64}, "--prefix-cache-retention-interval"),
        ({"use_replayssm": True}, "--use-replayssm"),
        ({"diffusion_config": {}}, "--diffusion-config"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"kv_cache_dtype": "int4_per_token_head"}, "--kv-cache-dtype int4_per_token_head"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "(int8_per_token_head) on CPUs"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "--kv-transfer-config",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "PyramidConnector", "kv_role": "kv_both"}},
            "needs folder or listen",
        ),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
        ({"runner": "pooling"}, "--runner pooling"),
        ({"attention_backend": "TRITON_ATTN"}, "--attention-backend TRITON_ATTN"),
        ({"worker_cls": "somebody.elses.Worker"}, "--worker-cls somebody.elses.Worker"),
        ({"scheduler_cls": "somebody.elses.Scheduler"}, "--scheduler-cls"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 4}, "--max-num-batched-tokens 8"),
        ({"long_prefill_token_threshold": 8}, "--long-prefill-token-threshold 8"),
    ],
)
def test_refused_flags(random_model: Path, arguments: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=re.escape(flag)):
        _config(random_model, **arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"nnodes": 2}, " and ranks on several hosts"),
        ({"enable_lora": True}, " and --enable-lora"),
        ({"prefix_caching_hash_algo": "xxhash"}, " and --prefix-caching-hash-algo xxhash"),
        ({"own": OWN_PAGES}, ": files hold its summaries"),
    ],
)
def test_what_does_not_survive_a_restart(
    random_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    reason: str,
) -> None:
    """A hash that begins with a random number does where the number is set."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    own = {"kv_policy": "pyramidkv", "kv_host_cache": 0.01, "kv_host_cache_dir": str(tmp_path)}
    arguments = dict(arguments)
    own |= arguments.pop("own", {})
    with pytest.raises(ValueError, match=f"--kv-host-cache-dir{reason}"):
        _config(random_model, own, **arguments)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    if "prefix_caching_hash_algo" in arguments:
        served = ServedSettings.of(_config(random_model, own, **arguments))
        assert served is not None and served.host_cache_dir == str(tmp_path)


def test_models_that_the_host_cache_cannot_store(tmp_path: Path, random_model: Path) -> None:
    """Windows, states and a draft model's layers; drafts without a cache are no reason."""
    own = {"kv_policy": "pyramidkv", "kv_host_cache": 0.01}
    for family in ("gemma3", "granite4"):
        model = make_family(family, tmp_path / family)
        with pytest.raises(ValueError, match="--kv-host-cache and a model of which some layers"):
            _config(model, own)
    of_model = {**NGRAM, "method": "draft_model", "model": str(random_model)}
    with pytest.raises(ValueError, match="--kv-host-cache and a draft model"):
        _config(random_model, own, speculative_config=of_model)
    ngram = {**NGRAM, "prompt_lookup_max": 2}
    config = _config(random_model, own, speculative_config=ngram)
    served = ServedSettings.of(config)
    assert served is not None and served.host_cache_bytes == int(0.01 * 2**30)


def test_each_rank_has_its_share_of_the_host_cache(random_model: Path) -> None:
    own = {"kv_policy": "pyramidkv", "kv_host_cache": 0.5}
    served = ServedSettings.of(_config(random_model, own, tensor_parallel_size=2))
    assert served is not None and served.host_cache_bytes == 2**28


def test_hybrid_models_in_pipeline_stages(tmp_path: Path) -> None:
    windows = make_family("gemma3", tmp_path / "gemma3")
    with pytest.raises(ValueError, match=r"--pipeline-parallel-size and .*do not evict"):
        _config(windows, pipeline_parallel_size=2)


def test_models_in_which_every_layer_slides(tiny_model: Models) -> None:
    """There is nothing to evict; beside layers with full attention windows are companions."""
    model = tiny_model("mistral-sliding")
    with pytest.raises(ValueError, match=r"every layer has a sliding window.*--kv-policy none"):
        _config(model)
    _config(model, max_model_len=64)  # the window never bites


def test_the_rust_front_end(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.envs

    # Not through the environment: vLLM remembers it once an engine has run in this process.
    monkeypatch.setattr(vllm.envs, "VLLM_USE_RUST_FRONTEND", True, raising=False)
    with pytest.raises(ValueError, match="VLLM_USE_RUST_FRONTEND"):
        _config(random_model)


@pytest.fixture
def broken_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the process a file in place of the C++ kernels that does not load."""
    from vllm_pyramid import kernels
    from vllm_pyramid.kernels.cpu import library

    path = tmp_path / "_kernels.so"
    path.write_bytes(b"no library")
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(path))
    for cached in (library.load, kernels.get_ops):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in (library.load, kernels.get_ops):
        cached.cache_clear()


def test_missing_kernels(random_model, broken_library, monkeypatch) -> None:
    """An engine with a policy does not start on the slow PyTorch kernels unless it is allowed."""
    for said in (None, "0"):
        if said is not None:
            monkeypatch.setenv("VLLM_PYRAMID_ALLOW_REFERENCE", said)
        reason = r"needs the C\+\+ kernels.*does not load.*VLLM_PYRAMID_ALLOW_REFERENCE=1 to run"
        with pytest.raises(RuntimeError, match=reason):
            _config(random_model)
    _config(random_model, {"kv_policy": "none"})
    monkeypatch.setenv("VLLM_PYRAMID_ALLOW_REFERENCE", "1")
    _config(random_model)


def test_an_engine_on_the_reference(demo, engines, request) -> None:
    """Ask for the same tokens of C++ and of the PyTorch kernels, which the variable allows."""
    settings = {"kv_policy": "pyramidkv", "kv_budget": 24, "dtype": "float32"}
    settings |= {"max_model_len": 512, "kv_cache_memory_bytes": 32 << 20}
    prompt = [i % 97 + 3 for i in range(200)]
    answers = {}
    for name in ("functions", "reference"):
        if name == "reference":
            request.getfixturevalue("broken_library")
            request.getfixturevalue("monkeypatch").setenv("VLLM_PYRAMID_ALLOW_REFERENCE", "1")
        engines.close()
        engine = demo(**settings)
        assert {
            layer.impl.ops.__name__.rpartition(".")[2] for layer in engine.attention_layers()
        } == {name}
        (outcome,) = engine.generate([prompt], greedy(8))
        answers[name] = (outcome.token_ids, outcome.report)
        engines.close()
    assert answers["functions"] == answers["reference"]
    assert answers["reference"][1]["evicted_tokens"] > 0
