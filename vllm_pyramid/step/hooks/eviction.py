# SPDX-License-Identifier: Apache-2.0
"""Hooks of methods that take part in evictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_pyramid.step.hooks.worker import WorkerHooks

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from vllm_pyramid.plan import DeferredPlan
    from vllm_pyramid.step.attention_inputs import AttentionInputs
    from vllm_pyramid.step.eviction_batch import EvictionBatch
    from vllm_pyramid.step.step import StepEvictions


class EvictionHooks(WorkerHooks):
    """An eviction of several requests from one layer, step by step.

        score -> (select) -> before_compact -> (compact) -> after_compact   a batch of requests
        after_eviction                                                      all of a step's
        wants_scores -> take_scores                                         a batch of others

    Where the lengths of a plan are decided from the scores of all layers (a `DeferredPlan`), the
    worker scores each layer when it has attended, keeps scores and `evidence` until the last layer
    has attended, calls `decide`, and then selects and compacts all layers. With `together` it does
    so for as many layers at a time. KV heads with block tables of their own are layers here.

    Attributes:
        inside: the hooks score evictions inside prompts, not those at their ends and later.
        together: L, the layers in a row that share a part of the total; 0: all layers share it.
    """

    inside: bool = False
    together: int = 0

    def score(self, batch: EvictionBatch) -> torch.Tensor | None:
        """Return scores from what was gathered, as of `Scorer.scores`; None: the scorer scores.

        One method at most may override it for evictions inside prompts, and one for the others.
        """
        return None

    def before_compact(self, batch: EvictionBatch, kept: torch.Tensor) -> None:
        """Look at what survives, or change it, before it moves.

        Kept places may lie in blocks that other requests share, or find later as the full cache's.
        Write to them only for a policy without prefix caching (`unsupported`); others write behind
        the move (`after_compact`), to blocks that are this request's alone.

        `kept` are places that stay, as of `Ops.select`: `[S, G, K]` int32, -1 behind `batch.keeps`.
        """

    def after_compact(self, batch: EvictionBatch, kept: torch.Tensor) -> None:
        """Let pools follow the tokens, which have moved as of `Ops.compact`, or change these."""

    def after_eviction(self, inputs: AttentionInputs, evictions: StepEvictions) -> None:
        """Look at a layer that has evicted from all requests whose plans are not deferred."""

    def wants_scores(self, evictions: StepEvictions) -> StepEvictions | None:
        """Return requests of a step that are to be scored and not evicted; None: there are none.

        No request of the step is evicted then. Called where `take_scores` is overridden, by one
        method at most. A hook may have requests of its choice scored by these functions, too, and
        returns them as they are (`AnswerLevels`).
        """
        raise NotImplementedError

    def take_scores(self, batch: EvictionBatch, scores: torch.Tensor) -> None:
        """Take the scores of requests that `wants_scores` has returned, as of `Scorer.scores`.

        `batch` has them in one layer, or in several: a row for each layer and request.
        """

    def evidence(self, scores: torch.Tensor) -> torch.Tensor:
        """Return what a layer says about the lengths: `[S, ...]`, from this rank's KV heads.

        Called only where `decide` is overridden. `scores`, `[S, G, columns]`, are of the window,
        -inf behind each prompt's context.
        """
        raise NotImplementedError

    def decide(
        self, plans: Sequence[DeferredPlan], evidence: torch.Tensor
    ) -> Sequence[npt.NDArray[np.int64] | Exception]:
        """Return the tokens that each layer keeps of each request: S arrays `[L]`.

        An exception in the place of an array ends that request with an error; one that is raised
        ends all S. One method at most may override it. `evidence` is `[L, S, ...]`.
        """
        raise NotImplementedError
