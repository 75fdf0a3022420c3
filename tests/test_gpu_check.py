# SPDX-License-Identifier: Apache-2.0
"""What of scripts/gpu_check.py can be tested without a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
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
                found = [line for line in lines if wanted in line]
                line, *fp8 = found
                assert ["--kv-cache-dtype fp8" in one for one in found] == [
                    False,
                    *[True] * len(fp8),
                ]
                assert len(fp8) == ((runner, mode) == ("v2", "graphs"))
                assert f"VLLM_USE_V2_MODEL_RUNNER={variable} " in line
        for backend, dtype in (("TRITON_ATTN", "float32"), ("FLASH_ATTN", "bfloat16")):
            wanted = f"gpu_thinning.py --backend {backend} --dtype {dtype} "
            found = [line for line in lines if wanted in line]
            assert len([line for line in found if f"_RUNNER={variable} " in line]) == 1
    assert not list(tmp_path.iterdir())


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    result = run("--json", str(tmp_path / "result.json"))
    assert result.returncode == 1
    assert result.stderr.startswith("error: no CUDA device: PyTorch ")
    assert not list(tmp_path.iterdir())


def test_every_module_of_the_matrix_is_in_the_numerics(script: ModuleType) -> None:
    found = {path.name for path in (ROOT / "tests/kernels/triton_matrix").glob("check_*.py")}
    assert found == {*script.MATRIX, "check_launch.py"}  # which needs no device


def test_stages_that_the_device_cannot_run(script: ModuleType) -> None:
    small = {"capability": [9, 0], "memory_gib": 23.6, "devices": 1}
    reasons = {stage.name: script.lacking(stage, small) for stage in script.STAGES}
    skipped = {name for name, reason in reasons.items() if reason}
    assert skipped == {*(stage.name for stage in script.STAGES if stage.measures), "start-tp2"}
    assert len(skipped) == 13
    assert reasons["start-tp2"] == "needs 2 devices, here are 1"
    assert reasons["throughput-8k"] == "needs 70 GiB of device memory, this has 23.6"
    old = {"capability": [7, 5], "memory_gib": 80.0, "devices": 2}
    assert all(script.lacking(stage, old) for stage in script.STAGES)


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
    monkeypatch.setattr("gpu_processes.PATIENCE", 2)
    entry = script.run_stage(script.Stage("name", 3, ("anything",)), tmp_path)
    assert entry["status"] == "failed" and note.exists()
    assert (entry["seconds"] > 4.5) == (not listens)


def test_summary_of_the_numerics(script: ModuleType, tmp_path: Path) -> None:
    def summarise(*cases: str) -> dict[str, object]:
        path = tmp_path / "tests.xml"
        path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
        return script.summarise_tests(path)

    names = [name.removesuffix(".py") for name in script.MATRIX]
    good = [
        f'<testcase classname="tests.kernels.triton_matrix.{name}" name="t"/>' for name in names
    ]
    assert summarise(*good, good[0])["tests"] == dict.fromkeys(names, 1) | {names[0]: 2}
    bad = '<testcase classname="tests.kernels.triton_matrix.check_mass" name="t"><{}/></testcase>'
    for wrong in ("failure", "error", "skipped"):
        with pytest.raises(RuntimeError, match=r"failed|skipped"):
            summarise(*good, bad.format(wrong))
    with pytest.raises(RuntimeError, match="ran"):
        summarise(*good[1:])


@pytest.mark.parametrize("memory_gib", [78.0, 139.8])
def test_bench_stages_are_commands_that_the_bench_takes(script, tmp_path, memory_gib) -> None:
    """Parsed, planned and checked as the bench does it, up to the engines; they find room."""
    from vllm_pyramid.tools.bench.options import MEASURES, parse
    from vllm_pyramid.tools.bench.prepare import prepare
    from vllm_pyramid.tools.bench.processes import gpu_share
    from vllm_pyramid.tools.cli import _build_parser

    device = {"capability": [9, 0], "memory_gib": memory_gib, "devices": 1}
    labels = {}
    stages = [stage for stage in script.STAGES if stage.arguments[:1] == ("bench",)]
    for stage in stages:
        assert script.lacking(stage, device) is None
        line = script.command(script.fitted(stage, memory_gib), tmp_path / "result.out")
        assert line[1:3] == ["-m", "vllm_pyramid.tools.cli"]
        args = _build_parser().parse_args(line[3:])
        options = parse(MEASURES[args.measure], vars(args))
        assert options.json_file == tmp_path / "result.out"
        prepared = prepare(options, tmp_path)
        job, shape = prepared.job, prepared.job.shape
        assert prepared.random
        weights = 2 * (
            2 * shape.vocabulary * shape.hidden
            + shape.layers
            * shape.hidden
            * (3 * shape.mlp + 2 * (shape.heads + shape.kv_heads) * shape.head_size)
        )
        block = max(map(job.block_bytes, prepared.variants))  # halves with 8-bit caches
        pool = job.pool_bytes * block // shape.block_bytes
        share = gpu_share(len(prepared.variants)) * memory_gib * 2**30
        assert weights + pool + 3 * 2**30 < share, stage.name
        labels[stage.name] = [variant.label for variant in prepared.variants]
    assert labels["throughput-auto-1k"] == ["stock", "auto 12%"]
    three = ["stock", "full", "pyramidkv 12%"] if memory_gib > 120 else ["stock", "pyramidkv 12%"]
    assert labels["decode-8k"] == labels["throughput-32k"] == three
    assert labels["decode-select-128k"] == ["stock", "select"]


# What a stage writes, as far as the table looks at it.
RESULTS = {
    "kernels": {"rows": [{"share_of_copy_bandwidth": 0.8123}]},
    "engine": {"blocks_in_decode": {"pyramidkv": 30, "full": 200}},
    "thinning": {"blocks_in_decode": {"thins": 77}},
    "start": {"blocks": {"full": 4321}},
    "sync": {"blocks": {"full": 4321}},
    "host": {"v_bytes_read_per_token": {"kcache": 8192}},
    "throughput": {"rows": [{"policy": "auto", "output_ratio": 1.4567, "decode_ratio": None}]},
    "decode": {"rows": [{}, {"policy": "select", "output_ratio": None, "decode_ratio": 2.5}]},
    "http": {"rows": [{"variant": "auto", "speed_ratio": 1.25}]},
    "fp8": {"rows": [{"variant": "auto", "speed_ratio": 1.5}]},
}


def test_all_of_it_on_a_device_that_is_not_there(script, tmp_path, monkeypatch, capsys) -> None:
    """Each stage has a stand-in; one fails, one cannot start, and the others run all the same."""
    device = {
        "name": "Pretended",
        "capability": [9, 0],
        "memory_gib": 141.0,
        "devices": 1,
        "driver": "none",
        "versions": {"vllm": "0.32.0"},
    }

    def command(stage: Any, output: Path) -> list[str]:
        if stage.name == "start-own-core":
            return [str(tmp_path / "no such program")]
        code = "import sys; sys.exit('a fault')"
        if stage.name == "numerics":
            cases = "".join(
                f'<testcase classname="{name.removesuffix(".py")}" name="t"/>'
                for name in script.MATRIX
            )
            code = f"open({str(output)!r}, 'w').write({f'<t>{cases}</t>'!r})"
        elif stage.name == "host-values":
            code = f"open({str(output)!r}, 'w').write('none')"
        elif stage.name != "engine-flash_attn-graphs-v2":
            result = json.dumps(RESULTS.get(stage.name.split("-")[0], {}))
            code = f"open({str(output)!r}, 'w').write({result!r})"
        return [sys.executable, "-c", code]

    file = tmp_path / "result.json"
    monkeypatch.setattr(script, "describe_device", lambda: device)
    monkeypatch.setattr(script, "command", command)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--json", str(file)])
    assert script.main() == 1
    report = json.loads(file.read_text())
    assert list(report["stages"]) == [stage.name for stage in script.STAGES]
    status = {name: entry["status"] for name, entry in report["stages"].items()}
    failed = {"engine-flash_attn-graphs-v2", "start-own-core", "host-values"}
    assert {name for name, word in status.items() if word == "failed"} == failed
    assert {name for name, word in status.items() if word == "skipped"} == {"start-tp2"}
    assert "a fault" in report["stages"]["engine-flash_attn-graphs-v2"]["log"]
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("stage "))
    rows = lines[begin + 1 : begin + 1 + len(status)]
    assert [row.split()[:2] for row in rows] == [list(pair) for pair in status.items()]
    of = dict(zip(status, rows, strict=True))
    assert of["kernels"].endswith("0.812 of the copy bandwidth, decoding")
    assert of["start-in-process"].endswith("4321 blocks of the cache")
    assert of["thinning-triton_attn-float32-v1"].endswith("77 blocks, thinned")
    assert of["host-values-sync"].endswith("8192 bytes of V a token, kcache")
    assert "bad result" in report["stages"]["host-values"]["reason"]
    assert of["engine-flash_attn-graphs-v2"].endswith("exit status 1")
    assert of["start-tp2"].endswith("needs 2 devices, here are 1")
    assert of["throughput-8k"].endswith("auto: 1.46 of the first's speed")
    assert of["decode-8k"].endswith("select: 2.5 of the first's speed")
    assert of["http"].endswith("auto: 1.25 of the first's speed")
    assert "start-own-core" in lines[-1] and lines[-1].startswith(str(file))
    # Benches measure, they do not check: without them, and without a failure, it is a record.
    for stage in script.STAGES:
        if stage.name in failed or stage.measures:
            del report["stages"][stage.name]
    file.write_text(json.dumps(report))
    monkeypatch.setattr(
        script,
        "command",
        lambda stage, output: [sys.executable, "-c", f"open({str(output)!r}, 'w').write('{{}}')"],
    )
    for name, is_record in zip(sorted(failed), (False, False, True), strict=True):
        arguments = ["gpu_check.py", "--json", str(file), "--only", name]
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.setattr(script, "figure", lambda *_: "")
        assert script.main() == 0
        assert ("add to RUNS" in capsys.readouterr().out) == is_record


LIKELY = {7: -1.0, 8: -1.04, 9: -3.0}


@pytest.mark.parametrize(
    ("other", "likely", "says"),
    [
        ([7, 9], [LIKELY, {9: -3.05}], None),  # the same tokens, a little less likely
        ([7, 9], [LIKELY, {9: -3.2}], "token 1: 9 and 9 differ by 0.2 nats"),
        ([8, 3], [{8: -1.0, 7: -1.02}, {3: 0.0}], None),  # they part where both are as likely
        ([8, 3], [{8: -1.0, 7: -1.5}, {3: 0.0}], "token 0: 7 and 8 differ by 0.5 nats"),
        ([9, 3], [{9: -1.0, 7: -1.0}, {3: 0.0}], "token 0: 7 and 9 differ by 2 nats"),
        ([5, 3], [{5: -1.0, 7: -1.0}, {3: 0.0}], "neither is likely to the other"),
    ],
)
def test_answers_agree_as_far_as_can_be_demanded(monkeypatch, other, likely, says) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    agreement = importlib.import_module("gpu_agreement").agreement
    mine = ([7, 9], [LIKELY, LIKELY])
    if says is not None:
        with pytest.raises(RuntimeError, match=says):
            agreement([mine], [(other, likely)], 0.1)
        return
    found = agreement([mine, mine], [(other, likely), mine], 0.1)
    assert found.parted == (other[0] == 8) and found.tokens == 4
    assert found.compared == 4 - found.parted and found.furthest == pytest.approx(0.05, abs=0.011)
    assert agreement([mine], [(other, likely)], 0.1, first=1).tokens == 1


def test_stages_beside_each_other_and_alone(script, tmp_path, monkeypatch) -> None:
    """Two wait for one another; one that runs alone finds both ended."""
    meet = (
        "import pathlib, sys, time\nmine, other = map(pathlib.Path, sys.argv[2:])\nmine.touch()\n"
    )
    meet += "while not other.exists(): time.sleep(0.01)\npathlib.Path(sys.argv[1]).write_text('{}')"
    alone = "import pathlib, sys\nassert pathlib.Path(sys.argv[2]).exists()\n"
    alone += "pathlib.Path(sys.argv[1]).write_text('{}')"
    notes = {"one": tmp_path / "a", "two": tmp_path / "b"}
    others = {"one": [notes["one"], notes["two"]], "two": [notes["two"], notes["one"]]}

    def command(stage: Any, output: Path) -> list[str]:
        code, more = (alone, [tmp_path / "one.out"]) if stage.alone else (meet, others[stage.name])
        return [sys.executable, "-c", code, str(output), *map(str, more)]

    monkeypatch.setattr(script, "command", command)
    stages = [
        script.Stage("last", 60, ("x",), alone=True),
        script.Stage("one", 60, ("x",)),
        script.Stage("two", 60, ("x",)),
    ]
    entries = [(s.name, entry["status"]) for s, entry in script.run_stages(stages, 2, tmp_path)]
    assert sorted(entries[:2]) == [("one", "passed"), ("two", "passed")]
    assert entries[2:] == [("last", "passed")]


def test_a_check_that_is_ended_ends_its_stages(tmp_path: Path) -> None:
    """Asked by SIGTERM, as `timeout` does it, with two stages under way and one that waits."""
    program = tmp_path / "check.py"
    program.write_text(
        f"""
import pathlib, runpy, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import gpu_check
folder = pathlib.Path({str(tmp_path)!r})
code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()));"
code += "time.sleep(600)"
gpu_check.command = lambda stage, output: [sys.executable, "-c", code, folder / stage.name]
gpu_check.STAGES = tuple(gpu_check.Stage(name, 900, ("x",)) for name in ("a", "b", "c"))
gpu_check.describe_device = lambda: {{"capability": [9, 0], "memory_gib": 80, "devices": 1}}
sys.argv = ["gpu_check.py", "--jobs", "2", "--json", str(folder / "result.json")]
gpu_check.exit_when_asked()
sys.exit(gpu_check.main())
"""
    )
    check = subprocess.Popen([sys.executable, str(program)])
    ids = [tmp_path / name for name in ("a", "b")]
    for path in ids:
        while not (path.exists() and path.read_text()):
            assert check.poll() is None
            time.sleep(0.01)
    check.terminate()
    assert check.wait(60) == 128 + signal.SIGTERM
    for path in ids:
        assert not Path(f"/proc/{path.read_text()}").exists()
    assert not (tmp_path / "c").exists()
