# SPDX-License-Identifier: Apache-2.0
"""What vLLM resolves by itself, and layers as they really are: refused where eviction would lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, MistralConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_pyramid.compat.backend_names import BACKENDS, SCALED_ROWS
from vllm_pyramid.frontend import features
from vllm_pyramid.frontend.backends import take_draft_backend
from vllm_pyramid.frontend.engine_config import why_no_turns
from vllm_pyramid.frontend.graphs import check_graphs
from vllm_pyramid.frontend.refusals import EVERY_POLICY
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.capabilities import OF_REQUESTS, Feature, refuse

WINDOWS = MistralConfig(num_hidden_layers=2, sliding_window=64)
STATES = transformers.FalconH1Config(num_hidden_layers=2)


def handover(name: str = "PyramidConnector", module: str | None = None) -> Any:
    """A finished configuration of a KV connector."""
    return SimpleNamespace(kv_connector=name, kv_connector_module_path=module)


HANDOVER = {"kv_transfer_config": handover()}


def resolved_config(**changes: Any) -> Any:
    """The parts of a finished `VllmConfig` that are looked at, with nothing to refuse."""
    values: dict[str, Any] = {
        "model_config.runner_type": "generate",
        "model_config.is_encoder_decoder": False,
        "model_config.use_mla": False,
        "model_config.is_moe": False,
        "model_config.hf_text_config": LlamaConfig(num_hidden_layers=2),
        "model_config.max_model_len": 4096,
        "cache_config.cache_dtype": "auto",
        "speculative_config": None,
        "kv_transfer_config": None,
        "additional_config": {},
        "use_v2_model_runner": False,
        "parallel_config.tensor_parallel_size": 1,
        "parallel_config.pipeline_parallel_size": 1,
        "parallel_config.data_parallel_size": 1,
        "parallel_config.use_ubatching": False,
        "attention_config.backend": None,
        "attention_config.backend_per_kind": {},
        "attention_config.hisparse_config": None,
        "scheduler_config.disable_hybrid_kv_cache_manager": False,
        **changes,
    }
    config = SimpleNamespace()
    for path, value in values.items():
        *parents, name = path.split(".")
        node = config
        for parent in parents:
            node.__dict__.setdefault(parent, SimpleNamespace())
            node = getattr(node, parent)
        setattr(node, name, value)
    return config


def drafts(method: str, modules: int = 1, dtype: str | None = None, backend: Any = None) -> Any:
    """What is asked of vLLM's `SpeculativeConfig`."""
    return SimpleNamespace(
        method=method,
        kv_cache_dtype=dtype,
        attention_backend=backend,
        use_eagle=lambda: method in ("eagle", "eagle3", "mtp"),
        uses_draft_kv_cache=lambda: method in ("eagle", "eagle3", "mtp", "draft_model"),
        use_multi_module_mtp=lambda: modules > 1,
    )


def start(policy: str = "pyramidkv", device: str = "cpu", **changes: Any) -> None:
    """Refuse what a configuration uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "current_platform", SimpleNamespace(device_type=device))
        refuse(load_policy(policy), features.of_config(resolved_config(**changes)), EVERY_POLICY)


STAGES = {"parallel_config.pipeline_parallel_size": 2}
REPLICAS = {"parallel_config.data_parallel_size": 2}
FLASH = {"attention_config.backend": AttentionBackendEnum.FLASH_ATTN}
TRITON = AttentionBackendEnum.TRITON_ATTN


def cache(dtype: str) -> dict[str, Any]:
    return {"cache_config.cache_dtype": dtype}


@pytest.mark.parametrize(
    ("policy", "device", "changes"),
    [
        ("pyramidkv", "cpu", {}),
        ("pyramidkv", "cpu", REPLICAS),
        ("pyramidkv", "cpu", STAGES),
        ("pyramidkv", "cpu", {"speculative_config": drafts("ngram")}),
        ("h2o", "cpu", {}),
        ("pyramidinfer", "cpu", {"speculative_config": drafts("ngram")}),
        ("pyramidinfer", "cpu", {"speculative_config": drafts("draft_model")}),
        ("snapkv", "cpu", {"speculative_config": drafts("eagle")}),
        ("pyramidkv", "cpu", cache("fp8")),
        ("pyramidkv", "cpu", cache("fp8_e5m2")),
        ("pyramidkv", "cuda", {**cache("fp8_e4m3"), **FLASH}),
        *(("quest", "cuda", cache(dtype)) for dtype in ("auto", "fp8")),
        *(("pyramidkv", "cuda", cache(dtype)) for dtype in SCALED_ROWS),
        ("duoattention", "cuda", {}),
    ],
)
def test_what_is_not_refused(policy: str, device: str, changes: dict[str, Any]) -> None:
    start(policy, device, **changes)


@pytest.mark.parametrize(
    ("policy", "device", "changes", "advice"),
    [
        ("pyramidkv", "cpu", cache("int4_per_token_head"), "--kv-cache-dtype bfloat16"),
        ("pyramidkv", "cpu", {"model_config.runner_type": "pooling"}, "--kv-policy none"),
        ("pyramidkv", "cpu", {"model_config.is_encoder_decoder": True}, "decoder-only"),
        ("pyramidkv", "cpu", {"model_config.use_mla": True}, "MLA"),
        ("pyramidkv", "cpu", {"model_config.hf_text_config": WINDOWS}, "nothing to evict"),
        *(
            ("pyramidkv", "cpu", {"speculative_config": drafts(name)}, rf"\({name}\): it was")
            for name in ("dflash", "suffix", "medusa", "ngram_gpu")
        ),
        ("pyramidkv", "cpu", {"speculative_config": drafts("eagle", dtype="fp8")},
         "kv_cache_dtype fp8: blocks of"),
        ("pyramidkv", "cpu", {"speculative_config": drafts("eagle", backend=TRITON)},
         "attention_backend TRITON_ATTN: its layers"),
        ("pyramidkv", "cpu", {"speculative_config": drafts("mtp", modules=2)},
         "set num_speculative_tokens to 1"),
        ("pyramidkv", "cpu", {"speculative_config": drafts("ngram"), **STAGES},
         "--pipeline-parallel-size and --speculative-config"),
        ("h2o", "cpu", {"speculative_config": drafts("ngram")}, "such as pyramidkv"),
        *(
            ("pyramidinfer", "cpu", {"speculative_config": drafts(name)}, "hidden states of all")
            for name in ("eagle", "eagle3", "mtp")
        ),
        ("pyramidkv", "cpu", {"kv_transfer_config": object()}, "--kv-transfer-config"),
        *(
            ("pyramidkv", "cpu", {"kv_transfer_config": handover(name)},
             rf"\({name}\): .*every layer has a table.*use PyramidConnector.*--kv-host-cache")
            for name in ("MultiConnector", "OffloadingConnector", "LMCacheConnectorV1")
        ),
        ("pyramidkv", "cpu", {"kv_transfer_config": handover(module="somebody.elses")},
         "other connectors"),
        ("pyramidkv", "cpu", {**HANDOVER, **STAGES}, "pipeline-parallel-size: blocks of several"),
        ("pyramidkv", "cpu", {**HANDOVER, **REPLICAS}, "start a server for each replica"),
        ("pyramidkv", "cpu", {**HANDOVER, "speculative_config": drafts("ngram")}, "not tried with"),
        *(
            (policy, "cpu", HANDOVER, f"PyramidConnector.*{reason}")
            for policy, reason in (
                ("xkv", "lengths are solved"),
                ("h2o", "adds up what all queries"),
                ("pyramidinfer", "leave between the layers"),
                ("quest", "selected pages"),
                ("adakv", "lengths of its heads"),
                ("kcache", "V lies in host memory"),
            )
        ),
        ("pyramidkv", "cpu", {"parallel_config.use_ubatching": True}, "--ubatch-size"),
        ("pyramidkv", "cpu", {"attention_config.backend_per_kind": {"a": 1}}, "backend_per_kind"),
        ("pyramidkv", "cpu", {"attention_config.hisparse_config": object()}, "hisparse_config"),
        ("pyramidkv", "cpu", {"scheduler_config.disable_hybrid_kv_cache_manager": True},
         "chunked local attention"),
        ("pyramidkv", "cpu", {"model_config.is_moe": True, **REPLICAS},
         "--data-parallel-size and a mixture of experts: such replicas share"),
        ("pyramidkv", "cuda", cache("fp8_e5m2"), "fp8_e5m2 on CUDA devices.*use fp8"),
        *(
            (policy, device, {**cache(dtype), **changes}, rf"\({dtype}\).*{advice}")
            for dtype in SCALED_ROWS
            for policy, device, changes, advice in (
                ("pyramidkv", "cpu", {}, "on CPUs: .*dtype fp8"),
                ("pyramidkv", "cuda", {"model_config.hf_text_config": STATES}, "keep states"),
                ("kcache", "cuda", {}, "V lies in host memory"),
                ("pyramidkv", "cuda", FLASH, "FLASH_ATTN.*use TRITON_ATTN"),
                ("quest", "cuda", {}, "one scale a layer"),
            )
        ),
        ("duoattention", "cuda", {"speculative_config": drafts("ngram")}, "drafts|not tried"),
        ("duoattention", "cpu", {"use_v2_model_runner": True, **REPLICAS}, "second model runner"),
        ("adakv", "cpu", {"parallel_config.tensor_parallel_size": 2}, "would solve other"),
    ],
)  # fmt: skip
def test_what_vllm_switched_on_is_refused(policy, device, changes, advice) -> None:
    """Also what drafts and caches are, however they were asked for."""
    with pytest.raises(ValueError, match=f"does not work .*{advice}"):
        start(policy, device, **changes)


def test_every_feature_of_an_engine_has_a_detector() -> None:
    detected = {*features._OF_ARGS, *features._OF_CONFIG}
    assert detected == set(Feature) - OF_REQUESTS


@pytest.mark.parametrize(("stages", "is_async"), [(1, None), (2, False)])
def test_pipeline_stages_are_not_scheduled_asynchronously(
    monkeypatch: pytest.MonkeyPatch, random_model: Path, stages: int, is_async: bool | None
) -> None:
    """Which vLLM does on GPUs where it is not told."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.compat.platform import defaults
    from vllm_pyramid.frontend import engine_config

    monkeypatch.setattr(defaults, "choose", lambda args: None)
    args = EngineArgs(str(random_model), pipeline_parallel_size=stages)
    engine_config.prepare_args(args, KVSettings("pyramidkv"))
    assert args.async_scheduling is is_async


def test_arguments_serve_another_engine_afterwards(monkeypatch, random_model) -> None:
    """What a policy changes is for its own engine."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.compat.platform import defaults
    from vllm_pyramid.plugin import register

    register()
    defaults.withdraw()  # what other tests' engines left, which `monkeypatch` would put back
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    args = EngineArgs(str(random_model), max_model_len=512, additional_config={"kv_policy": "h2o"})
    before = vars(args).copy()
    config = args.create_engine_config()
    assert config.cache_config.enable_prefix_caching is False
    for name in ("additional_config", "async_scheduling", "dtype", "enable_prefix_caching"):
        assert getattr(args, name) == before[name], name


def test_a_draft_model_takes_the_backend_of_the_model() -> None:
    config = resolved_config(speculative_config=drafts("eagle"))
    take_draft_backend(config)
    assert config.speculative_config.attention_backend is AttentionBackendEnum.CUSTOM
    none = resolved_config(speculative_config=drafts("ngram"))
    take_draft_backend(none)
    assert none.speculative_config.attention_backend is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"speculative_config": drafts("ngram")}, None),
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline stage"),
        ({"model_config.hf_text_config": WINDOWS}, None),
        ({"model_config.hf_text_config": STATES}, "layers of this model have a state"),
        ({"speculative_config": drafts("eagle")}, None),
    ],
)
def test_where_conversations_cannot_resume(changes: dict[str, Any], reason: str | None) -> None:
    served = KVSettings("snapkv").served()
    assert served is not None
    why = why_no_turns(features.of_config(resolved_config(**changes)), served)
    assert why is None if reason is None else reason in why


def of_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> Any:
    """A device of this capability, as far as it is asked for the backend of attention.

    FlashAttention is there in the version that vLLM takes on it.
    """
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends import fa_utils, flash_attn

    from vllm_pyramid.frontend import backends

    found = DeviceCapability(*capability)
    version = {9: 3, 10: 4}.get(found.major, 2)
    device = SimpleNamespace(get_device_capability=lambda: found, device_type="cuda")
    monkeypatch.setattr(backends, "current_platform", device)
    monkeypatch.setattr(flash_attn, "is_fa_version_supported", lambda wanted: wanted <= version)
    for module in (fa_utils, flash_attn):
        monkeypatch.setattr(module, "is_flash_attn_varlen_func_available", lambda: True)
        monkeypatch.setattr(module, "get_flash_attn_version", lambda *_, **__: version)
    device.is_xpu = lambda: False
    device.is_device_capability_family = lambda family: found.major == family // 10
    monkeypatch.setattr(fa_utils, "current_platform", device)
    # What the module imports on CUDA alone.
    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: version > 2, raising=False)
    return backends


def model_config(text: Any, head_size: int = 128, **changes: Any) -> dict[str, Any]:
    model = {
        "dtype": torch.bfloat16,
        "get_head_size": lambda: head_size,
        "hf_text_config": text,
        "is_mm_prefix_lm": False,
        "skip_tokenizer_init": True,
    }
    cache = {"cache_dtype": "auto", "block_size": 16, "user_specified_block_size": False}
    return {
        **{f"model_config.{name}": value for name, value in model.items()},
        **{f"cache_config.{name}": value for name, value in cache.items()},
        **changes,
    }


LLAMA = LlamaConfig(num_hidden_layers=2)


def gemma(head_size: int) -> transformers.Gemma4TextConfig:
    kinds = ["sliding_attention", "full_attention"]
    return transformers.Gemma4TextConfig(
        num_hidden_layers=2, layer_types=kinds, head_dim=128, global_head_dim=head_size
    )


def cached_as(dtype: str) -> dict[str, Any]:
    return model_config(LLAMA, **{"cache_config.cache_dtype": dtype})


@pytest.mark.parametrize(
    ("capability", "config", "backend"),
    [
        ((8, 0), model_config(LLAMA), "FLASH_ATTN"),
        ((9, 0), model_config(LLAMA), "FLASH_ATTN"),
        ((7, 5), model_config(LLAMA), "TRITON_ATTN"),
        ((8, 9), cached_as("fp8"), "TRITON_ATTN"),  # FlashAttention 2 has no such cache
        *((device, cached_as("fp8"), "FLASH_ATTN") for device in ((9, 0), (10, 0))),
        ((8, 0), cached_as("int8_per_token_head"), "TRITON_ATTN"),
        ((9, 0), cached_as("fp8_per_token_head"), "TRITON_ATTN"),
        ((9, 0), model_config(LLAMA, **{"model_config.dtype": torch.float32}), "TRITON_ATTN"),
        # Learned sinks: below sm_90 by a combination that only `validate_configuration` looks at.
        ((8, 0), model_config(transformers.GptOssConfig(num_hidden_layers=2), 64), "TRITON_ATTN"),
        ((9, 0), model_config(transformers.GptOssConfig(num_hidden_layers=2), 64), "FLASH_ATTN"),
        # Not all layers have heads of the model's size.
        ((9, 0), model_config(gemma(256)), "FLASH_ATTN"),
        ((9, 0), model_config(gemma(512)), "TRITON_ATTN"),
    ],
)
def test_the_backend_is_one_that_vllm_will_accept(monkeypatch, capability, config, backend) -> None:
    backends = of_cuda(monkeypatch, capability)
    assert backends.take_backend(resolved_config(**config)) == backend


def test_sinks_below_sm_90_are_refused_by_the_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this version of FlashAttention has sinks by itself."""
    from vllm.v1.attention.backends import flash_attn

    backends = of_cuda(monkeypatch, (8, 9))
    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: True)
    config = resolved_config(**model_config(transformers.GptOssConfig(num_hidden_layers=2), 64))
    assert backends.take_backend(config) == "TRITON_ATTN"


def test_a_backend_that_cannot_be_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = of_cuda(monkeypatch, (7, 5))
    with pytest.raises(ValueError, match=r"backend FLASH_ATTN here: compute capability not"):
        backends.take_backend(resolved_config(**model_config(LLAMA, **FLASH)))
    wrong = cached_as("fp8_e5m2")
    with pytest.raises(ValueError, match=r"backend TRITON_ATTN here: kv_cache_dtype not supported"):
        backends.take_backend(resolved_config(**wrong))


def test_scales_of_every_head_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    of_cuda(monkeypatch, (9, 0))
    assert FlashAttentionBackend.supports_per_head_quant_scales()
    found = [resolve_obj_by_qualname(name) for name in BACKENDS.values()]
    assert not any(backend.supports_per_head_quant_scales() for backend in found)


def specs(count: int = 3, **changes: Any) -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    # Not in the order of layers, and with a number of two digits.
    names = [f"model.layers.{layer}.self_attn.attn" for layer in (10, 0, 2)[:count]]
    return {name: replace(spec, **changes) for name in names}


def per_layer(stock: dict[str, Any], name: str = "pyramidkv") -> Any:
    from vllm_pyramid.kv_cache.layer_roles import roles_of

    return roles_of(stock, load_policy(name), max_model_len=4096).evicting


def test_a_draft_models_layers_keep_all_and_come_last() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_pyramid.kv_cache.layer_roles import roles_of

    stock = specs()
    (one, *_), draft = stock.values(), "draft_model.layers.0.self_attn.attn"
    larger = replace(one, num_kv_heads=one.num_kv_heads // 2)  # in bytes: half a token
    policy = load_policy("pyramidkv")
    roles = roles_of({draft: larger, **stock}, policy, max_model_len=4096, drafts={draft})
    assert list(roles.specs) == [*roles.evicting, draft]
    assert len(roles.evicting) == 3
    spec = roles.stock_groups[draft]
    assert type(spec) is FullAttentionSpec and spec.block_size == 32
    assert spec.page_size_bytes == one.page_size_bytes
    reads = {"draft.layers.0.attn": next(iter(stock))}
    with pytest.raises(ValueError, match="would miss what is evicted"):
        roles_of(stock, policy, 4096, readers=reads, drafts=set(reads))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 1024}, "a window of 1024 tokens and keeps its whole cache"),
        ({"attention_chunk_size": 1024}, "a window of 1024 tokens and keeps its whole cache"),
        ({"non_causal": True}, "not causal"),
    ],
)
def test_layers_that_eviction_would_falsify_are_refused(changes, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        per_layer(specs(**changes))


def test_quantised_caches_are_refused() -> None:
    from vllm.v1.kv_cache_interface import KVQuantMode

    with pytest.raises(ValueError, match=r"INT4_PER_TOKEN_HEAD.*--kv-cache-dtype bfloat16"):
        per_layer(specs(kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD), "full")
    fp8 = specs(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, dtype=torch.uint8)
    pages = [spec.page_size_bytes for spec in specs().values()]
    assert [2 * spec.page_size_bytes for spec in per_layer(fp8).values()] == pages


def test_other_kinds_of_cache_are_refused_by_name() -> None:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    stock = specs(1)
    name = next(iter(stock))
    stock[name] = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    )
    with pytest.raises(ValueError, match=f"{name}.*MLAAttentionSpec"):
        per_layer(stock)


# CUDA graphs --------------------------------------------------------------------------------------


def graphs(mode: str, *, inductor: bool = False) -> Any:
    from vllm.config import CUDAGraphMode

    return resolved_config(
        **{
            "compilation_config.cudagraph_mode": CUDAGraphMode[mode],
            "compilation_config.use_inductor_graph_partition": inductor,
        }
    )


@pytest.mark.parametrize("policy", ["kcache", "pyramidkv", "select"])
def test_graphs_leave_out_what_a_method_attends_to(monkeypatch, policy) -> None:
    """vLLM's default becomes graphs between the layers' attention, with a line that says why."""
    from vllm_pyramid.frontend import graphs as module

    said: list[str] = []
    monkeypatch.setattr(module.logger, "info", lambda line, *of: said.append(line % of))
    modes = {"NONE": "NONE", "PIECEWISE": "PIECEWISE"}
    modes["FULL_AND_PIECEWISE"] = "PIECEWISE" if policy == "kcache" else "FULL_AND_PIECEWISE"
    for mode, expected in modes.items():
        config = graphs(mode)
        check_graphs(config, load_policy(policy))
        assert config.compilation_config.cudagraph_mode.name == expected
    expects = ["kv-policy kcache: cudagraph_mode is PIECEWISE instead of FULL_AND_PIECEWISE"]
    assert [line.partition(": attention")[0] for line in said] == expects * (policy == "kcache")


def test_graphs_of_selected_pages() -> None:
    """Of decode steps, on one pipeline stage, by scorers that have kernels."""
    select = load_policy("select")
    check_graphs(graphs("FULL_DECODE_ONLY"), select)
    with pytest.raises(ValueError, match="which would skip the summaries of pages"):
        check_graphs(graphs("FULL"), select)
    with pytest.raises(ValueError, match="use_inductor_graph_partition and CUDA graphs"):
        check_graphs(graphs("FULL_AND_PIECEWISE", inductor=True), select)
    assert not select.excludes_graphs(1) and select.excludes_graphs(2)
    own = load_policy("select", args={"attend.scorer": "tests.methods.test_pages:OwnMean"})
    assert own.excludes_graphs(1)  # whose scorer runs in PyTorch


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_graphs_of_whole_decode_steps_are_refused(mode: str) -> None:
    away = load_policy("snapkv", None, {"values": "host"})
    for policy in (load_policy("kcache"), away):
        with pytest.raises(ValueError, match=f"cudagraph_mode {mode} captures whole decode steps"):
            check_graphs(graphs(mode), policy)
        with pytest.raises(ValueError, match="use_inductor_graph_partition and CUDA graphs"):
            check_graphs(graphs("PIECEWISE", inductor=True), policy)
        check_graphs(graphs("NONE", inductor=True), policy)
