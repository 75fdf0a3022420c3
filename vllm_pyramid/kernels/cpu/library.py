# SPDX-License-Identifier: Apache-2.0
"""The shared library of the C++ kernels (`csrc/cpu`, built by `setup.py`): find, load, call.

The library has a plain C ABI and no threads of its own. Two OpenMP runtimes in one process would
spin against each other, so the library receives the address of `GOMP_parallel` in the runtime that
PyTorch already uses (GNU's and LLVM's both have it) and shares that pool.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import zip_longest
from pathlib import Path

import torch

from vllm_pyramid.kernels.cpu.structs import RECORDS, parse_fields

logger = logging.getLogger(f"vllm.{__name__}")

ABI_VERSION = 15
ISA_VARIABLE = "VLLM_PYRAMID_CPU_ISA"
# Names another build of the library, such as the one of `make sanitize`.
LIBRARY_VARIABLE = "VLLM_PYRAMID_CPU_LIBRARY"
ISAS = ("amx", "avx512bf16", "avx512", "avx2", "portable")
# The code for AMX with its tiles in plain C++, for tests on processors without AMX.
EMULATED = "amx-emulated"
REBUILD = "rebuild it with `python setup.py build_ext --inplace`"


class LibraryError(RuntimeError):
    """Raised if the library is missing or unusable; the message says why and what to do."""


def _find() -> Path:
    if named := os.environ.get(LIBRARY_VARIABLE):
        if Path(named).is_file():
            return Path(named)
        raise ValueError(f"{LIBRARY_VARIABLE}={named}: there is no such file; unset it or build it")
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_kernels{suffix}"
        if path.exists():
            return path
    raise LibraryError(
        f"the C++ kernels were not built (no _kernels{EXTENSION_SUFFIXES[0]} in {folder}); install "
        "a C++17 compiler and reinstall vllm-pyramid, or run `python setup.py build_ext --inplace` "
        "in its source"
    )


def _openmp_paths() -> list[str]:
    """List the OpenMP runtimes to try: those mapped into this process first, PyTorch's foremost."""
    mapped: list[str] = []
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            path = line.partition("/")[2]
            name = path.rpartition("/")[2]
            if name.startswith(("libgomp", "libomp", "libiomp5")) and f"/{path}" not in mapped:
                mapped.append(f"/{path}")
    torch_folder = str(Path(torch.__file__).parent)
    mapped.sort(key=lambda path: not path.startswith(torch_folder))
    return [*mapped, "libgomp.so.1", "libomp.so.5"]


def _share_threads(library: ctypes.CDLL) -> None:
    for path in _openmp_paths():
        try:
            runtime = ctypes.CDLL(path)
            address = ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
        library.pyr_set_parallel(address)
        return
    logger.warning("Found no OpenMP runtime; the C++ kernels use one thread")


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library once and choose its instruction set.

    Raises:
        LibraryError: the library is missing or does not load, or its version or a field of its
            records differs from this package's.
        ValueError: `VLLM_PYRAMID_CPU_ISA` or `VLLM_PYRAMID_CPU_LIBRARY` names what is not there.
    """
    path = _find()
    try:
        library = ctypes.CDLL(str(path))
        library.pyr_abi_version.restype = ctypes.c_int64
        version = library.pyr_abi_version()
    except (OSError, AttributeError) as error:
        raise LibraryError(f"{path} does not load: {error}; reinstall vllm-pyramid") from error
    if version != ABI_VERSION:
        raise LibraryError(
            f"{path} has version {version} of the kernels' interface, this package needs "
            f"{ABI_VERSION}; {REBUILD}"
        )
    _check_records(library, path)
    library.pyr_last_error.restype = ctypes.c_char_p
    library.pyr_isa.restype = ctypes.c_char_p
    library.pyr_set_isa.argtypes = [ctypes.c_char_p]
    library.pyr_set_parallel.argtypes = [ctypes.c_void_p]
    library.pyr_set_parallel.restype = None
    library.pyr_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.pyr_read.restype = ctypes.c_double
    library.pyr_read_pages.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3
    library.pyr_read_pages.restype = ctypes.c_double
    library.pyr_shared_rows.restype = ctypes.c_int64
    _share_threads(library)
    _choose(library, os.environ.get(ISA_VARIABLE) or None)
    return library


def _check_records(library: ctypes.CDLL, path: Path) -> None:
    """Raise LibraryError unless the library's records are this package's, field by field."""
    for function in (library.pyr_record_size, library.pyr_record_fields):
        function.argtypes = [ctypes.c_char_p]
    library.pyr_record_size.restype = ctypes.c_int64
    library.pyr_record_fields.restype = ctypes.c_char_p
    for record in RECORDS:
        name = record.name
        text = library.pyr_record_fields(name.encode())
        if text is None:
            raise LibraryError(f"{path} has no record {name}; {REBUILD}")
        pairs = zip_longest(parse_fields(text.decode()), record.fields, fillvalue="nothing")
        for i, (theirs, ours) in enumerate(pairs):
            if theirs != ours:
                raise LibraryError(
                    f"{path} expects field {i} of {name} to be `{theirs}`, and this package packs "
                    f"`{ours}` there; {REBUILD}"
                )
        size = library.pyr_record_size(name.encode())
        if size != record.size:
            raise LibraryError(
                f"{path} takes {name} in {size} bytes, and this package packs the same fields "
                f"into {record.size}; {REBUILD}"
            )


def run(name: str, record: bytes) -> None:
    """Call `pyr_<name>` with a packed record; ValueError: values do not fit, says the kernel."""
    library = load()
    if getattr(library, f"pyr_{name}")(record):
        raise ValueError(library.pyr_last_error().decode())


def scratch_bytes() -> int:
    """Return the bytes of scratch memory that the threads of the kernels keep now."""
    return int(_scratch_bytes()(0))


def most_scratch_bytes() -> int:
    """Return the most scratch memory since the last call, and count anew from here."""
    return int(_scratch_bytes()(1))


def shared_rows() -> int:
    """Return the rows (token, head, layer, step) that have read shared pages together."""
    return int(load().pyr_shared_rows())


def _scratch_bytes() -> Callable[[int], int]:
    function = load().pyr_scratch_bytes
    function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
    return function


def _choose(library: ctypes.CDLL, isa: str | None) -> None:
    if library.pyr_set_isa(isa.encode() if isa else None):
        raise ValueError(f"{ISA_VARIABLE}: {library.pyr_last_error().decode()}")


def set_isa(isa: str | None) -> None:
    """Choose an instruction set of `ISAS`, or with None the best of this CPU; for tests."""
    _choose(load(), isa)


def isas() -> list[str]:
    """List the instruction sets that this CPU and build have, the best first; for tests."""
    library, before = load(), current_isa()
    found = [isa for isa in (*ISAS, EMULATED) if not library.pyr_set_isa(isa.encode())]
    set_isa(before)
    return found


def library_path() -> Path:
    """Return the library's file; LibraryError: it was not built."""
    return _find()


def current_isa() -> str:
    return load().pyr_isa().decode()
