# SPDX-License-Identifier: Apache-2.0
"""Programs that are forked from a prepared process run as Python would run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plumbing.prepared import PreparedPopen, popen

# What a program can see of how it was started.
LOOK = """
import json, os, sys
import beside
print(json.dumps({
    "argv": sys.argv, "name": __name__, "folder": os.getcwd(), "own": os.environ.get("OWN"),
    "gone": os.environ.get("PYTEST_CURRENT_TEST"), "input": sys.stdin.read(),
    "leads": os.getsid(0) == os.getpgid(0) == os.getpid(), "beside": beside.PLACE,
}))
print("said", file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _run(*argv: str, **settings: Any) -> tuple[PreparedPopen, str, str]:
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = popen([sys.executable, *argv], text=True, **pipes, **settings)
    assert isinstance(process, PreparedPopen)
    output, errors = process.communicate("given", timeout=60)
    return process, output, errors


@pytest.mark.parametrize("how", ["-m", "-c", "script"])
def test_a_program_sees_what_it_was_started_with(tmp_path: Path, how: str) -> None:
    """Its arguments, variables, folder, input, session, and modules beside it."""
    (tmp_path / "look.py").write_text(LOOK)
    (other := tmp_path / "other").mkdir()
    for folder in (tmp_path, other):
        (folder / "beside.py").write_text(f"PLACE = {str(folder)!r}")
    script = str(tmp_path / "look.py")
    argv = {"-m": ["-m", "look"], "-c": ["-c", LOOK], "script": [script]}[how]
    variables = {**os.environ, "OWN": "1"}
    variables.pop("PYTEST_CURRENT_TEST")
    cwd = other if how == "script" else tmp_path
    process, output, errors = _run(*argv, "a", "b", env=variables, cwd=cwd)
    assert process.returncode == 0, errors
    seen = json.loads(output.splitlines()[0])
    assert seen == {
        "argv": ["-c" if how == "-c" else script, "a", "b"],
        "name": "__main__",
        "folder": str(cwd),
        "own": "1",
        "gone": None,
        "input": "given",
        "leads": True,
        "beside": str(tmp_path),
    }
    assert errors.splitlines()[0] == "said"


FORKS = """
import os
from vllm.utils.system_utils import get_mp_context
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
print(get_mp_context().get_start_method())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "method"), [({}, "fork"), ({"PYRAMID_TEST_SPAWN": "1"}, "spawn")]
)
def test_engines_processes_are_forked_unless_a_test_wants_a_users_start(variables, method) -> None:
    env = {**os.environ, **variables}
    pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = popen([sys.executable, "-c", FORKS], env=env, text=True, **pipes)
    output, errors = process.communicate(timeout=120)
    assert output.split()[-1] == method, errors
