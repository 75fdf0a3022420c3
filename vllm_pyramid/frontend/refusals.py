# SPDX-License-Identifier: Apache-2.0
"""What of a finished configuration does not work with a KV policy, each with its reason.

Defaults and checkpoints enable features too. The table of docs/limits.md is made from this list and
that of `refused_flags.py`. The parts of a policy refuse by themselves what they cannot work with,
and `frontend/engine_config.py` refuses numbers that are too small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_pyramid.compat.backend_names import FP8_CACHES, SCALED_ROWS
from vllm_pyramid.frontend.layer_kinds import SLIDING, has_other_layers, has_states, layer_kinds
from vllm_pyramid.policy import Policy

KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32", *FP8_CACHES, *SCALED_ROWS)
_SCALED_CACHE = f"a KV cache of type {' or '.join(SCALED_ROWS)}"
# Ways to draft: without a cache of their own, or with one that is never evicted from.
_DRAFTS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")


@dataclass(frozen=True)
class Refusal:
    """One option that does not work with a policy.

    Attributes:
        what: the flag's name, or a description. why: the reason, and what to do instead.
        asked: returns whether a configuration has the option with the served policy; a string is
            the value that does not work.
    """

    what: str
    why: str
    asked: Callable[[Any, Policy], Any]


def refuse(refusals: Iterable[Refusal], config: EngineArgs | VllmConfig, policy: Policy) -> None:
    """Raise ValueError for the first of the refusals that a configuration asks for."""
    for refusal in refusals:
        if asked := refusal.asked(config, policy):
            value = f" {asked}" if isinstance(asked, str) else ""
            raise ValueError(
                f"a KV policy (--kv-policy) does not work with {refusal.what}{value} yet: "
                f"{refusal.why}"
            )


def unless(value: Any, good: tuple[str, ...]) -> str | None:
    """Return the value unless it is one of the good ones."""
    return None if value in good else str(value)


def _drafts_elsewhere(config: VllmConfig, policy: Policy) -> str | None:
    speculation = config.speculative_config
    return None if speculation is None else unless(speculation.method, _DRAFTS)


def _has_drafts_of_another_type(config: VllmConfig, policy: Policy) -> str | None:
    speculation, own = config.speculative_config, config.cache_config.cache_dtype
    chosen = None if speculation is None else speculation.kv_cache_dtype
    return None if chosen is None else unless(chosen, (own,))


def _has_windows_alone(config: VllmConfig, policy: Policy) -> bool:
    model = config.model_config
    return set(layer_kinds(model.hf_text_config, model.max_model_len)) == {SLIDING}


def _has_stages_and_other_layers(config: VllmConfig, policy: Policy) -> bool:
    return config.parallel_config.pipeline_parallel_size > 1 and _has_other_layers(config)


def _has_flash_attention(config: VllmConfig) -> bool:
    chosen = config.attention_config.backend
    return chosen is not None and chosen.name == "FLASH_ATTN"


def _has_states(config: VllmConfig) -> bool:
    model = config.model_config
    return has_states(model.hf_text_config, model.max_model_len)


def _has_scaled_rows(config: VllmConfig) -> bool:
    return config.cache_config.cache_dtype in SCALED_ROWS


def asks_for_host_cache(additional_config: object, key: str = "kv_host_cache") -> bool:
    """Return whether this key was given; its value is checked elsewhere."""
    given = additional_config if isinstance(additional_config, Mapping) else {}
    return given.get(key) is not None


def _has_host_cache(config: VllmConfig) -> bool:
    return asks_for_host_cache(config.additional_config)


def _has_drafts_with_a_cache(config: VllmConfig) -> bool:
    speculation = config.speculative_config
    return speculation is not None and bool(speculation.uses_draft_kv_cache())


def _has_other_layers(config: VllmConfig) -> bool:
    model, text = config.model_config, config.model_config.hf_text_config
    shared = getattr(text, "num_kv_shared_layers", None)
    return has_other_layers(text, model.max_model_len) or bool(shared)


OF_CONFIGURATION = (
    Refusal(
        "a model that does not generate",
        "there is no cache to evict from; serve it with --kv-policy none",
        lambda config, _: config.model_config.runner_type != "generate",
    ),
    Refusal(
        "a model with an encoder",
        "policies are for decoder-only models",
        lambda config, _: config.model_config.is_encoder_decoder,
    ),
    Refusal(
        "multi-head latent attention (MLA)",
        "its cache has no KV heads to choose tokens for; serve this model with --kv-policy none",
        lambda config, _: config.model_config.use_mla,
    ),
    Refusal(
        "a model of which every layer has a sliding window",
        "there is nothing to evict; serve it with --kv-policy none",
        _has_windows_alone,
    ),
    Refusal(
        "--pipeline-parallel-size and a model of which some layers do not evict",
        "windows, states and layers that read others' caches go with one stage alone so far; use "
        "--tensor-parallel-size",
        _has_stages_and_other_layers,
    ),
    Refusal(
        "--kv-host-cache and a model of which some layers do not evict",
        "their windows and states are not stored with a prefix yet; leave --kv-host-cache out",
        lambda config, _: _has_host_cache(config) and _has_other_layers(config),
    ),
    Refusal(
        "--kv-host-cache and a draft model",
        "its layers are not stored with a prefix yet; draft by ngram, or leave --kv-host-cache out",
        lambda config, _: _has_host_cache(config) and _has_drafts_with_a_cache(config),
    ),
    Refusal(
        "--pipeline-parallel-size and --speculative-config",
        "drafts are known to the last stage alone; leave one of them out",
        lambda config, _: (
            config.parallel_config.pipeline_parallel_size > 1
            and config.speculative_config is not None
        ),
    ),
    Refusal(
        "--data-parallel-size and a mixture of experts",
        "such replicas compute in step, which was not tried together with eviction; start a server "
        "for each replica, or use --tensor-parallel-size",
        lambda config, _: (
            config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe
        ),
    ),
    Refusal(
        "speculative decoding by another method:",
        f"it was not tried together with eviction; draft by one of {', '.join(_DRAFTS)}",
        _drafts_elsewhere,
    ),
    Refusal(
        "a draft model's kv_cache_dtype",
        "blocks of both models come from one pool, and were not tried with caches of two types; "
        "leave it out, and the draft model takes the model's",
        _has_drafts_of_another_type,
    ),
    Refusal(
        "speculative decoding by several MTP modules",
        "each reads one token further into the next chunk of a prompt than the one before; set "
        "num_speculative_tokens to 1, which takes one module",
        lambda config, _: (
            config.speculative_config is not None
            and config.speculative_config.use_multi_module_mtp()
        ),
    ),
    Refusal(
        "speculative decoding by eagle, eagle3 or mtp and a policy that drops tokens between "
        "layers",
        "the draft model wants the hidden states of all tokens; draft by a model of its own "
        "(draft_model) or by ngram",
        lambda config, policy: (
            config.speculative_config is not None
            and config.speculative_config.use_eagle()
            and policy.allocator.thins_prompts
        ),
    ),
    Refusal(
        "speculative decoding and a policy that evicts while it generates",
        "that cannot be taken back when a draft is rejected; choose a policy that evicts prompts, "
        "such as pyramidkv",
        lambda config, policy: config.speculative_config is not None and policy.works_in_every_step,
    ),
    Refusal(
        "a KV connector",
        "leave --kv-transfer-config out",
        lambda config, _: config.kv_transfer_config is not None,
    ),
    Refusal(
        "two batches a step",
        "each would need tables of its own; leave --enable-dbo and --ubatch-size out",
        lambda config, _: config.parallel_config.use_ubatching,
    ),
    Refusal(
        "a KV cache of type",
        "the checkpoint asks for it; add --kv-cache-dtype bfloat16",
        lambda config, _: unless(config.cache_config.cache_dtype, KV_CACHE_DTYPES),
    ),
    Refusal(
        "fp8 caches and --attention-backend FLASH_ATTN",
        "it wants quantised queries, and scorers look at those that are not; use TRITON_ATTN",
        lambda config, _: (
            _has_flash_attention(config) and config.cache_config.cache_dtype in FP8_CACHES
        ),
    ),
    Refusal(
        "a KV cache of type fp8_e5m2 on CUDA",
        "vLLM's Triton attention takes every fp8 cache for e4m3; use --kv-cache-dtype fp8",
        lambda config, _: (
            current_platform.device_type == "cuda" and config.cache_config.cache_dtype == "fp8_e5m2"
        ),
    ),
    Refusal(
        f"{_SCALED_CACHE} and --attention-backend FLASH_ATTN",
        "its rows hold a scale for each token and KV head, which FlashAttention does not read; use "
        "TRITON_ATTN",
        lambda config, _: _has_flash_attention(config) and _has_scaled_rows(config),
    ),
    Refusal(
        f"{_SCALED_CACHE} on the CPU",
        "our kernels there have one scale a layer, none for each token and KV head; use "
        "--kv-cache-dtype fp8",
        lambda config, _: current_platform.device_type == "cpu" and _has_scaled_rows(config),
    ),
    Refusal(
        f"{_SCALED_CACHE} and a model whose layers keep states",
        "such rows in pages that are as large as a state were not tried; use --kv-cache-dtype fp8",
        lambda config, _: _has_scaled_rows(config) and _has_states(config),
    ),
    Refusal(
        f"{_SCALED_CACHE} and V in host memory",
        "a row of K alone has no such layout in vLLM; set values to device, or use "
        "--kv-cache-dtype fp8",
        lambda config, policy: not policy.copies_blocks and _has_scaled_rows(config),
    ),
    Refusal(
        "attention_config.backend_per_kind",
        "it would replace the backend that reads per-layer tables",
        lambda config, _: bool(config.attention_config.backend_per_kind),
    ),
    Refusal(
        "attention_config.hisparse_config",
        "it keeps pages of its own",
        lambda config, _: config.attention_config.hisparse_config is not None,
    ),
    Refusal(
        "vLLM's hybrid KV cache manager switched off",
        "every layer needs a block table of its own; KV events and chunked local attention switch "
        "it off",
        lambda config, _: config.scheduler_config.disable_hybrid_kv_cache_manager,
    ),
)
