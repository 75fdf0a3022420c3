# SPDX-License-Identifier: Apache-2.0
"""Seeded requests whose prompts come in chunks, on the CPU.

A step that ends in the middle of a prompt samples a token that is thrown away, and vLLM turns the
request's generator back, so that a seed gives the same text however the prompt was cut. It does so
by the generator's offset, which only CUDA's have: on the CPU the same line raises, and ends the
engine. Here the generator's whole state is kept and put back instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def install() -> None:
    """Put the wrappers in place. Idempotent.

    Target: `CPUModelRunner._sample` and `_bookkeeping_sync` (inherited). Remove when vLLM turns
    generators back without `set_offset` on the CPU.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "_sample" in vars(CPUModelRunner):
        return
    sample, bookkeeping = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    def discarded(runner: Any) -> list[int]:
        """Rows whose sampled token is thrown away and that have a generator of their own."""
        generators = runner.input_batch.generators
        if not generators:
            return []
        mask = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        return [row for row in np.flatnonzero(mask).tolist() if row in generators]

    def sample_and_turn_back(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        states = {row: generators[row].get_state() for row in discarded(self)}
        output = sample(self, *args, **kwargs)
        for row, state in states.items():
            generators[row].set_state(state)
        return output

    def bookkeeping_without_offsets(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        hidden = {row: generators.pop(row) for row in discarded(self)}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    CPUModelRunner._sample = sample_and_turn_back
    CPUModelRunner._bookkeeping_sync = bookkeeping_without_offsets
