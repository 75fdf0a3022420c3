# SPDX-License-Identifier: Apache-2.0
"""All kernels compile for sm_80, sm_90 and sm_100 without a GPU, and none spills registers."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.kernels.processes import ROOT, run_python


def kernel_names() -> set[str]:
    """Return the name of every `*_kernel` of the package, those of single methods included."""
    package = ROOT / "vllm_pyramid"
    return {
        node.name
        for path in (*package.glob("kernels/triton/*.py"), *package.glob("methods/*/kernels/*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }


@pytest.mark.cpu
@pytest.mark.slow
def test_main_configuration_compiles_without_spills(tmp_path: Path) -> None:
    command = ["scripts/compile_triton.py", "--json", str(tmp_path / "usage.json")]
    status, out, errors = run_python(*command, unset="TRITON_INTERPRET")
    print(out)
    assert status == 0, out + errors
    usages = json.loads((tmp_path / "usage.json").read_text())
    compiled = {(usage["kernel"], usage["arch"]) for usage in usages}
    assert compiled == {(name, arch) for name in kernel_names() for arch in (80, 90, 100)}
    assert all(usage["spill_bytes"] == 0 for usage in usages)
