# SPDX-License-Identifier: Apache-2.0
"""What a method may know of the worker that it runs in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config import VllmConfig

    from vllm_pyramid.step.ranks import Ranks
    from vllm_pyramid.step.step import Step


class LayerSpec(Protocol):
    """The KV cache of one layer.

    Attributes:
        layer_idx: index among the layers that evict, from the bottom.
        num_kv_heads: of this rank. head_size: numbers of a token's K, and of its V.
        dtype: of the numbers. block_size: tokens of a block. page_size_bytes: of a block.
    """

    @property
    def layer_idx(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def block_size(self) -> int: ...

    @property
    def page_size_bytes(self) -> int: ...


class CopyStream(Protocol):
    """A device's stream for copies, beside the step's kernels. The host waits for neither."""

    def launch(self, copy: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
        """Let `copy` launch behind all that the step has launched; return a mark for `wait`."""

    def wait(self, mark: Any) -> None:
        """Let all that the step launches from now on run behind what was launched up to `mark`."""

    def is_done(self, mark: Any) -> bool:
        """Return whether what was launched up to `mark` has run."""


class HostMemory:
    """Memory of the host that the device addresses, too: `[n]` uint8, zeros.

    `bytes` is it as the device sees it, `host` as the host does.
    """

    def __init__(self, num_bytes: int) -> None:
        import torch  # policies are read where it is not wanted

        with torch.inference_mode(False):
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8)
        # The system gives memory on the first touch: touch it now, not during a request.
        self.bytes.zero_()
        self.host = self.bytes

    def release(self) -> None:
        """Undo what makes the memory addressable, which is not used any more."""


@dataclass
class WorkerContext:
    """What a method may know of the worker that it runs in.

    Attributes:
        config: vLLM's. device: of the cache and the attention.
        specs: of each layer's cache, from the bottom: `L = len(specs)`.
        block_size: tokens of the largest block; multiples of it end blocks in all layers.
        ranks: of the tensor-parallel group.
        model: returns the model, once it has been loaded.
        step: returns the current step.
        swap_space_bytes: `--kv-swap-space` in bytes; None where it was not given.
        allow_device_sync: makes a context in which the host may wait for the device.
        host_memory: allocates memory of the host, by its bytes.
        copies: of a device with a memory of its own; None where the host's is the device's.
        table: returns the current step's block table of a layer as its attention reads it,
            `[>= R, M]` int32; None where attention reads vLLM's own tables.
        inside: the part works for evictions inside the prompt alone (`chunk`).
        tables_per_layer: block tables of a layer; its KV heads if each has one.
        whole_graphs: returns whether vLLM captures graphs of whole decode steps, which it decides
            before it allocates a cache.
        at_step_end: returns whether layers are evicted together, known once they are bound.
    """

    config: VllmConfig
    device: torch.device
    specs: Sequence[LayerSpec]
    block_size: int
    ranks: Ranks
    model: Callable[[], torch.nn.Module]
    step: Callable[[], Step]
    swap_space_bytes: int | None = None
    allow_device_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    host_memory: Callable[[int], HostMemory] = HostMemory
    copies: CopyStream | None = None
    table: Callable[[int], torch.Tensor] | None = None
    inside: bool = False
    tables_per_layer: int = 1
    whole_graphs: Callable[[], bool] = lambda: False
    at_step_end: Callable[[], bool] = lambda: False

    @property
    def num_layers(self) -> int:
        """L, the layers of this worker that evict."""
        return len(self.specs)
