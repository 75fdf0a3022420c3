# SPDX-License-Identifier: Apache-2.0
"""Transformers' model, whose rows behind the prompt see the pages that an engine has read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.engine.paper import HuggingFaceModel
from tests.engine.support import Engine
from vllm_pyramid.methods.pages.kernels import page_ops
from vllm_pyramid.methods.pages.worker import PageSelector

Pages = dict[tuple[str, int, int], list[list[int]]]  # request, layer, position: a KV head each


@contextmanager
def pages_read(engine: Engine) -> Iterator[Pages]:
    """Notes which pages each choosing token reads, from what attention is given."""
    ops: Any = page_ops(engine.attention_layers(evicting=True)[0].impl.ops)
    found: Pages = {}
    before, select = PageSelector.before_attention, ops.select_pages
    current: list[Any] = []

    def note_layer(self: Any, inputs: Any) -> Any:
        current[:] = [self._step, inputs.layer]
        return before(self, inputs)

    def note(batch: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = select(batch, *args, **kwargs)
        step, layer = current
        for row, (request, position) in enumerate(
            zip(batch.requests.tolist(), batch.positions.tolist(), strict=True)
        ):
            count = int(chosen.counts[row])
            name = step.requests[request].request_id
            found[name, layer, position] = chosen.pages[row, :, :count].tolist()
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageSelector, "before_attention", note_layer)
        patch.setattr(ops, "select_pages", note)
        yield found


class PagedModel(HuggingFaceModel):
    """Transformers' model, whose rows behind the prompt see the tokens of given pages."""

    pages: Pages
    name: str
    page_size = 16
    # A layer's survivors, `[G, held]` positions of the prompt; None: nothing was evicted.
    survivors: list[torch.Tensor] | None = None

    def visible(self, layer: int, kv_heads: int, total: int) -> torch.Tensor:
        visible, prompt = super().visible(layer, kv_heads, total), self._prompt_len
        for head in range(kv_heads):
            # Where the cache has each token: survivors lie at the end of the prompt's places.
            place = torch.arange(total)
            if self.survivors is not None:
                kept = self.survivors[layer][head]
                place[:prompt] = -1
                place[kept] = torch.arange(prompt - len(kept), prompt)
                visible[head, prompt:, :prompt] &= place[:prompt] >= 0
            for position in range(prompt, total):
                chosen = self.pages.get((self.name, layer, position))
                if chosen is not None:
                    own = torch.tensor(chosen[head])
                    visible[head, position] &= torch.isin(place // self.page_size, own) & (
                        place >= 0
                    )
        return visible


class SummaryCheck:
    """Called after every step of an engine: each summary is that of the keys in its block."""

    def __init__(self) -> None:
        self.pages = 0

    def __call__(self, engine: Engine) -> None:
        layers = {
            layer.impl.context.layer: layer for layer in engine.attention_layers(evicting=True)
        }
        (selector,) = next(iter(layers.values())).impl.context.hooks.before_attention
        size, dense = engine.block_size, selector.selection.dense_layers
        for number, manager in enumerate(engine.coordinator.single_type_managers):
            if number < dense or number not in layers:
                continue
            layer = layers[number]
            keys, _ = layer.impl._split(layer.kv_cache)
            for request in engine.scheduler.running:
                blocks = manager.req_to_blocks[request.request_id]
                full = [block.block_id for block in blocks[: request.num_computed_tokens // size]]
                held = torch.tensor([block for block in full if block])  # 0: freed
                if held.numel():
                    expected = selector.scorer.summarise(keys[held].float())
                    found = selector.summaries.rows[held]
                    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-5)
                    self.pages += held.numel()
