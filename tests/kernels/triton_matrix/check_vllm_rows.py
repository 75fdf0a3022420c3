# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention with a scale for each token and KV head, on survivors that were moved."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.plumbing.child import pretend_triton_device, use_attention_of_cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:  # before vLLM looks for a device
    pretend_triton_device()
    use_attention_of_cuda("TRITON_ATTN")

from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata  # noqa: E402

from vllm_pyramid.attention.backend_triton import PyramidTritonImpl  # noqa: E402
from vllm_pyramid.attention.cache_parts import parts_of_scaled_rows  # noqa: E402
from vllm_pyramid.compat.backend_names import SCALED_ROWS  # noqa: E402
from vllm_pyramid.kernels import reference  # noqa: E402
from vllm_pyramid.kernels.records import AttentionBatch, Softmax  # noqa: E402
from vllm_pyramid.kernels.triton import functions as triton_ops  # noqa: E402

HEADS, GROUP, SIZE, BLOCK = 2, 2, 32, 16
TOKENS, KEEP = 100, 36  # the first four blocks go
SCALE = SIZE**-0.5
# vLLM's kernel multiplies float32 as the device does: with 10 bits on a GPU.
NEAR = 1e-4 if INTERPRETED else 0.05


class Sequence:
    """Sequence in a cache of its own, whose blocks are in random order."""

    def __init__(self, dtype, device, seed):
        self.impl = PyramidTritonImpl(HEADS * GROUP, SIZE, SCALE, HEADS, None, None, dtype)
        memory = torch.int8 if dtype.startswith("int8") else torch.uint8
        shape = (9, HEADS, BLOCK, 2 * (SIZE + 4))
        self.cache = torch.zeros(shape, dtype=memory, device=device)
        order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
        self.table = order[:8].int()[None].to(device)
        self.parts = parts_of_scaled_rows(self.cache, SCALED_ROWS[dtype])

    def write(self, key, value, first):
        places = torch.arange(first, first + len(key), device=key.device)
        slots = self.table[0, places // BLOCK].long() * BLOCK + places % BLOCK
        self.impl.do_kv_cache_update(SimpleNamespace(), key, value, self.cache, slots)

    def attend(self, query, skipped, end):
        """Attend with one query to the positions `skipped .. end - 1`, less whole blocks below."""
        device, length = query.device, end - skipped
        scratch = (8, HEADS * GROUP, 16)
        metadata = TritonAttentionMetadata(
            num_actual_tokens=1,
            max_query_len=1,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=device),
            max_seq_len=length,
            seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
            block_table=self.table[:, skipped // BLOCK :].contiguous(),
            slot_mapping=torch.zeros(1, dtype=torch.int64, device=device),
            seq_threshold_3D=8,
            num_par_softmax_segments=16,
            softmax_segm_output=torch.empty(*scratch, SIZE, device=device),
            softmax_segm_max=torch.empty(scratch, device=device),
            softmax_segm_expsum=torch.empty(scratch, device=device),
            causal=True,
        )
        metadata.kv_step = None
        out = torch.zeros_like(query)
        self.impl.forward(SimpleNamespace(), query, query, query, self.cache, metadata, out)
        return out

    def plain(self, query, skipped, end):
        """Attend to the same positions in float64, with dequantised numbers."""
        keys, values = (
            numbers.double() * self.parts.scales[name].double()[..., None]
            for numbers, name in (
                (self.parts.keys, "key_scales"),
                (self.parts.values, "value_scales"),
            )
        )
        one = torch.tensor([0, 1, end, skipped], dtype=torch.int32, device=query.device)
        out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
        batch = AttentionBatch(query, keys, values, self.table, one[:2], one[2:3], one[3:])
        reference.paged_attention(out, batch, Softmax(SCALE), compute_dtype=torch.float64)
        return out


@pytest.mark.parametrize("dtype", list(SCALED_ROWS))
def test_attention_to_survivors(device, dtype):
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.randint(-3, 4, (2, TOKENS + 1, HEADS, 1), generator=generator)
    rows = torch.randn(2, TOKENS + 1, HEADS, SIZE, generator=generator) * sizes
    query = torch.randn(1, HEADS * GROUP, SIZE, generator=generator).to(device)
    key, value = rows.to(device)
    order = torch.rand(HEADS, TOKENS - 8, generator=generator).argsort(dim=1)[:, : KEEP - 8]
    tail = torch.arange(TOKENS - 8, TOKENS).expand(HEADS, -1)
    kept = torch.cat([order.sort(dim=1).values, tail], dim=1).int().to(device)

    evicted = Sequence(dtype, device, seed=1)
    evicted.write(key[:TOKENS], value[:TOKENS], 0)
    counts = torch.tensor([TOKENS, KEEP], dtype=torch.int32, device=device)
    triton_ops.compact(*evicted.parts.rows, evicted.table, kept[None], counts[:1], counts[1:])
    evicted.write(key[TOKENS:], value[TOKENS:], TOKENS)
    found = evicted.attend(query, TOKENS - KEEP, TOKENS + 1)

    short = Sequence(dtype, device, seed=2)
    for tensor, first in ((kept.T.long(), 0), (torch.full((1, HEADS), TOKENS), KEEP)):
        own = (x.gather(0, tensor.to(device)[..., None].expand(-1, -1, SIZE)) for x in (key, value))
        short.write(*own, first)
    assert torch.equal(found, short.attend(query, 0, KEEP + 1))

    right = evicted.plain(query, TOKENS - KEEP, TOKENS + 1)
    torch.testing.assert_close(found.double(), right, rtol=NEAR, atol=NEAR)
    # Numbers were quantised, by scales that differ.
    assert evicted.parts.scales["key_scales"][evicted.table[0, 4:6].long()].unique().numel() > 30
    unscaled = replace(
        evicted.parts, scales={k: v * 0 + 1 for k, v in evicted.parts.scales.items()}
    )
    evicted.parts = unscaled
    assert not torch.allclose(found.double(), evicted.plain(query, 64, 101), atol=0.1)


def test_scales_are_set_once(device):
    """Share memory between layers: what the first has written stays when the next begins."""
    from vllm_pyramid.compat.cache_specs import set_scales_of_tokens

    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 40, HEADS, SIZE, generator=generator).to(device)
    below, above = (Sequence("int8_per_token_head", device, seed=1) for _ in range(2))
    above.cache = below.cache
    above.table = 8 - above.table  # other blocks
    layers = [SimpleNamespace(impl=one.impl, kv_cache=one.cache) for one in (below, above)]
    set_scales_of_tokens([*layers, SimpleNamespace()])
    below.write(key, value, 0)
    scales = below.parts.scales["key_scales"][below.table[0, :2].long()].clone()
    assert (scales < 0.1).all()
    above.write(key[:3], value[:3], 0)
    assert torch.equal(below.parts.scales["key_scales"][below.table[0, :2].long()], scales)
    # A cache that takes the first one's place has views of its own.
    layers[0].kv_cache = torch.zeros_like(below.cache)
    set_scales_of_tokens(layers[:1])
    assert below.impl._k_scale_cache.untyped_storage().data_ptr() == layers[0].kv_cache.data_ptr()
