# SPDX-License-Identifier: Apache-2.0
"""Build the source distribution and, from it, the wheel with the compiled kernels (`make wheel`).

    python scripts/build_wheel.py [--out dist]

One wheel serves Python 3.11 to 3.13. auditwheel checks that the versions of the C and C++ libraries
that it needs are those of its manylinux tag. A build without the library, or with one that needs
others, fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The version of the C library: 2.31 is that of Debian 11 and Ubuntu 20.04.
MANYLINUX = 31
PLATFORM = "VLLM_PYRAMID_WHEEL_PLATFORM"  # setup.py reads it
LIBRARY = "vllm_pyramid/kernels/cpu/_kernels.abi3.so"
NEEDED = (
    "vllm_pyramid/configs/pyramidkv.yaml",
    "vllm_pyramid/configs/grafana/dashboard.json",
    "vllm_pyramid/frontend/live_page/index.html",
    "vllm_pyramid/frontend/live_page/page.js",
    "vllm_pyramid/py.typed",
    "vllm_pyramid/tools/demo/model/model.safetensors",
)


def check_wheel(path: Path) -> None:
    """Check what a wheel holds.

    Raises:
        SystemExit: the compiled kernels or a file of the package are missing, or there is one that
            does not belong there.
    """
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
    missing = [name for name in (LIBRARY, *NEEDED) if name not in names]
    if missing:
        sys.exit(
            f"{path.name} lacks {', '.join(missing)}: look at the compiler's messages above; a "
            "C++17 compiler is needed"
        )
    foreign = [name for name in names if not name.startswith(("vllm_pyramid/", "vllm_pyramid-"))]
    if foreign:
        sys.exit(f"{path.name} holds {', '.join(sorted(foreign))}")


def check_tag(path: Path) -> None:
    """Check with auditwheel that a wheel runs where its tag says.

    Raises:
        SystemExit: it needs a newer system, or other libraries.
    """
    # The library chooses code for the processor that it finds, so sets beyond the baseline are
    # meant to be there.
    command = [sys.executable, "-m", "auditwheel", "show", "--disable-isa-ext-check", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    text = " ".join(done.stdout.split())
    found = re.search(r'following platform tag: "manylinux_2_(\d+)_(\w+)"', text)
    if done.returncode or found is None:
        sys.exit(f"auditwheel finds no tag for {path.name}:\n{done.stdout}{done.stderr}")
    if int(found[1]) > MANYLINUX or not path.name.endswith(f"_{found[2]}.whl"):
        sys.exit(
            f"{path.name} needs manylinux_2_{found[1]}_{found[2]}: build it on an older system"
        )


def main() -> None:
    """Build, check, tag."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    for old in args.out.glob("vllm_pyramid-*"):
        old.unlink()
    # The wheel is built from the source distribution, so that one lacks nothing either.
    subprocess.run(
        [
            *(sys.executable, "-m", "uv", "build", "--no-build-isolation"),
            *("--python", sys.executable, "--out-dir", str(args.out), str(ROOT)),
        ],
        env={**os.environ, PLATFORM: f"manylinux_2_{MANYLINUX}_{platform.machine()}"},
        check=True,
    )
    (wheel,) = args.out.glob("vllm_pyramid-*.whl")
    check_wheel(wheel)
    check_tag(wheel)
    print(*sorted(args.out.glob("vllm_pyramid-*")), sep="\n")


if __name__ == "__main__":
    main()
