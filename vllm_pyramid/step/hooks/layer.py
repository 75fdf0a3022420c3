# SPDX-License-Identifier: Apache-2.0
"""Hooks of methods that work in each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pyramid.step.hooks.worker import WorkerHooks

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.step.attention_inputs import AttentionInputs, CacheWrite


class LayerHooks(WorkerHooks):
    """The writes and the attention of each layer that evicts, in every step.

    All back ends call all of these. On CUDA the captured graph of a whole step leaves Python out,
    so a policy whose parts override them says that it `works_in_every_step`, `works_during_prompt`
    or `attends` (`Component`), or the engine refuses to start.

    Layers that read another layer's cache write nothing; they attend through the hooks of that
    layer, and it is evicted from behind the last of them.
    """

    def after_write(self, write: CacheWrite) -> None:
        """Take note of a layer's new tokens, which have just been written to the cache.

        Where V is in host memory apart from the device, V has not been written: the method that
        gave `value_cache` writes it here.
        """

    def before_attention(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return what the layer attends to: `inputs`, or others made from them.

        Others may have another table (also one for each KV head), lengths, queries that share rows
        otherwise, and the maxima that go with these; the queries and the caches are those of
        `inputs`. Tables that begin behind `offsets` have no further skips: where `inputs.shifted`,
        `skips` are zeros. Evictions and `after_attention` see the unchanged inputs, without a
        log-sum-exp, which is then of another attention.
        """
        return inputs

    def attend(self, inputs: AttentionInputs, out: torch.Tensor) -> bool:
        """Write the layer's attention to `out`, `[T, H, D]`, and return whether that was done.

        The first method that returns True has attended instead of the back end's kernel.
        """
        return False

    def after_attention(self, inputs: AttentionInputs) -> None:
        """Look at a layer that has attended, before the step evicts from it."""
