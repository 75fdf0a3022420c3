# SPDX-License-Identifier: Apache-2.0
"""The phases of scripts/gpu_lease.py: what is measured within half an hour, and in which order."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_stages import STAGES

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Phase:
    """Commands that run one after the other.

    Attributes:
        limit: seconds after which what still runs is ended.
        commands: `{folder}` in them is the run's folder. All run, also behind one that fails.
        alone: work in the background is paused meanwhile, since memory or times are measured.
        after_background: it begins when the work in the background has ended.
        always: it runs again when the run is resumed, maybe on another machine.
    """

    name: str
    limit: float
    commands: tuple[tuple[str, ...], ...]
    alone: bool = True
    after_background: bool = False
    always: bool = False

    def lines(self, folder: Path) -> list[list[str]]:
        """Return the commands for a folder."""
        return [[part.replace("{folder}", str(folder)) for part in line] for line in self.commands]


def _check(stages: str, *more: str) -> tuple[str, ...]:
    """Return the command for those stages of the check that have not passed yet."""
    names = stages.split()
    for name in names:
        assert any(stage.name.startswith(name) for stage in STAGES), name
    script, files = str(ROOT / "scripts" / "gpu_check.py"), "--json {folder}/check.json"
    kept = ("--logs", "{folder}/logs", "--missing")
    return (sys.executable, script, *files.split(), *kept, *more, "--only", *names)


def plan(weights: Path | None, jobs: int) -> list[Phase]:
    """Return the phases of a run.

    Args:
        weights: folder of a model, which may come while the first phases run.
        jobs: stages at a time, of those that may run beside each other.
    """
    doctor = (sys.executable, "-m", "vllm_pyramid.tools.cli", "doctor")
    together = "numerics engine thinning sync host"
    phases = [
        Phase("environment", 60, (doctor,), alone=False, always=True),
        Phase("right", 300, (_check(together, "--jobs", str(jobs)),), alone=False),
        Phase("kernels", 150, (_check("kernels"),)),
        Phase("starts", 180, (_check("start"),)),
        Phase("http", 390, (_check("http"),)),
        Phase("auto", 120, (_check("throughput-auto"),)),
        Phase("decode", 150, (_check("decode-8k decode-select-32k"),)),
        Phase("fp8", 210, (_check("fp8"),)),
    ]
    if weights is not None:
        http = ("--model", str(weights), "--jobs", "1024:128:64,8192:256:16")
        out = ("--out", "{folder}/logs/weights.out")
        study = ("run", "--out", "{folder}/study", "--model", str(weights), "--device", "cuda")
        phases.append(
            Phase(
                "weights",
                180,
                (
                    (sys.executable, str(ROOT / "scripts" / "gpu_http.py"), *http, *out),
                    (sys.executable, str(ROOT / "lab" / "method_study" / "tables.py"), *study),
                ),
                after_background=True,
            )
        )
    rest = "decode-select decode-32k throughput-8k throughput-32k"
    return [*phases, Phase("rest", 600, (_check(rest),))]


def write(phases: list[Phase]) -> list[dict[str, object]]:
    """Return phases as JSON values."""
    return [asdict(phase) for phase in phases]


def read(data: object) -> list[Phase]:
    """Return the phases of JSON values.

    Raises:
        ValueError: they are none, or two have one name.
    """
    try:
        assert isinstance(data, list)
        found = [
            Phase(**{**one, "commands": tuple(tuple(line) for line in one["commands"])})
            for one in data
        ]
    except (AssertionError, KeyError, TypeError) as error:
        raise ValueError(f"no list of phases: {error!r}") from None
    if len({phase.name for phase in found}) < len(found) or not found:
        raise ValueError("phases have names, each its own")
    return found


def read_file(path: Path) -> list[Phase]:
    """Return the phases of a JSON file; raise ValueError as `read` does."""
    return read(json.loads(path.read_text()))
