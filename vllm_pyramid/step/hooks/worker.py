# SPDX-License-Identifier: Apache-2.0
"""The hooks that a part of a policy may have in a worker: four protocols and their base."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from vllm_pyramid.plan import DeferredPlan, IntArray
    from vllm_pyramid.step.attention_inputs import AttentionInputs, CacheWrite
    from vllm_pyramid.step.eviction_batch import EvictionBatch
    from vllm_pyramid.step.step import Step, StepEvictions, StepLayout, WorkerRequest
    from vllm_pyramid.step.trace import TraceWriter


class WorkerHooks:
    """What one part of a policy does in a worker: the base of the four protocols.

    Attributes:
        name: of the method; `SchedulerHooks` of the same name receive its reports.
        trace: writes kept positions; None without a trace.
        asks_ranks: whether a call of these hooks asks the other tensor-parallel ranks
            (`WorkerContext.ranks`), which may wait inside it where it raises in one: the worker
            then ends.
    """

    name: str = ""
    trace: TraceWriter | None = None
    asks_ranks: ClassVar[bool] = False

    def may_fail(self, step: Step) -> bool:
        """Return whether a request may have failed in a step because of these hooks.

        The ranks then tell one another, so all of them must return the same. Asked at the end of a
        step, of hooks that work in steps without evictions.
        """
        return True

    @property
    def label(self) -> str:
        """What messages call the method."""
        return self.name or type(self).__qualname__


class CacheHooks(WorkerHooks):
    """Memory next to the KV cache: its size, its allocation, and what keeps it consistent.

    A pool is memory with a place for every block of the cache. What a pool holds of a block must
    follow the block: `copy_blocks` tells of every copy, `EvictionHooks.after_compact` of every
    token that moves. A block that is given to another request is not announced: `after_write` sees
    each of its tokens before any token is read.
    """

    def bytes_per_block(self) -> int:
        """Return the bytes of device memory that a pool adds to each block of the cache."""
        return 0

    def bytes_of_buffers(self) -> int:
        """Return the bytes of device memory that `allocate` takes whatever the cache's size is."""
        return 0

    def before_profile(self) -> None:
        """Prepare the model, which exists, for the step by which vLLM measures its memory."""

    def limit_cache(self, num_bytes: int) -> int:
        """Return how many of the `num_bytes` that are free the device's KV cache may take.

        ValueError: the method cannot work with a cache of that size.
        """
        return num_bytes

    def allocate(self, num_blocks: int) -> None:
        """Allocate pools for a cache of `num_blocks`, in place of those of an earlier call."""

    def value_cache(self, layer: int, key_cache: torch.Tensor) -> torch.Tensor | None:
        """Return V of a layer whose pages hold K alone, `[P, G, N, D]`; None: another keeps it.

        Called for layers whose V the policy's `values` do not keep on the device. `key_cache`, `[P,
        G, N, D]`, is the whole memory of the layer.
        """
        return None

    def compile_kernels(self, inputs: AttentionInputs) -> None:
        """Launch what the other hooks launch, so that no request waits for a compiler.

        Called once for each kind of layer and each power of two as `max_seq_len`, on devices that
        compile kernels. `inputs` are of one made-up request with one query. Its table is of block
        0, vLLM's null block, which may be written to: no request reads it.
        """

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy what pools hold of the blocks `sources` to the blocks `targets`, `[n]` int64 on the
        device.

        Called right behind every copy that the engine makes of blocks (prefixes that an eviction
        would overwrite, sessions that branch). A block may be among both: all sources are read
        before a target is written.
        """

    def block_extras(self) -> torch.Tensor | None:
        """Return the pool that goes with its blocks to the host cache and back; None: none does.

        It is `[P, ...]`, of as many bytes for each block as the part says
        (`Component.block_extras`); of any shape before `allocate`. A method with a pool that stays
        behind is refused next to a host cache.
        """
        return None


@dataclass(frozen=True)
class StepNeeds:
    """What a method asks of a step.

    Attributes:
        wants_log_sum_exp: attention writes its log-sum-exp, on back ends that can.
        layout: the tokens that each layer computes, where layers differ; None: all of the step's.
    """

    wants_log_sum_exp: bool = False
    layout: StepLayout | None = None


class StepHooks(WorkerHooks):
    """The beginning and the end of each step, and the end of each request."""

    def without_graphs(self, requests: Iterable[WorkerRequest], computed: IntArray) -> bool:
        """Return whether a step of these R requests must run without CUDA graphs.

        Called before the step begins, when vLLM chooses its graph. `computed`, `[R]`, are tokens
        computed before the step; behind a prompt the numbers may be any.
        """
        return False

    def begin_step(self, step: Step) -> StepNeeds | None:
        """Prepare a step, whose skips and evictions are known, and return what it needs.

        The step itself is not to be changed. Not called for steps without requests.
        """
        return None

    def end_step(self, step: Step) -> Any | None:
        """Return the report of a step whose layers have all run, as plain data; None: no report.

        The report reaches `SchedulerHooks.on_step_report` of the hooks with the same `name`, before
        what was evicted is reported. A step without requests ends, too, and its report is dropped.
        """
        return None

    def forget(self, request_id: str) -> None:
        """Forget a request, which has finished, was preempted, or comes again with a new plan."""


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
