# SPDX-License-Identifier: Apache-2.0
"""Measures the memory that code takes at once: PyTorch's on the CPU, and scratch of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from vllm_pyramid.kernels.cpu.library import most_scratch_bytes, scratch_bytes


@dataclass
class Peak:
    """The most bytes at once, in addition to those at the beginning.

    Attributes:
        tensors: by PyTorch's allocator, temporary ones inside its operators included.
        scratch: of the C++ kernels, whose threads keep it: only what they did not have before.
    """

    tensors: int = 0
    scratch: int = 0

    @property
    def bytes(self) -> int:
        return self.tensors + self.scratch


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure what the block takes; the result is filled in at its end."""
    peak = Peak()
    most_scratch_bytes()
    before = scratch_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    assert changes, "the profiler has seen no memory"
    held = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak.tensors = max(peak.tensors, held)
    peak.scratch = most_scratch_bytes() - before
