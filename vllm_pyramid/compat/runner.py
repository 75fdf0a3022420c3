# SPDX-License-Identifier: Apache-2.0
"""Our methods on vLLM's model runners, and the layers they are bound to.

Target: the class of `worker.model_runner`; `static_forward_context`, `attn_groups`; the inner
output of `AsyncModelRunnerOutput`. Why: workers create their runner themselves and choose between
three classes. A subclass made from whichever it is, given to the finished object, adds methods
without copying any constructor. Remove when vLLM has a `runner_cls`.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_pyramid.compat.side_channel import attach_evictions
from vllm_pyramid.engine_config import SLIDING_WINDOW_REASON
from vllm_pyramid.policy.base import Policy
from vllm_pyramid.scheduler.spec import LayerKVCacheSpec


def extend_runner(runner: Any, mixin: type) -> None:
    """Give the runner the mixin's methods, before its own in the method resolution order."""
    cls = type(runner)
    runner.__class__ = type(f"{mixin.__name__}{cls.__name__}", (mixin, cls), {})


def per_layer_specs(specs: dict[str, KVCacheSpec], policy: Policy) -> dict[str, LayerKVCacheSpec]:
    """Turn every layer's spec into one of its own, numbered from the bottom.

    Raises:
        ValueError: a layer whose cache a policy cannot manage, with its name and kind.
    """
    names = sorted(specs, key=extract_layer_index)
    result: dict[str, LayerKVCacheSpec] = {}
    for index, name in enumerate(names):
        spec = specs[name]
        window = getattr(spec, "sliding_window", None)
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
            raise ValueError(
                f"layer {name} has a cache of type {type(spec).__name__}, which no KV policy can "
                "manage yet: serve this model with --kv-policy none"
            )
        if window is not None and policy.evicts:
            raise ValueError(SLIDING_WINDOW_REASON.format(layer=f"layer {name}", window=window))
        result[name] = LayerKVCacheSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=spec.dtype,
            sliding_window=window,
            num_head_slots=spec.num_head_slots,
            state_content_bytes=spec.state_content_bytes,
            page_size_padded=spec.page_size_padded,
            layer_idx=index,
        )
    return result


def attention_layer(config: VllmConfig, name: str) -> Any:
    """The attention module that vLLM registered under `name`."""
    return config.compilation_config.static_forward_context[name]


def report_evictions(output: Any, evictions: dict[str, int]) -> Any:
    """Attach the step's evictions to what `sample_tokens` returns, finished or still in flight."""
    if not evictions:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        for name in ("_model_runner_output", "model_runner_output"):
            inner = getattr(output, name, None)
            if isinstance(inner, ModelRunnerOutput):
                setattr(output, name, attach_evictions(inner, evictions))
                return output
        raise RuntimeError(f"{type(output).__name__} of this vLLM carries no output to attach to")
    assert isinstance(output, ModelRunnerOutput), type(output)
    return attach_evictions(output, evictions)
