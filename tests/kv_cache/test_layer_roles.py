# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model evict, which keep what vLLM keeps, and which read another's cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_pyramid.kv_cache.layer_roles import LayerRoles, roles_of
from vllm_pyramid.policy import load_policy

_SHAPE: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.bfloat16,
}


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**_SHAPE | changes)


def sliding(window: int = 64, **changes: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**_SHAPE | changes, sliding_window=window)


def state(mode: str = "none") -> MambaSpec:
    return MambaSpec(
        block_size=512,
        shapes=((8,),),
        dtypes=(torch.float32,),
        page_size_padded=full().page_size_bytes,
        mamba_cache_mode=mode,
    )


def name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def roles(*specs: KVCacheSpec, readers: dict[int, int] | None = None) -> LayerRoles:
    """Of a model whose layers have these specs, given to vLLM in the wrong order."""
    layers = list(enumerate(specs))[::-1]
    return roles_of(
        {name(layer): spec for layer, spec in layers},
        load_policy("snapkv"),
        512,
        {name(reader): name(layer) for reader, layer in (readers or {}).items()},
    )


def test_full_attention_evicts_and_the_rest_stays_as_it_is() -> None:
    chunked = ChunkedLocalAttentionSpec(**_SHAPE, attention_chunk_size=64)
    stock = [sliding(), sliding(32), full(), state(), chunked, full(), sliding(512)]
    found = roles(*stock)
    assert [(spec.layer_idx, spec.model_layer) for spec in found.evicting.values()] == [
        *((0, 2), (1, 5)),
        (2, 6),  # its window is as long as any sequence
    ]
    assert all(spec.num_layers == 3 for spec in found.evicting.values())
    assert found.stock_groups == {name(layer): stock[layer] for layer in (0, 1, 3, 4)}
    assert list(found.specs) == [name(layer) for layer in range(7)]
    assert not found.readers


def test_pages_are_of_one_size_before_anybody_counts_blocks() -> None:
    found = roles(sliding(), full(head_size=64), sliding())
    assert {spec.page_size_bytes for spec in found.specs.values()} == {
        full(head_size=64).page_size_bytes
    }
    assert found.stock_groups[name(0)].block_size == 32
    found = roles(sliding(head_size=64), full())  # the other way round
    assert found.evicting[name(1)].block_size == 32


def test_readers_are_known_by_the_layer_that_they_read() -> None:
    found = roles(sliding(), full(), sliding(), full(), readers={6: 2, 5: 3, 7: 3})
    assert found.readers == {name(3): [name(5), name(7)], name(2): [name(6)]}
    with pytest.raises(ValueError, match="in another order"):
        roles(full(), full(), readers={2: 0})


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ((sliding(), sliding()), "no layer of this model has full attention"),
        ((full(), state("align")), "layers.1.* is cached in mode 'align'.*prefix-caching out"),
        ((full(), full(head_size=64)), r"different sizes \(\[4096, 8192\] bytes"),
    ],
)
def test_refused(specs: tuple[KVCacheSpec, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        roles(*specs)
