# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid doctor`: what it finds is what is there, and what is broken becomes a line."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

from vllm_pyramid.compat.versions import vllm_version
from vllm_pyramid.kernels.cpu import library
from vllm_pyramid.tools.cli import main
from vllm_pyramid.tools.doctor import checks as doctor


def of_section(findings: list[doctor.Finding], section: str) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in findings if finding.section == section}


def test_what_it_finds_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    findings = [doctor.Finding(**row) for row in json.loads(capsys.readouterr().out)]
    assert status == int(any(finding.status == doctor.MISSING for finding in findings))
    assert list(dict.fromkeys(finding.section for finding in findings)) == list(doctor.CHECKS)
    of_vllm = of_section(findings, "vLLM")
    assert of_vllm["version"].value == vllm_version()
    assert of_vllm["torch"].value == metadata.version("torch")
    kernels = of_section(findings, "kernels")
    if kernels["C++ library"].status == doctor.OK:
        assert kernels["instruction set"].value.startswith(f"{library.current_isa()} of ")
        assert str(library.ABI_VERSION) in kernels["C++ library"].value
    extras = of_section(findings, "extras")
    assert "bench" in extras and "dev" not in extras
    assert extras["docs"].value == "installed" or "mkdocs" in extras["docs"].value


def test_what_does_not_work_with_a_policy(capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "examine", list)
    assert main(["doctor", "--kv-policy", "kcache"]) == 0
    out = capsys.readouterr().out
    assert "! does not work with --pipeline-parallel-size: V lies in host memory" in out
    assert "leave it out, or choose a policy without `values: host`" in out
    assert main(["doctor", "--kv-policy", "snapkv"]) == 0
    assert "works with: all that any policy works with" in capsys.readouterr().out
    ridge = ["--kv-policy-args", '{"values": "ridge"}']
    assert main(["doctor", "--kv-policy", "snapkv", *ridge]) == 0
    assert "does not work with a cache of 8-bit numbers" in capsys.readouterr().out
    assert main(["doctor", *ridge]) == 2
    assert "--kv-policy-args without --kv-policy" in capsys.readouterr().err
    assert main(["doctor", "--kv-policy", "nothing"]) == 2
    assert "unknown policy 'nothing'" in capsys.readouterr().err


def test_a_missing_library_counts_where_it_is_needed(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(tmp_path / "nothing.so"))
    library.load.cache_clear()
    try:
        for platform, status in (("cpu", doctor.MISSING), ("cuda", doctor.NOTE)):
            monkeypatch.setattr(doctor, "_platform", lambda platform=platform: platform)
            (finding,) = doctor.of_kernels()
            assert finding.status == status and "nothing.so" in finding.advice
        monkeypatch.setattr(doctor, "_platform", lambda: "cpu")
        monkeypatch.setenv("VLLM_PYRAMID_ALLOW_REFERENCE", "1")
        (finding,) = doctor.of_kernels()
        assert finding.status == doctor.NOTE
    finally:
        library.load.cache_clear()


def test_a_plugin_that_vllm_is_told_to_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    plugin = of_section(list(doctor.of_package()), "package")["plugin"]
    assert plugin.status == doctor.MISSING and "VLLM_PLUGINS" in plugin.value
    monkeypatch.setenv("VLLM_PLUGINS", "other,vllm_pyramid")
    assert of_section(list(doctor.of_package()), "package")["plugin"].status == doctor.OK


def test_companions_of_another_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files of a package: what is installed, and a module that fails as torchvision does."""
    (tmp_path / "torchvision").mkdir()
    code = 'raise RuntimeError("operator torchvision::nms does not exist\\nmore")'
    (tmp_path / "torchvision" / "__init__.py").write_text(code)
    (tmp_path / "torchvision-9.9.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: torchvision\nVersion: 9.9\n"
    (tmp_path / "torchvision-9.9.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(doctor, "COMPANIONS", ("torchvision", "not-there"))
    finding = of_section(list(doctor.of_vllm()), "vLLM")["torchvision"]
    assert finding.status == doctor.MISSING
    assert finding.value == "9.9 does not load: operator torchvision::nms does not exist"
    assert "pip uninstall torchvision" in finding.advice
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    assert "torchvision" not in of_section(list(doctor.of_vllm()), "vLLM")


def test_a_check_that_breaks_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(doctor, "CHECKS", {"GPU": broken})
    (finding,) = doctor.examine()
    assert finding == doctor.Finding(
        "GPU", "check", "failed", doctor.MISSING, "RuntimeError: no driver"
    )
