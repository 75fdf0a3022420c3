# SPDX-License-Identifier: Apache-2.0
"""What each layer of a model does with the KV cache where a policy is served.

    evicting     full attention: a budget and a block table of its own
    other        a window that slides, a chunk, a state, a draft model's: what vLLM keeps of it
    reader       attends to the KV of a layer below it, which evicts when its last reader is done

The runner makes the roles once, when vLLM asks for the specs of the layers. What evicts is numbered
from the bottom, from 0 on; the model's own numbers stay in the specs, for what users see.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_pyramid.compat.cache_specs import with_one_page_size
from vllm_pyramid.kv_cache.head_layout import HeadKVCacheSpec
from vllm_pyramid.kv_cache.spec import KeyOnlyKVCacheSpec, LayerKVCacheSpec
from vllm_pyramid.policy.policy import Policy

_SERVE_WITHOUT = "serve this model with --kv-policy none"
_QUANTISED = (
    *(KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR),
    *(KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD),
)
# Themselves, nothing that derives from them.
_ATTENTION = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


@dataclass(frozen=True)
class LayerRoles:
    """The layers of a model by their names.

    `evicting` has specs from the bottom, `stock_groups` vLLM's own specs of the other layers, and
    `readers` of each layer that others read those others, from the bottom.
    """

    evicting: dict[str, LayerKVCacheSpec]
    stock_groups: dict[str, KVCacheSpec]
    readers: dict[str, list[str]]

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """Return specs of all layers with a cache: the model's from the bottom, then a draft's.

        vLLM would merge all layers with the first, if that one were a draft's.
        """
        specs = _from_the_bottom({**self.stock_groups, **self.evicting})
        return dict(sorted(specs.items(), key=lambda item: type(item[1]) is FullAttentionSpec))

    def of_stage(self, names: Collection[str]) -> LayerRoles:
        """Those of some of the layers."""
        evicting = {name: spec for name, spec in self.evicting.items() if name in names}
        stock_groups = {name: spec for name, spec in self.stock_groups.items() if name in names}
        return LayerRoles(evicting, stock_groups, self.readers)


def roles_of(
    stock: Mapping[str, KVCacheSpec],
    policy: Policy,
    max_model_len: int,
    readers: Mapping[str, str] | None = None,
    stages: Sequence[Collection[str]] = (),
    drafts: Collection[str] = (),
) -> LayerRoles:
    """Give every layer its role.

    Layers whose V the policy keeps in host memory get a spec of K alone, and those whose KV heads
    have lengths of their own one with a table for each head.

    Args:
        stock: vLLM's specs. readers: layers that read the KV of another, and that one.
        stages: of each pipeline stage its layers; empty where there is one.
        drafts: layers of a draft model, which keeps its whole cache.

    Raises:
        ValueError: a layer whose cache cannot be managed, with its name and kind; no layer with
            full attention; pages that cannot share a pool.
    """
    try:
        unified = with_one_page_size(_from_the_bottom(stock))
    except NotImplementedError as error:
        raise ValueError(f"{error} The layers cannot share a pool: {_SERVE_WITHOUT}") from error
    full = [
        name
        for name, spec in unified.items()
        if _is_full(name, spec, max_model_len) and name not in drafts
    ]
    if not full:
        raise ValueError(
            "no layer of this model has full attention, so there is nothing to evict: "
            f"{_SERVE_WITHOUT}"
        )
    if stages and (len(full) < len(unified) or readers):
        raise ValueError(
            "some layers of this model do not evict (windows, states, layers that read another's "
            "cache), which goes with one pipeline stage alone so far: leave "
            "--pipeline-parallel-size out, and take --tensor-parallel-size"
        )
    if not all(stages):
        raise ValueError(
            "a pipeline stage has no layer with a cache: lower --pipeline-parallel-size"
        )
    evicting = {
        name: LayerKVCacheSpec(
            **{
                f.name: getattr(unified[name], f.name)
                for f in fields(FullAttentionSpec)
                if f.init and hasattr(unified[name], f.name)
            },
            layer_idx=index,
            num_layers=len(full),
            model_layer=extract_layer_index(name),
            stages=tuple(map(len, stages)),
        )
        for index, name in enumerate(full)
    }
    shapes = {(spec.page_size_bytes, spec.block_size) for spec in evicting.values()}
    if len(shapes) > 1:
        sizes = sorted({stock[name].page_size_bytes for name in full})
        raise ValueError(
            f"the layers with full attention have KV pages of different sizes ({sizes} bytes a "
            f"block), which no KV policy can manage yet: {_SERVE_WITHOUT}"
        )
    if any(reader in drafts and layer not in drafts for reader, layer in (readers or {}).items()):
        raise ValueError(
            "the draft model reads the cache of the model, and would miss what is evicted from it: "
            "leave --speculative-config out, or draft by another model"
        )
    of_layers: dict[str, list[str]] = {}
    for reader, layer in sorted((readers or {}).items(), key=lambda pair: _number(pair[0])):
        of_layers.setdefault(layer, []).append(reader)
    ends = [_number(of_layers.get(name, [name])[-1]) for name in full]
    if ends != sorted(ends):
        raise ValueError(
            "layers of this model read each other's caches in another order than these stand in, "
            f"so they could not evict from the bottom up: {_SERVE_WITHOUT}"
        )
    return LayerRoles(
        {name: _spec_for(policy, name, spec) for name, spec in evicting.items()},
        {name: spec for name, spec in unified.items() if name not in evicting},
        of_layers,
    )


def _spec_for(policy: Policy, name: str, spec: LayerKVCacheSpec) -> LayerKVCacheSpec:
    """Return the spec of a layer that evicts, as the policy lays its cache out."""
    if policy.heads.splits:
        return HeadKVCacheSpec.of(spec, policy.heads)
    if policy.values.on_device(spec.layer_idx):
        return spec
    return KeyOnlyKVCacheSpec.of(_with_values_alike(name, spec))


def _number(name: str) -> int:
    number: int = extract_layer_index(name)
    return number


def _from_the_bottom(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    return {name: specs[name] for name in sorted(specs, key=_number)}


def _is_full(name: str, spec: KVCacheSpec, max_model_len: int) -> bool:
    """Return whether a layer has full attention, or a window that no sequence is longer than.

    ValueError: a cache that cannot be managed.
    """
    if type(spec) is MambaSpec:
        if spec.mamba_cache_mode != "none" or spec.num_speculative_blocks:
            raise ValueError(
                f"the state of layer {name} is cached in mode {spec.mamba_cache_mode!r}, with "
                "which no KV policy works yet: leave --mamba-cache-mode and "
                "--enable-prefix-caching out"
            )
        return False
    if type(spec) not in _ATTENTION:
        raise ValueError(
            f"layer {name} has a cache of type {type(spec).__name__}, which no KV policy can "
            f"manage yet: {_SERVE_WITHOUT}"
        )
    assert isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec)
    quantised = spec.kv_quant_mode not in _QUANTISED
    if quantised or getattr(spec, "non_causal", False):
        what = f"of type {spec.kv_quant_mode.name}" if quantised else "not causal"
        raise ValueError(
            f"the cache of layer {name} is {what}, which no KV policy can manage yet: "
            f"{_SERVE_WITHOUT} (a cache quantised by the checkpoint's settings: "
            "--kv-cache-dtype bfloat16)"
        )
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    if not window or window >= max_model_len:
        return True
    if isinstance(spec, FullAttentionSpec):
        raise ValueError(
            f"layer {name} has a window of {window} tokens and keeps its whole cache: vLLM's "
            "hybrid KV cache manager is off, which a KV policy needs"
        )
    return False


def _with_values_alike(name: str, spec: LayerKVCacheSpec) -> LayerKVCacheSpec:
    if spec.head_size_v != spec.head_size:
        raise ValueError(
            f"layer {name} has keys of {spec.head_size} and values of {spec.head_size_v} elements; "
            "V in host memory needs them alike: set values to device, or choose another policy"
        )
    return spec
