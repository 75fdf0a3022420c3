# SPDX-License-Identifier: Apache-2.0
"""Everything in one command on a machine with a GPU that one has for half an hour.

    python scripts/gpu_lease.py plan [--weights FOLDER]
    python scripts/gpu_lease.py start --folder RUN [--weights FOLDER] [--background COMMAND]
    python scripts/gpu_lease.py wait --folder RUN --seconds 500 [--into FOLDER]
    python scripts/gpu_lease.py resume --folder RUN [--again PHASE ...]
    python scripts/gpu_lease.py stop --folder RUN

`start` begins the phases of scripts/gpu_phases.py in the background and returns. `wait` returns
when a phase has ended, or after some seconds, and says what came of it. Each phase has a deadline,
at which all its processes are ended, and the run has one (`--minutes`): a phase for which no time
is left does not begin. A phase that fails ends no other.

After each phase RUN/home has all that was measured so far: state.json (phases and the ends of their
logs), check.json (scripts/gpu_check.py) and logs.tar.gz. `wait --into` copies that. `resume` goes
on with the phases that have not ended, and in them with the stages that have not passed, also where
the run was killed; what is left of its processes is ended first.

COMMAND is work that needs no GPU, such as unpacking weights; it is paused while memory or times are
measured, and phases that need what it makes begin when it has ended. What the run leaves of it is
ended, and begins anew with `resume`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The folder of this file is where Python looks first.
import gpu_phases
from gpu_phases import Phase
from gpu_processes import end, exit_when_asked
from gpu_state import (
    AT_DEADLINE,
    UNDER_WAY,
    Marked,
    State,
    adopt_orphans,
    is_driven,
    kill_orphans,
    only_one,
)

LAST_LINES = 12  # of a phase's log, in the summary
PATIENCE = 15  # seconds that a phase has to end at its deadline before it is killed
LEAST = 20  # seconds: a phase does not begin for less
START_SECONDS = 10  # until the driver holds the run's lock
LOST = 3  # exit status of `wait` if the run was stopped or killed


class Background:
    """The work that goes on beside the phases."""

    def __init__(self, state: State) -> None:
        self._state, self.marked = state, Marked(state.folder, "background")
        self._process: subprocess.Popen[bytes] | None = None
        self.marked.kill()  # of a run that was killed
        command = state.data["background"]
        if command is not None and state.data.get("background_status") != 0:
            self._process = self.marked.start(command, state.folder / "logs" / "background.log")

    def status(self) -> int | None:
        """Return the exit status; 0 without any work; None while it is under way."""
        if self._process is None:
            return 0
        status = self._process.poll()
        if status is not None:
            self._state.data["background_status"] = status
        return status

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop its processes meanwhile."""
        self.marked.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.marked.signal(signal.SIGCONT)

    def end(self) -> None:
        """End it."""
        self.marked.kill()
        if self._process is not None:
            self._process.wait()


def last_lines(log: Path) -> list[str]:
    """Return the end of a log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return [line.rstrip()[:200] for line in text.splitlines() if line.strip()][-LAST_LINES:]


def run_phase(phase: Phase, state: State, background: Background, limit: float) -> dict[str, Any]:
    """Run a phase to its end or its deadline; return how it ended."""
    until = time.monotonic() + limit
    log = state.folder / "logs" / f"{phase.name}.phase.log"
    if phase.after_background:
        while background.status() is None and time.monotonic() < until:
            time.sleep(0.1)
        if (status := background.status()) != 0:
            why = "has not ended" if status is None else f"ended with status {status}"
            return {"status": "skipped", "reason": f"the work in the background {why}"}
    marked, failed = Marked(state.folder, "phase"), []
    with background.paused() if phase.alone else contextlib.nullcontext():
        for line in phase.lines(state.folder):
            try:
                process = marked.start(line, log)
            except OSError as error:
                failed.append(f"no process: {error}")
                continue
            try:
                if status := process.wait(max(until - time.monotonic(), 0)):
                    failed.append(f"exit status {status}: {' '.join(line)}")
            except subprocess.TimeoutExpired:
                return {"status": AT_DEADLINE, "reason": f"{limit:.0f} s are over"}
            finally:
                end(process, PATIENCE)
                kill_orphans(but=background.marked)  # what it has started and not ended
    return {"status": "failed", "reason": "; ".join(failed)} if failed else {"status": "passed"}


def drive(folder: Path) -> int:
    """Run the phases that have not ended. The process of `start` and `resume`."""
    exit_when_asked()
    with only_one(folder, START_SECONDS):
        state = State(folder).read()
        Marked(folder, "phase").kill()  # of a run that was killed
        adopt_orphans()
        state.data |= {"pid": os.getpid(), "over": False}
        background, over_at = Background(state), time.time() + 60 * state.data["minutes"]
        try:
            for phase in gpu_phases.read(state.data["plan"]):
                if phase.name in state.done() and not phase.always:
                    continue
                limit = min(phase.limit, over_at - time.time())
                if limit < min(LEAST, phase.limit):
                    print(f"{phase.name}: no time is left", flush=True)
                    continue
                begin = time.time()
                entry: dict[str, Any] = {"status": UNDER_WAY, "begun": begin, "limit": limit}
                state.phases.pop(phase.name, None)
                state.phases[phase.name] = entry
                state.write()
                try:
                    entry |= run_phase(phase, state, background, limit)
                finally:
                    background.status()  # noted, for `resume`
                    entry["seconds"] = round(time.time() - begin, 1)
                    entry["last_lines"] = last_lines(folder / "logs" / f"{phase.name}.phase.log")
                    if entry["status"] == UNDER_WAY:
                        entry["status"] = "interrupted"
                    state.bring_home()
                    state.write()  # last: `wait` then brings it
            state.data["over"] = True
        finally:
            background.end()
            state.bring_home()
            state.write()
    return 0


def begin(folder: Path) -> None:
    """Start the driver in a session of its own."""
    with (folder / "driver.log").open("ab") as log:
        driver = subprocess.Popen(
            [sys.executable, __file__, "drive", "--folder", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    state = State(folder)
    while state.read().data.get("pid") != driver.pid:
        if driver.poll() is not None:
            raise SystemExit(f"error: the driver has ended: {folder / 'driver.log'}")
        time.sleep(0.02)


def report(state: State, names: list[str]) -> None:
    """Print how phases ended."""
    for name in names:
        entry = state.phases[name]
        reason = f": {entry['reason']}" if "reason" in entry else ""
        print(f"{name}: {entry['status']} after {entry['seconds']:.0f} s{reason}")
        for line in entry["last_lines"]:
            print(f"    {line}")


def wait(folder: Path, seconds: float, into: Path | None) -> int:
    """Return when a phase has ended of which `wait` has not told, or the run, or after a while."""
    told_file, until = folder / "told.json", time.monotonic() + seconds
    told: dict[str, float] = json.loads(told_file.read_text()) if told_file.exists() else {}
    while True:
        is_alive = is_driven(folder)
        state = State(folder).read()
        new = [name for name in state.ended() if told.get(name) != state.phases[name]["begun"]]
        if new or not is_alive or time.monotonic() >= until:
            break
        time.sleep(0.1)
    report(state, new)
    told |= {name: state.phases[name]["begun"] for name in new}
    told_file.write_text(json.dumps(told))
    if into is not None and (folder / "home").exists():
        shutil.copytree(folder / "home", into, dirs_exist_ok=True)
    wanted = [phase.name for phase in gpu_phases.read(state.data["plan"])]
    left = [name for name in wanted if name not in state.done()]
    print(f"{len(wanted) - len(left)} of {len(wanted)} phases are done; left: {left or 'none'}")
    if is_alive or state.data["over"]:
        print("it runs" if is_alive else "the run is over" + (": resume it" if left else ""))
        return 0
    print("the run was stopped or killed: resume it")
    return LOST


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    made = {name: commands.add_parser(name) for name in ("plan", "start", "resume", "wait")}
    made |= {name: commands.add_parser(name) for name in ("stop", "drive")}
    for name, command in made.items():
        if name != "plan":
            command.add_argument("--folder", type=Path, required=True)
        if name in ("plan", "start"):
            command.add_argument("--weights", type=Path, metavar="FOLDER")
            command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
            command.add_argument("--phases", type=Path, metavar="FILE", help="others, as JSON")
        if name in ("start", "resume"):
            command.add_argument("--minutes", type=float, default=29)
    made["start"].add_argument("--background", metavar="COMMAND")
    made["resume"].add_argument("--again", nargs="*", default=[], metavar="PHASE")
    made["wait"].add_argument("--seconds", type=float, required=True)
    made["wait"].add_argument("--into", type=Path, metavar="FOLDER")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    if options.command in ("plan", "start"):
        phases = gpu_phases.plan(options.weights, options.jobs)
        if options.phases is not None:
            phases = gpu_phases.read_file(options.phases)
    if options.command == "plan":
        for phase in phases:
            how = "alone" if phase.alone else "beside work in the background"
            print(f"{phase.name}, at most {phase.limit:.0f} s, {how}")
            print(*(f"    {' '.join(line)}" for line in phase.commands), sep="\n")
        return 0
    folder = options.folder.resolve()
    state = State(folder)
    if options.command == "start":
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        if state.path.exists():
            raise SystemExit(f"error: {folder} has a run: resume it, or name another folder")
        state.data = {"phases": {}, "plan": gpu_phases.write(phases), "over": False}
        state.data |= {"background": options.background, "minutes": options.minutes}
    elif not state.path.exists():
        raise SystemExit(f"error: {folder} has no run: start one")
    elif options.command == "drive":
        return drive(folder)
    elif options.command == "wait":
        return wait(folder, options.seconds, options.into)
    else:
        state.read()
    if options.command == "stop":
        if is_driven(folder):
            os.kill(state.data["pid"], signal.SIGTERM)
        while is_driven(folder):
            time.sleep(0.05)
        return 0
    if is_driven(folder):
        raise SystemExit(f"error: the run in {folder} is under way")
    if options.command == "resume":
        state.data["minutes"] = options.minutes
        for name in options.again:
            state.phases.pop(name, None)
    state.write()
    begin(folder)
    print(f"{options.command}: in {folder}; `wait` says what has ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
