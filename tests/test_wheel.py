# SPDX-License-Identifier: Apache-2.0
"""The wheel and the source distribution of `make wheel`, installed into empty environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.plumbing.server import serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
UV = (sys.executable, "-m", "uv")
VERSIONS = ("3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = sorted((ROOT / "dist").glob("vllm_pyramid-*.whl"))
    if not found:
        pytest.skip("run `make wheel` first: the kernels take minutes to compile")
    assert len(found) == 1, found
    return found[0]


def run(*command: str | Path, fails: bool = False) -> str:
    """What a command prints, outside of this checkout; the package is the installed one."""
    left_out = ("PYTHONPATH", "VLLM_PYRAMID_CPU_LIBRARY")
    done = subprocess.run(
        [str(word) for word in command],
        cwd="/",
        env={name: value for name, value in os.environ.items() if name not in left_out},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert (done.returncode != 0) == fails, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def environment(folder: Path, version: str) -> Path:
    """The interpreter of a new environment."""
    found = subprocess.run(
        [*UV, "python", "find", "--no-python-downloads", "--system", version],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        pytest.skip(f"there is no Python {version} here")
    run(*UV, "venv", "--quiet", "--python", found.stdout.strip(), folder)
    return folder / "bin" / "python"


def findings(python: Path, fails: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """What the installed `vllm-pyramid doctor` says, by section and name."""
    printed = run(python.with_name("vllm-pyramid"), "doctor", "--json", fails=fails)
    rows = json.loads(printed[printed.index("[\n") :])
    return {(row["section"], row["name"]): row for row in rows}


@pytest.mark.cpu
def test_the_wheel_serves_every_python(wheel: Path) -> None:
    assert "-cp311-abi3-manylinux_2_" in wheel.name
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert all(name.startswith(("vllm_pyramid/", "vllm_pyramid-")) for name in names), "no lab/"
    libraries = [name for name in names if name.endswith(".so")]
    assert libraries == ["vllm_pyramid/kernels/cpu/_kernels.abi3.so"]
    tracked = subprocess.run(
        ["git", "ls-files", "vllm_pyramid", "configs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    for path in tracked:
        if not path.endswith("README.md"):
            assert path.replace("configs/", "vllm_pyramid/configs/", 1) in names, path


@pytest.mark.cpu
def test_the_source_distribution_can_be_built_and_tested(wheel: Path) -> None:
    (source,) = (ROOT / "dist").glob("vllm_pyramid-*.tar.gz")
    with tarfile.open(source) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = ("csrc/cpu/abi.h", "setup.py", "Makefile", "scripts/build_wheel.py", "LICENSE")
    for path in (*needed, "tests/test_wheel.py", "examples/explore.ipynb", "docs/index.md"):
        assert path in names, path
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


@pytest.mark.cpu
@pytest.mark.parametrize("version", VERSIONS)
def test_an_empty_environment(wheel: Path, version: str, tmp_path: Path) -> None:
    """Without vLLM the commands that need none work, and `doctor` says what is missing."""
    python = environment(tmp_path / "env", version)
    install = (*UV, "pip", "install", "--quiet", "--python", python, wheel)
    done = subprocess.run([str(word) for word in install], capture_output=True, text=True)
    if done.returncode and "error sending request" in done.stderr:
        pytest.skip("the packages that it needs cannot be fetched here")
    assert done.returncode == 0, done.stderr
    found = findings(python, fails=True)
    assert found["vLLM", "version"]["status"] == "missing"
    assert "vllm-pyramid[cuda]" in found["vLLM", "version"]["advice"]
    assert found["package", "plugin"]["status"] == "ok"
    assert [row for row in found.values() if row["status"] == "missing"] == [
        found["vLLM", "version"]
    ]
    assert "pyramidkv" in run(python.with_name("vllm-pyramid"), "policies", "--json")
    budgets = ("budgets", "--num-layers", "4", "--prompt-len", "1000", "--json")
    assert json.loads(run(python.with_name("vllm-pyramid"), *budgets))["num_layers"] == 4


@pytest.fixture(scope="module")
def with_vllm(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and behind it the packages of this one, vLLM included."""
    folder = tmp_path_factory.mktemp("with-vllm") / "env"
    version = ".".join(map(str, sys.version_info[:2]))
    python = environment(folder, version)
    run(*UV, "pip", "install", "--quiet", "--no-deps", "--python", python, wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    behind = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "behind.pth").write_text(f"{behind}\n")
    return python


@pytest.mark.cpu
def test_with_the_vllm_of_this_environment(with_vllm: Path) -> None:
    """The library of the wheel is loaded, and an engine can start."""
    found = findings(with_vllm, fails=False)
    folder = str(with_vllm.parents[1])
    assert folder in found["package", "vllm-pyramid"]["value"]
    library = found["kernels", "C++ library"]["value"]
    assert folder in library and "_kernels.abi3.so" in library
    assert "of " in found["kernels", "instruction set"]["value"]
    assert found["vLLM", "build"]["value"]


@pytest.mark.engine
def test_server_and_client_of_the_wheel(with_vllm, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Path(run(with_vllm.with_name("vllm-pyramid"), "model", "built-in").strip())
    assert with_vllm.parents[1] in model.parents
    flags = ("--kv-policy", "auto", "--kv-budget", "64", "--enforce-eager", "--max-model-len")
    command = (str(with_vllm), "-m", "vllm.entrypoints.cli.main", "serve")
    with serving(
        model,
        *(*flags, "1024", "--kv-cache-memory-bytes", str(64 << 20)),
        log=tmp_path / "log",
        command=command,
        unset=("PYTHONPATH",),
        fresh=True,
    ) as server:
        body = {"model": str(model), "prompt": "One two three four. " * 60, "max_tokens": 4}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            report = json.loads(answer.read())["kv_transfer_params"]
    assert report["blocks_after"] < report["blocks_before"]
