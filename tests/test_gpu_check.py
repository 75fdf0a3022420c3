# SPDX-License-Identifier: Apache-2.0
"""What of scripts/gpu_check.py can be tested without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_dry_run_prints_the_whole_plan(script: ModuleType, tmp_path: Path) -> None:
    result = run("--dry-run", "--json", str(tmp_path / "result.json"))
    assert result.returncode == 0, result.stderr
    *lines, total = result.stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == [stage.name for stage in script.STAGES]
    assert total.startswith(f"{len(script.STAGES)} stages, at most ")
    for runner, variable in (("v1", "0"), ("v2", "1")):
        for backend in ("FLASH_ATTN", "TRITON_ATTN"):
            for mode in ("eager", "graphs"):
                wanted = f"engine --backend {backend} --mode {mode} --runner {runner} "
                (line,) = [line for line in lines if wanted in line]
                assert f"VLLM_USE_V2_MODEL_RUNNER={variable} " in line
    assert not list(tmp_path.iterdir())


def test_only_chooses_by_the_beginning_of_a_name(script: ModuleType) -> None:
    result = run("--dry-run", "--only", "kernels", "throughput")
    names = [line.partition(" ")[0] for line in result.stdout.splitlines()[:-1]]
    assert names == ["kernels", "throughput-8k", "throughput-32k"]
    unknown = run("--dry-run", "--only", "kernel", "speed")
    assert unknown.returncode == 2
    assert "no stage begins with 'speed'; there are numerics" in unknown.stderr


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    result = run("--json", str(tmp_path / "result.json"))
    assert result.returncode == 1
    assert result.stderr.startswith("error: no CUDA device: PyTorch ")
    assert not list(tmp_path.iterdir())


def test_every_module_of_the_matrix_is_in_the_numerics(script: ModuleType) -> None:
    found = {path.name for path in (ROOT / "tests/ops/triton_matrix").glob("check_*.py")}
    assert found == {*script.MATRIX, "check_launch.py"}  # which needs no device


def test_stages_that_the_device_cannot_run(script: ModuleType) -> None:
    small = {"capability": [9, 0], "memory_gib": 23.6}
    reasons = {stage.name: script.lacking(stage, small) for stage in script.STAGES}
    skipped = {name for name, reason in reasons.items() if reason}
    measures = ("throughput", "capacity", "latency")
    assert skipped == {f"{measure}-{size}" for measure in measures for size in ("8k", "32k")}
    assert reasons["throughput-8k"] == "needs 120 GiB of device memory, this has 23.6"
    old = {"capability": [7, 5], "memory_gib": 80.0}
    assert all(script.lacking(stage, old) for stage in script.STAGES)


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("open(out, 'w').write('{\"a\": 1}')", "passed", None),
        ("print('the cause'); sys.exit(3)", "failed", "exit status 3"),
        ("open(out, 'w').write('none')", "failed", "bad result"),
        ("pass", "failed", "bad result"),
        ("print('the cause', flush=True); time.sleep(60)", "failed", "still running after 3 s"),
    ],
)
def test_a_stage_ends_in_one_of_two_ways(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    status: str,
    reason: str | None,
) -> None:
    def command(stage: object, output: Path) -> list[str]:
        return [sys.executable, "-c", f"import sys, time; out = {str(output)!r}; {code}"]

    monkeypatch.setattr(script, "command", command)
    # On a busy machine Python itself may take a second.
    limit = 3 if "sleep" in code else 60
    entry = script.run_stage(script.Stage("name", limit, ("anything",)), tmp_path)
    assert entry["status"] == status
    if reason is None:
        assert entry["result"] == {"a": 1}
    else:
        assert reason in entry["reason"]
        assert ("the cause" in entry["log"]) == ("the cause" in code)


@pytest.mark.parametrize("listens", [True, False])
def test_a_stage_is_asked_to_end_before_it_is_killed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    """So that a bench ends its engines, whose sessions are their own."""
    note = tmp_path / "ended"
    code = f"""
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path({str(note)!r}).touch()
    if {listens}:
        sys.exit(0)
signal.signal(signal.SIGTERM, end)
time.sleep(60)
time.sleep(60)
"""
    monkeypatch.setattr(script, "command", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr(script, "PATIENCE", 2)
    entry = script.run_stage(script.Stage("name", 3, ("anything",)), tmp_path)
    assert entry["status"] == "failed" and note.exists()
    assert (entry["seconds"] > 4.5) == (not listens)


def test_summary_of_the_numerics(script: ModuleType, tmp_path: Path) -> None:
    def summarise(*cases: str) -> dict[str, object]:
        path = tmp_path / "tests.xml"
        path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
        return script.summarise_tests(path)

    names = [name.removesuffix(".py") for name in script.MATRIX]
    good = [f'<testcase classname="tests.ops.triton_matrix.{name}" name="t"/>' for name in names]
    assert summarise(*good, good[0])["tests"] == dict.fromkeys(names, 1) | {names[0]: 2}
    bad = '<testcase classname="tests.ops.triton_matrix.check_mass" name="t"><{}/></testcase>'
    for wrong in ("failure", "error", "skipped"):
        with pytest.raises(RuntimeError, match=r"failed|skipped"):
            summarise(*good, bad.format(wrong))
    with pytest.raises(RuntimeError, match="ran"):
        summarise(*good[1:])


def test_bench_stages_are_commands_that_the_bench_takes(script: ModuleType, tmp_path: Path) -> None:
    """Parsed, planned and checked as the bench does it, up to the engines."""
    from vllm_pyramid.bench.options import parse
    from vllm_pyramid.bench.prepare import prepare
    from vllm_pyramid.cli import _build_parser

    stages = script.bench_stages()
    assert len(stages) == 6
    for stage in stages:
        line = script.command(stage, tmp_path / "result.out")
        assert line[1:3] == ["-m", "vllm_pyramid.cli"]
        args = _build_parser().parse_args(line[3:])
        options = parse(args.measure, vars(args))
        assert options.json_file == tmp_path / "result.out"
        prepared = prepare(options, tmp_path)
        job = prepared.job
        assert prepared.random and job.shape.layers == 32 and job.pool_bytes < 18e9
        labels = [variant.label for variant in prepared.variants]
        assert labels == ["stock", "full", "pyramidkv 12%"]
