# SPDX-License-Identifier: Apache-2.0
"""Seeded requests whose prompts are computed in chunks, on the CPU.

A step that ends inside a prompt samples a token that is discarded, and vLLM resets the request's
generator, so that a seed gives the same text whatever the chunks. It resets the generator's offset,
which only CUDA's generators have: on the CPU that error ends the engine. Here the generator's whole
state is saved and restored instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_pyramid.compat.wrap import wrap


def install() -> None:
    """Wrap `CPUModelRunner._sample` and `_bookkeeping_sync` (inherited). Idempotent."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def discarded_rows(runner: Any) -> list[int]:
        """Return the rows with a generator of their own whose sampled token is discarded."""
        generators = runner.input_batch.generators
        if not generators:
            return []
        mask = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        return [row for row in np.flatnonzero(mask).tolist() if row in generators]

    def sample_and_restore(sample: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        states = {row: generators[row].get_state() for row in discarded_rows(self)}
        output = sample(self, *args, **kwargs)
        for row, state in states.items():
            generators[row].set_state(state)
        return output

    def bookkeeping_without_offsets(bookkeeping: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        removed = {row: generators.pop(row) for row in discarded_rows(self)}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            generators.update(removed)

    wrap(CPUModelRunner, "_sample", sample_and_restore)
    wrap(CPUModelRunner, "_bookkeeping_sync", bookkeeping_without_offsets)
