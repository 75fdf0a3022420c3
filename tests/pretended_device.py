# SPDX-License-Identifier: Apache-2.0
"""A CUDA device that is not there: tensors that say they are on it, and what would wait for it.

    with PretendedDevice() as device:
        x = torch.zeros(3, device=device.device)  # on the host, and says that it is not
        x[torch.tensor([0])] = 1.0  # two waits: an index and a number of the host's
    assert device.waits == [...]

Numbers are computed on the host, so tests can read results (`data_of`). Operations on tensors of
two devices are refused as PyTorch refuses them; operations for which PyTorch waits for the device
(or copies pageable memory, which waits too) are recorded, with the line of this package that called
them.

The device's name is "meta", the only one apart from "cpu" that PyTorch knows in all of its builds.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
# Operations for which the host waits for a number of the device's.
_READS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"),
    *("_unique2", "unique_dim", "unique_consecutive", "bincount"),
}
_INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_"}


class DeviceTensor(torch.Tensor):
    """A tensor that claims to be on the device; `data_of` returns its numbers."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=DEVICE,
        )
        return made

    def __init__(self, data: torch.Tensor) -> None:
        self.on_host = data

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a pretended device's tensor outside of `PretendedDevice`")


def _caller() -> str:
    """Return the innermost line of this package on the stack."""
    for frame in reversed(traceback.extract_stack()):
        if "/vllm_pyramid/" in frame.filename:
            name = frame.filename.rpartition("/vllm_pyramid/")[2]
            return f"{name}: {frame.line}"
    return "the test"


class PretendedDevice(TorchDispatchMode):
    """Lets PyTorch's operations work on the device's tensors while it is entered.

    Attributes:
        waits: the operations that would have waited, each with its line.
    """

    device = DEVICE

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[str, str]] = []
        self._pin_memory: Any = None
        self._event: Any = None

    def __enter__(self) -> PretendedDevice:
        self._pin_memory = torch.Tensor.pin_memory
        torch.Tensor.pin_memory = _pinned  # type: ignore[assignment]
        self._event, torch.Event = torch.Event, ReadyAtOnce  # type: ignore[misc]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.pin_memory = self._pin_memory  # type: ignore[method-assign]
        torch.Event = self._event  # type: ignore[misc]
        super().__exit__(*error)

    def put(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor as one of the device; it shares the memory."""
        return DeviceTensor(data)

    def launch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` as a kernel, which accepts tensors of the device alone."""

        def launched(*args: Any, **kwargs: Any) -> Any:
            for value in _tensors((args, kwargs)):
                assert isinstance(value, DeviceTensor), f"{function.__name__} of a host's tensor"
            with torch.utils._python_dispatch._disable_current_modes():
                result = function(*_map(data_of, args), **_map(data_of, kwargs))
            return _map(lambda x: DeviceTensor(x) if isinstance(x, torch.Tensor) else x, result)

        return launched

    def _wait(self, what: str) -> None:
        self.waits.append((what, _caller()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        ours = [x for x in given if isinstance(x, DeviceTensor)]
        target = kwargs.get("device")
        on_device = bool(ours) if target is None else torch.device(target) == DEVICE
        if name == "scalar_tensor":  # a number that is assigned: on CUDA it is the host's at first
            on_device = False
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        is_pinned = kwargs.pop("pin_memory", False)
        self._check(name, given, ours, args, kwargs, moves=on_device != bool(ours))
        wrappers = {id(x.on_host): x for x in ours}
        result = func(*tree_map(data_of, args), **tree_map(data_of, kwargs))
        if not on_device:
            if is_pinned:
                result.is_pinned_here = True
            return result

        def back(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            found = wrappers.get(id(value))  # of what is written in place
            return DeviceTensor(value) if found is None else found

        return tree_map(back, result)

    def _check(
        self, name: str, given: list[Any], ours: list[Any], args: Any, kwargs: Any, moves: bool
    ) -> None:
        """Record what waits; `moves`: the result is not where the arguments are."""
        hosts = [x for x in given if not isinstance(x, DeviceTensor)]
        if name == "copy_":
            moves = isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor)
            if moves:
                non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
                if not (non_blocking and getattr(args[0], "is_pinned_here", False)):
                    self._check_copy(args[1], bool(non_blocking))
            return
        if moves and given:
            self._check_copy(given[0], bool(kwargs.get("non_blocking")))
            return
        if not ours:
            return
        if name in _READS or (name == "repeat_interleave" and "output_size" not in kwargs):
            self._wait(name)
        if name in _INDEXED:
            indices = [x for x in args[1] if x is not None]
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self._wait("an index of truth values")
            if any(not isinstance(x, DeviceTensor) for x in indices):
                self._wait("an index of the host's")
            if len(args) > 2 and not isinstance(args[2], DeviceTensor):
                self._wait("a number of the host's is assigned")
        elif any(x.dim() for x in hosts):
            raise RuntimeError(f"{name}: tensors of two devices, at {_caller()}")

    def _check_copy(self, source: Any, non_blocking: bool) -> None:
        if isinstance(source, DeviceTensor):
            self._wait("a copy to the host")
        elif not (non_blocking and getattr(source, "is_pinned_here", False)):
            self._wait("a copy of pageable memory")


class ReadyAtOnce:
    """An event of the device, which has computed everything when it is asked to.

    The thread that waits for a step's tokens waits for such an event, too: no wait of a step's.
    """

    def __init__(self, device: torch.device) -> None:
        self._recorded = False

    def record(self) -> None:
        self._recorded = True

    def synchronize(self) -> None:
        assert self._recorded, "an event that was never recorded"


def data_of(value: Any) -> Any:
    """Return the numbers of a tensor of the device, and anything else as it is."""
    return value.on_host if isinstance(value, DeviceTensor) else value


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    # Rows with gaps between them are copied through memory that is not.
    copy.is_pinned_here = tensor.is_contiguous()  # type: ignore[attr-defined]
    return copy


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply `change` to all items of tuples, dictionaries and records of kernels' arguments."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(change, x) for x in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_map(change, x) for x in value)
    if isinstance(value, dict):
        return {key: _map(change, x) for key, x in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        fields = {name: _map(change, getattr(value, name)) for name in value.__dataclass_fields__}
        return type(value)(**fields)
    return change(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            found.append(x)
        return x

    _map(note, value)
    yield from found
