# SPDX-License-Identifier: Apache-2.0
"""All kernels of each back end: those that every policy uses, and those of single methods."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from vllm_pyramid.kernels import reference as shared_reference
from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.cpu import functions as shared_cpu
from vllm_pyramid.kernels.triton import functions as shared_triton
from vllm_pyramid.methods.accumulated.kernels import MassOps
from vllm_pyramid.methods.host_values.kernels import ValueOps
from vllm_pyramid.methods.observed_expected.kernels import ObservedExpectedOps
from vllm_pyramid.methods.pages.kernels import DevicePageOps, PageOps
from vllm_pyramid.methods.thinning.kernels import RecentOps

OWN: tuple[tuple[str, type], ...] = (
    ("vllm_pyramid.methods.accumulated.kernels", MassOps),
    ("vllm_pyramid.methods.host_values.kernels", ValueOps),
    ("vllm_pyramid.methods.observed_expected.kernels", ObservedExpectedOps),
    ("vllm_pyramid.methods.pages.kernels", PageOps),
    ("vllm_pyramid.methods.pages.kernels", DevicePageOps),
    ("vllm_pyramid.methods.thinning.kernels", RecentOps),
)
# Pages are chosen where the host looks at scores, or where it does not wait; the reference does
# both.
LACKED = {shared_cpu: DevicePageOps, shared_triton: PageOps}


def functions_of(contract: type) -> list[str]:
    """Return the names of a contract's functions."""
    return [name for name in dir(contract) if not name.startswith("_")]


def contracts_of(ops: ModuleType) -> list[tuple[type, Any, str]]:
    """Return each contract, the module of a back end that implements it, and each function."""
    modules = [(Ops, ops)]
    modules += [(own, ops.of_method(package)) for package, own in OWN if own != LACKED.get(ops)]
    return [(one, module, name) for one, module in modules for name in functions_of(one)]


def with_own(ops: ModuleType) -> Any:
    """Return a back end that has the kernels of single methods too."""
    found = SimpleNamespace(**{name: getattr(ops, name) for name in ops.__all__})
    for _, module, name in contracts_of(ops):
        setattr(found, name, getattr(module, name))
    return found


reference, cpu = with_own(shared_reference), with_own(shared_cpu)
triton_ops = with_own(shared_triton)
