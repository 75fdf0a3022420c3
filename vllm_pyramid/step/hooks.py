# SPDX-License-Identifier: Apache-2.0
"""The hooks of methods that do more than score at an eviction.

Where they are called in a worker, from left to right in time:

    a step           begin_step                                             end_step, report
    each layer                  after_write  attend  after_attention  (evict)  after_eviction

(`write_values` before `after_write`, in layers whose V lies elsewhere.)

and in the scheduler: `arrived`, `took_step`, `evicted`, `report`, `finished`. All hooks do nothing
by default; a method overrides those it needs. Callers know no method by name.

A step is one call of the model, with tokens of several requests. The eviction between
`after_attention` and `after_eviction` is the worker's own (`attention/evict.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from vllm_pyramid.kv_cache.spec import LayerKVCacheSpec
    from vllm_pyramid.plan import IntArray, Plan, RetentionPlan
    from vllm_pyramid.step.attention_inputs import AttentionInputs, ValueWrite
    from vllm_pyramid.step.eviction_batch import EvictionBatch
    from vllm_pyramid.step.ranks import Ranks
    from vllm_pyramid.step.step import Step, WorkerRequest
    from vllm_pyramid.step.step_evictions import StepEvictions
    from vllm_pyramid.step.trace import TraceWriter


class CopyStream(Protocol):
    """A device's stream for copies, beside the one that the step's kernels are launched on.

    The host waits for neither.
    """

    def launch(self, copy: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
        """Let `copy` launch here, behind all that the step has launched so far.

        Returns:
            A mark, for `wait`.
        """

    def wait(self, mark: Any) -> None:
        """What the step launches from now on runs behind what was launched up to the mark."""


class HostMemory:
    """Memory of the host that the device addresses too.

    Attributes:
        bytes: `[n]` uint8, zeros, as the device sees them.
    """

    def __init__(self, num_bytes: int) -> None:
        import torch  # policies are read where it is not wanted

        with torch.inference_mode(False):
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8)
        # The system gives memory on the first touch: touch it now, not during a request.
        self.bytes.zero_()

    def release(self) -> None:
        """Nobody will use it any more."""


@dataclass
class WorkerSide:
    """What a method may know of the worker that it runs in.

    Attributes:
        config: vLLM's. device: of the cache and the attention.
        specs: of each layer's cache, from the bottom: `L = len(specs)`.
        block_size: tokens of the largest block; multiples of it end blocks in all layers.
        ranks: of the tensor-parallel group.
        model: gives the model, once it has been loaded.
        step: gives the current step.
        swap_space_bytes: `--kv-swap-space` in bytes; None where it was not given.
        may_wait: a context in which the host may wait for the device, whoever watches for that.
        host_memory: makes memory of the host, by its bytes.
        copies: of a device with a memory of its own; None where the host's is the device's.
        table: gives the current step's block table of a layer as its attention reads it, `[>= R,
            M]` int32; asked of layers and in steps whose tables exist.
    """

    config: VllmConfig
    device: torch.device
    specs: list[LayerKVCacheSpec]
    block_size: int
    ranks: Ranks
    model: Callable[[], torch.nn.Module]
    step: Callable[[], Step]
    swap_space_bytes: int | None = None
    allow_device_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    host_memory: Callable[[int], HostMemory] = HostMemory
    copies: CopyStream | None = None
    table: Callable[[int], torch.Tensor] | None = None

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.specs)


class WorkerHooks:
    """What a method does in a worker beside scoring.

    Attributes:
        name: under which `report` travels to the scheduler's hooks of the same name.
        trace: where kept positions are written; None where no trace was asked for.
        inside: whether it works for evictions inside the prompt alone.
    """

    name: str = ""
    inside: bool = False
    trace: TraceWriter | None = None

    def bytes_beside_block(self) -> int:
        """Device memory that each block of the cache takes beside its own."""
        return 0

    def bytes_beside_cache(self) -> int:
        """Device memory that `allocate` takes, however large the cache is."""
        return 0

    def before_profile(self) -> None:
        """The model exists, and vLLM is about to measure the memory of its largest step."""

    def limit_cache(self, num_bytes: int) -> int:
        """Bytes that the device's cache may have, of those that are there."""
        return num_bytes

    def allocate(self, num_blocks: int) -> None:
        """The cache will have so many blocks. May be called again: then what was is dropped."""

    def compile_kernels(self, call: AttentionInputs) -> None:
        """Compile what the other hooks launch, by a made-up call of one request with one query.

        Its table is of block 0, which is nobody's, and holds anything. It is called for all powers
        of two as `max_seq_len`, by which a kernel may be another one.
        """

    def value_cache(self, layer: int, key_cache: torch.Tensor) -> torch.Tensor | None:
        """V of a layer whose pages hold K alone, `[P, G, N, D]`; None where V is in its page.

        Args:
            key_cache: `[P, G, N, D]`, the layer's whole memory.
        """
        return None

    def without_graphs(self, requests: Iterable[WorkerRequest], computed: IntArray) -> bool:
        """Whether a step of these requests must run without CUDA graphs; asked before it begins.

        Args:
            requests: R records. computed: `[R]` tokens computed before the step; what they are
                behind a prompt does not matter.
        """
        return False

    def begin_step(self, step: Step) -> None:
        """A step begins; its skips and evictions are known."""

    def write_values(self, write: ValueWrite) -> None:
        """New tokens of a layer whose V lies elsewhere: write V, K has been written."""

    def after_write(self, layer: int, slots: torch.Tensor) -> None:
        """New tokens have been written to these slots, `[T]` int64; negative ones are padding."""

    def attend(self, call: AttentionInputs, out: torch.Tensor) -> bool:
        """Attend in place of the layer's attention; True if that was done. Written to `out`."""
        return False

    def after_attention(self, call: AttentionInputs) -> None:
        """The layer has attended; nobody has evicted in it."""

    def scores(self, batch: EvictionBatch) -> torch.Tensor | None:
        """Scores from what was gathered, as of `Scorer.scores`; None: the scorer gives them."""
        return None

    def moved(self, batch: EvictionBatch, kept: torch.Tensor) -> None:
        """Rows of the cache have moved: `kept` as of `ops.compact`."""

    def after_eviction(self, call: AttentionInputs, evictions: StepEvictions) -> None:
        """The layer has evicted from all requests whose lengths are known."""

    def end_step(self, step: Step) -> None:
        """All layers are done; what was evicted is about to be reported."""

    def report(self) -> Any | None:
        """What the scheduler's hooks are to hear of the step, as plain data; None: nothing."""
        return None

    def forget(self, request_id: str) -> None:
        """A request has finished."""


class SchedulerHooks:
    """What a method does in the scheduler.

    Attributes:
        name: of the worker's hooks whose reports come here.
    """

    name: str = ""

    def arrived(self, request_id: str, application: str, plan: Plan) -> dict[str, Any] | None:
        """A request has come; its plan may be replaced.

        Returns:
            None, or fields of the allocator that take the place of the policy's for this request;
            the workers are told.
        """
        return None

    def evicted(self, request_id: str, plan: Plan, resolved: RetentionPlan) -> None:
        """The worker has evicted from a request, whose plan was `plan`."""

    def took_step(self, report: Any, is_alive: Callable[[str], bool]) -> None:
        """The report of the worker's hooks on a step; of requests that have ended, too."""

    def finished(self, request_id: str) -> dict[str, Any]:
        """A request has ended: what its response says of it. It is forgotten."""
        return {}

    def totals(self) -> dict[str, int]:
        """Counters since the start, for the metrics."""
        return {}
