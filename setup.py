# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ CPU kernels; everything else about the package is in pyproject.toml.

`vllm_pyramid/kernels/cpu/_kernels` is a plain shared library with a C ABI (csrc/cpu/abi.h), loaded
with ctypes: no PyTorch or Python headers are needed, and an isolated build environment is enough.
Its units are compiled for different instruction sets, of which one is chosen when it is loaded.
It names nothing of Python's, so one wheel serves all supported versions (`cp311-abi3`).
Without a compiler the package installs all the same, for CUDA devices; on the CPU an engine with a
policy then refuses to start.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCE = Path("csrc/cpu")
DISPATCH = "runtime"  # chooses an instruction set among those that were compiled
BASELINE = [
    *(DISPATCH, "attention", "key_mass", "recent_mass", "topn", "scores", "select", "pages"),
    *("cache_ops", "observed_expected", "future_queries"),
    "kernels_portable",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
X86_FLAGS = {
    "kernels_avx2": AVX2,
    "kernels_avx512": AVX512,
    "kernels_avx512bf16": [*AVX512, "-mavx512bf16"],
    "kernels_amx_emulated": [*AVX512, "-mavx512bf16"],
}
AMX = ("kernels_amx", [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"])
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-sign-compare",
    "-Wno-maybe-uninitialized",  # false alarms inside the compiler's own intrinsics
    "-Wno-uninitialized",
]


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64") and sys.maxsize > 2**32


def build_jobs() -> int:
    """Return how many compilers run at once: `MAX_JOBS`, else one for each core there is."""
    if jobs := os.environ.get("MAX_JOBS"):
        return max(int(jobs), 1)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class BuildKernels(build_ext):
    """Compiles each unit with its own flags; a failure is a warning, never a failed install.

    pip shows no warnings of a build, so the engine reports it too (`kernels.get_ops`).
    """

    def build_extension(self, ext: Extension) -> None:
        if self._is_in_place(ext):
            return
        try:
            self._build(ext)
        except Exception as error:  # the compiler classes raise a dozen kinds
            self.warn(
                f"the C++ kernels were not built ({error}): on a CPU an engine with a KV policy "
                "will refuse to start; CUDA devices need none of them. Install a C++17 compiler "
                "(g++ or clang++) and reinstall vllm-pyramid to mend it."
            )

    def _is_in_place(self, ext: Extension) -> bool:
        """Whether an editable installation finds the library built already.

        scripts/setup_env.sh builds it while packages come.
        """
        if self.force or not self.editable_mode:
            return False
        made = Path(self.get_ext_filename(ext.name))
        sources = map(Path, (*ext.sources, *ext.depends, __file__))
        return made.exists() and made.stat().st_mtime > max(s.stat().st_mtime for s in sources)

    def _build(self, ext: Extension) -> None:
        flags = {name: list[str]() for name in BASELINE}
        macros: list[tuple[str, str | None]] = []
        if is_x86():
            flags |= X86_FLAGS
            macros.append(("PYR_X86", "1"))
        extra = os.environ.get("VLLM_PYRAMID_CXXFLAGS", "").split()

        def compile_unit(name: str, unit_flags: Sequence[str]) -> list[str]:
            objects: list[str] = self.compiler.compile(
                [str(SOURCE / f"{name}.cpp")],
                output_dir=self.build_temp,
                macros=list(macros),
                depends=ext.depends,
                extra_postargs=[*COMMON_FLAGS, *unit_flags, *extra],
            )
            return objects

        with ThreadPoolExecutor(build_jobs()) as pool:
            # Those with the most instruction sets take the longest and start first.
            amx = pool.submit(compile_unit, *AMX) if is_x86() else None
            names = [name for name in reversed(flags) if name != DISPATCH]
            units = [pool.submit(compile_unit, name, flags[name]) for name in names]
            objects: list[str] = []
            if amx is not None:
                try:
                    objects += amx.result()
                    macros.append(("PYR_AMX", "1"))
                except CompileError:  # before GCC 11 and Clang 12
                    self.warn("this compiler knows no AMX: attention will run without it")
            objects += compile_unit(DISPATCH, flags[DISPATCH])
            for unit in units:
                objects += unit.result()
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        self.compiler.link_shared_object(
            objects, str(fresh), extra_postargs=extra, target_lang="c++"
        )
        os.replace(fresh, target)

    def get_ext_filename(self, fullname: str) -> str:
        """Name the library for all versions of Python, but for builds in place.

        Environments of one checkout may have several, which are then built by compilers of their
        own.
        """
        if self.inplace or self.editable_mode:
            return super().get_ext_filename(fullname)
        return self._name_in_wheel(fullname)

    def _name_in_wheel(self, fullname: str) -> str:
        return f"{fullname.replace('.', os.sep)}.abi3.so"

    def copy_extensions_to_source(self) -> None:
        # A running process may have the old library mapped: replace the file, never write into it.
        for ext in self.extensions:
            # While it builds, setuptools says that a build in place is none.
            name = self._name_in_wheel(ext.name)
            if self.editable_mode:
                name = self.get_ext_filename(ext.name)
            built = Path(self.build_lib) / name
            if not built.exists():
                continue
            target = Path(self.get_finalized_command("build_py").get_package_dir("")) / (
                self.get_ext_filename(ext.name)
            )
            fresh = target.with_name(f"{target.name}.{os.getpid()}.tmp")
            shutil.copyfile(built, fresh)
            os.replace(fresh, target)


class Wheel(bdist_wheel):
    """A wheel for every supported Python, where it holds the library."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of the wheel's name; scripts/build_wheel.py sets and checks the last."""
        _, _, platform_name = super().get_tag()
        return "cp311", "abi3", os.environ.get("VLLM_PYRAMID_WHEEL_PLATFORM") or platform_name


setup(
    ext_modules=[
        Extension(
            "vllm_pyramid.kernels.cpu._kernels",
            sources=sorted(str(path) for path in SOURCE.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCE.glob("*.h")),
            optional=True,
        )
    ],
    cmdclass={"bdist_wheel": Wheel, "build_ext": BuildKernels},
)
