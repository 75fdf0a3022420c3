# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_lease.py with stand-ins for its phases: deadlines, results at home, kills, pauses."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_lease.py"
LOST = 3
# What is started beside a phase: in a session of its own, and with a title instead of its
# environment, as engines give themselves one.
BESIDE = """
import subprocess
titled = "import setproctitle, time; setproctitle.setproctitle('a title'); "
titled += "open('titled', 'a').write(str(__import__('os').getpid()) + ' '); time.sleep(600)"
for line in (["sleep", "600"], [sys.executable, "-c", titled]):
    subprocess.Popen(line, start_new_session=True)
while not os.path.exists("titled") or not open("titled").read().endswith(" "):
    time.sleep(0.01)
"""


class Run:
    """A run in a folder, with the files that its phases write beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notes = folder / "run", folder / "notes"
        self.notes.mkdir()

    def phase(self, name: str, code: str, limit: float = 60, **more: Any) -> dict[str, Any]:
        """A phase that runs Python in the folder of notes, and notes that it began."""
        first = f"import os, pathlib, sys, time\nos.chdir({str(self.notes)!r})\n"
        first += f"open({name!r}, 'a').write('x')\n"
        command = [sys.executable, "-c", first + code, "{folder}"]
        return {"name": name, "limit": limit, "commands": [command], "alone": False, **more}

    def times(self, name: str) -> int:
        """How often a phase began."""
        path = self.notes / name
        return len(path.read_text()) if path.exists() else 0

    def call(self, command: str, *arguments: str, status: int = 0) -> str:
        line = [sys.executable, str(SCRIPT), command, "--folder", str(self.folder), *arguments]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, *phases: dict[str, Any], more: tuple[str, ...] = ()) -> None:
        file = self.notes / "phases.json"
        file.write_text(json.dumps(phases))
        self.call("start", "--phases", str(file), *more)

    def wait(self, *arguments: str, status: int = 0) -> str:
        return self.call("wait", "--seconds", "20", *arguments, status=status)

    def wait_for_all(self) -> str:
        """Wait as often as it takes; return all that was said."""
        said = ""
        while "it runs" in (new := self.wait()):
            said += new
        return said + new

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        return found

    def processes(self) -> list[str]:
        """What is alive of the run, the driver left out."""
        mark = f"VLLM_PYRAMID_GPU_LEASE={self.folder.resolve()}:".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes():
                    found.append((path.parent / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        titled = self.notes / "titled"
        for number in titled.read_text().split() if titled.exists() else ():
            stat = Path(f"/proc/{number}/stat")
            if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(f"titled {number}")
        return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    if (made.folder / "state.json").exists():
        made.call("stop")
    assert made.processes() == []


def test_a_phase_that_fails_or_hangs_ends_no_other(run: Run, tmp_path: Path) -> None:
    run.start(
        run.phase("first", "print('7 of 7 passed')"),
        run.phase("fails", "print('a fault', file=sys.stderr); sys.exit(5)"),
        run.phase("hangs", BESIDE + "time.sleep(600)", limit=0.7),
        run.phase("last", "pathlib.Path(sys.argv[1], 'table.csv').write_text('1,2')"),
    )
    home = tmp_path / "home"
    said = run.wait("--into", str(home))
    assert said.startswith("first: passed after ") and "    7 of 7 passed" in said
    with tarfile.open(home / "logs.tar.gz") as archive:  # before the others have ended
        assert "logs/first.phase.log" in archive.getnames()
    said += run.wait_for_all()
    assert "fails: failed" in said and "exit status 5" in said and "a fault" in said
    assert "hangs: ended at its deadline after 1 s: 1 s are over" in said
    assert run.processes() == []
    assert said.endswith("4 of 4 phases are done; left: none\nthe run is over\n")
    assert [entry["status"] for entry in run.state()["phases"].values()] == [
        *("passed", "failed", "ended at its deadline", "passed")
    ]
    with tarfile.open(run.folder / "home" / "logs.tar.gz") as archive:
        assert {"table.csv", "logs/hangs.phase.log"} <= {*archive.getnames()}
    assert run.wait().startswith("4 of 4 phases are done")  # each is told of once
    assert "error: " in run.call("start", status=1)


def test_a_run_that_was_killed_goes_on(run: Run) -> None:
    """Its processes are ended first, and what has been done is not done again."""
    first = "if len(open('long').read()) == 1: time.sleep(600)"
    run.start(
        run.phase("environment", "", always=True),
        run.phase("quick", ""),
        run.phase("long", BESIDE + first),
        run.phase("last", ""),
    )
    while "long" not in run.state()["phases"] or not run.times("long"):
        time.sleep(0.05)
    assert "is under way" in run.call("resume", status=1)
    os.kill(run.state()["pid"], signal.SIGKILL)
    assert "the run was stopped or killed: resume it" in run.wait(status=LOST)
    assert len(run.processes()) >= 1  # what it has left
    run.call("resume")
    said = run.wait_for_all()
    assert "4 of 4 phases are done; left: none" in said
    assert [run.times(n) for n in ("environment", "quick", "long", "last")] == [2, 1, 2, 1]
    assert run.processes() == []
    run.call("resume", "--again", "quick")
    assert "quick: passed" in run.wait_for_all()
    assert run.times("quick") == 2 and run.times("last") == 1


def test_stopped_it_ends_all_and_says_what_is_left(run: Run) -> None:
    run.start(run.phase("long", BESIDE + "time.sleep(600)"), run.phase("last", ""))
    while not run.times("long"):
        time.sleep(0.05)
    run.call("stop")
    assert run.processes() == []
    assert run.state()["phases"]["long"]["status"] == "interrupted"
    assert "left: ['long', 'last']" in run.wait(status=LOST)


def test_work_in_the_background_is_paused_where_memory_is_measured(run: Run) -> None:
    """The work's own processes too; what needs it begins when it has ended."""
    grows = "a = os.path.getsize('ticks'); time.sleep(0.25); b = os.path.getsize('ticks')\n"
    ticks = f"cd {run.notes}; for i in $(seq 30); do sh -c 'printf x >> ticks'; sleep 0.03; done"
    run.start(
        run.phase("beside", "while not os.path.exists('ticks'): pass\n" + grows + "assert a < b"),
        run.phase("alone", grows + "assert a == b", alone=True),
        run.phase("behind", "assert os.path.getsize('ticks') == 30", after_background=True),
        more=("--background", ticks),
    )
    said = run.wait_for_all()
    assert run.state()["background_status"] == 0
    for name in ("beside", "alone", "behind"):
        assert f"{name}: passed" in said, said


def test_no_phase_begins_without_time_for_it(run: Run) -> None:
    run.start(
        run.phase("first", "time.sleep(0.6)", limit=20),
        run.phase("second", "", limit=20),
        run.phase("needs_work", "", limit=0.3, after_background=True),
        more=("--minutes", "0.34", "--background", "exit 4"),  # 20.4 seconds
    )
    said = run.wait_for_all()
    assert "first: passed" in said and "second:" not in said and run.times("second") == 0
    assert "needs_work: skipped" in said and "ended with status 4" in said
    assert "left: ['second', 'needs_work']" in said and "the run is over: resume it" in said


def test_the_plan_names_stages_that_exist_and_fits_into_half_an_hour(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    phases = importlib.import_module("gpu_phases")
    check = importlib.import_module("gpu_check")
    found = phases.plan(tmp_path / "weights", 14)
    assert phases.read(json.loads(json.dumps(phases.write(found)))) == found
    assert sum(phase.limit for phase in found[:-1]) <= 29 * 60  # the last gets what others leave
    chosen: set[str] = set()
    for phase in found:
        for line in phase.lines(tmp_path):
            assert Path(line[1]).exists() or line[1] == "-m"
            if line[1].endswith("gpu_check.py"):
                monkeypatch.setattr(sys, "argv", line[1:])
                options = check.parse_arguments()
                assert options.missing and options.json == tmp_path / "check.json"
                stages = [s for s in check.STAGES if s.name.startswith(tuple(options.only))]
                assert phase.alone or not any(stage.alone for stage in stages), phase.name
                chosen |= {stage.name for stage in stages}
    assert chosen == {stage.name for stage in check.STAGES}
    with pytest.raises(ValueError, match="each its own"):
        phases.read(phases.write([found[0], found[0]]))
    with pytest.raises(ValueError, match="no list of phases"):
        phases.read([{"name": "a", "limit": 1}])
