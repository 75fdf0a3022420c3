# SPDX-License-Identifier: Apache-2.0
"""Runs everything that a GPU is needed for, and writes one JSON file.

    scripts/gpu_check.sh [--json FILE] [--logs FOLDER] [--jobs N] [--only STAGE ...] [--dry-run]

Stages (each in a process of its own, with a time limit):
- numerics: every Triton kernel, compiled, against the reference in float64 (pytest -m gpu);
- kernels: their times against the copy bandwidth measured in the same run;
- engine-*: answers of `full` agree with those of vLLM without a policy (what that means where
  kernels may round otherwise: scripts/gpu_agreement.py), and `pyramidkv` evicts and gives blocks
  back, for each attention backend, eagerly and with CUDA graphs, on both of vLLM's model runners;
- thinning-*: `pyramidinfer` on both runners: where it keeps all its answers agree with those of
  `full`, and in float32 its survivors and answers with the same method in Transformers;
- start-*: engines that start as a user's do, without a fixed size of the cache (graphs are captured
  for their memory and taken down first): in one process, with an engine core of its own, on two
  GPUs;
- sync-check*: policies of all kinds with an error for each wait for the device in a step and, as
  for every engine core of its own, for each kernel that is compiled behind the warm-up;
- host-values, host-values-sync: the same for `kcache` and for survivors whose V is in host memory;
- throughput-*, decode-*: `vllm-pyramid bench throughput` on the shape of Llama 3 8B with random
  weights and prompts of 8k and 32k tokens: stock vLLM, `full` and `pyramidkv` side by side
  in the same amount of cache.

A stage is `passed`, `failed` or, only where the device lacks what it needs, `skipped` with the
reason; a stage that fails ends no other. At the end there is one table, and the exit status is 1 if
any failed. With `--only`, the stages that FILE already holds from the same device and commit are
kept, so a run may be cut into several. With `--jobs`, stages that take no times run beside each
other, and the others alone after them; PYTEST_ADDOPTS="-n 4" splits the numerics among processes.

Most stages have run on one H200 (lab/results/h200.md).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MATRIX = (
    "check_attention.py",
    "check_fp8.py",
    "check_lanes.py",
    "check_mass.py",
    "check_moves.py",
    "check_observed_expected.py",
    "check_page_selection.py",
    "check_pages.py",
    "check_recent.py",
    "check_scaled_rows.py",
    "check_scores.py",
    "check_topn.py",
    "check_vllm_rows.py",
)
RECHECK_STEPS = 90  # seconds in which a stage that is asked to end must have ended
LOG_TAIL = 4000  # characters of a failed stage's output that go into the JSON


@dataclass(frozen=True)
class Stage:
    """One process.

    Attributes:
        arguments: a script of this folder and its arguments, or `bench` and those of
            `vllm-pyramid bench`; empty for `numerics`, which pytest runs.
        limit: seconds after which it is ended and counts as failed.
        capability, memory_gib: what the device must have, else the stage is skipped.
        devices: how many there must be.
        alone: nothing else may run on the device meanwhile: it takes times, or vLLM measures the
            memory that is left for its cache.
    """

    name: str
    limit: int
    arguments: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    capability: tuple[int, int] = (8, 0)
    memory_gib: int = 4
    devices: int = 1
    alone: bool = False


def engine_stages() -> list[Stage]:
    """Backends, eager and graphs, both runners; the most usual combination first."""
    return [
        Stage(
            f"engine-{backend.lower()}-{mode}-{runner}",
            300,
            ("gpu_engines.py", "engine", "--backend", backend, "--mode", mode, "--runner", runner),
            (("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "v2" else "0"),),
        )
        for runner in ("v2", "v1")
        for backend in ("FLASH_ATTN", "TRITON_ATTN")
        for mode in ("eager", "graphs")
    ]


def thinning_stages() -> list[Stage]:
    """Against Transformers in float32, which FlashAttention does not have, and in bfloat16."""
    return [
        Stage(
            f"thinning-{backend.lower()}-{dtype}-{runner}",
            300,
            ("gpu_thinning.py", "--backend", backend, "--dtype", dtype),
            (("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "v2" else "0"),),
        )
        for runner in ("v2", "v1")
        for backend, dtype in (("TRITON_ATTN", "float32"), ("FLASH_ATTN", "bfloat16"))
    ]


def start_stages() -> list[Stage]:
    """Starts with the policies of all kinds in turn; plain ones with two of them."""
    start = ("gpu_engines.py", "start")
    plain = (*start, "--policies", "none,full,pyramidkv")
    core = "VLLM_ENABLE_V1_MULTIPROCESSING"
    stages = [
        Stage("start-in-process", 300, plain, ((core, "0"),), memory_gib=16, alone=True),
        Stage("start-own-core", 300, plain, ((core, "1"),), memory_gib=16, alone=True),
    ]
    # KV heads with lengths of their own are not served by several ranks.
    kinds = "none,full,pyramidkv,xkv,h2o,pyramidinfer,select"
    on_two = (*start, "--policies", kinds, "--tensor-parallel", "2")
    stages.append(Stage("start-tp2", 900, on_two, memory_gib=16, devices=2, alone=True))
    fixed = (*start, "--cache-gib", "0.5", "--policies")
    checked = (("VLLM_GPU_SYNC_CHECK", "error"),)
    stages += [
        Stage("sync-check", 600, (*fixed, "none,full,pyramidkv,xkv,h2o"), checked),
        Stage("sync-check-kinds", 600, (*fixed, "full,pyramidinfer,select,duoattention"), checked),
    ]
    on_host = (*fixed, "none,full,kcache,snapkv+host", "--swap-space", "2")
    stages.append(Stage("host-values", 600, on_host, ((core, "0"),)))
    stages.append(Stage("host-values-sync", 600, on_host, checked))
    return stages


def bench_stages() -> list[Stage]:
    """Three engines of 16 GB of weights and 17 GB of cache each are alive at once."""
    jobs = {
        # Tokens of a prompt, requests, whole ones that the cache has room for.
        "8k": ("8192", "48", "15"),
        "32k": ("32768", "12", "4"),
    }
    stages = []
    for name, (prompt, requests, pool) in jobs.items():
        common = ("--model", "llama-3-8b", "--policies", "stock,full,pyramidkv", "--budget", "12%")
        common += ("--prompt-len", prompt, "--output-len", "256", "--num-prompts", requests)
        common += ("--pool-prompts", pool)
        for stage, more in (("throughput", ()), ("decode", ("--decode-only",))):
            arguments = ("bench", "throughput", *common, "--repetitions", "3", *more)
            stages.append(Stage(f"{stage}-{name}", 1200, arguments, memory_gib=120, alone=True))
    return stages


STAGES = (
    Stage("numerics", 500, memory_gib=16),
    Stage("kernels", 300, ("gpu_kernels.py",), memory_gib=12, alone=True),
    *engine_stages(),
    *thinning_stages(),
    *start_stages(),
    *bench_stages(),
)


def describe_device() -> dict[str, Any]:
    """The device, the driver and the versions.

    Raises:
        SystemExit: no CUDA device, or no PyTorch to ask for one.
    """
    try:
        import torch
    except ImportError as error:
        raise SystemExit(f"error: PyTorch is needed: {error}") from None
    if not torch.cuda.is_available():
        raise SystemExit(
            f"error: no CUDA device: PyTorch {torch.__version__} (built for CUDA "
            f"{torch.version.cuda}) finds none. Run this on a machine with an NVIDIA GPU, or use "
            "--dry-run to see what it would do."
        )
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        smi = subprocess.run(query, check=True, capture_output=True, text=True)
        driver = smi.stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        driver = f"unknown: {error}"
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "triton", "vllm", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(0)),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "devices": torch.cuda.device_count(),
        "driver": driver,
        "versions": versions,
    }


def commit() -> str | None:
    """The commit of this checkout, with a hash of what was changed; None where there is no git."""
    answers = []
    for line in (["git", "rev-parse", "HEAD"], ["git", "diff", "HEAD"]):
        try:
            answers.append(subprocess.run(line, cwd=ROOT, capture_output=True).stdout)
        except FileNotFoundError:
            return None
    head, changes = answers
    if not head:
        return None
    changed = f"+{hashlib.sha256(changes).hexdigest()[:12]}" if changes else ""
    return head.decode().strip() + changed


def lacking(stage: Stage, device: dict[str, Any]) -> str | None:
    """What the device lacks for a stage, or None."""
    if tuple(device["capability"]) < stage.capability:
        return f"needs compute capability {stage.capability}, this is {device['capability']}"
    if device["devices"] < stage.devices:
        return f"needs {stage.devices} devices, here are {device['devices']}"
    if device["memory_gib"] < stage.memory_gib:
        return f"needs {stage.memory_gib} GiB of device memory, this has {device['memory_gib']}"
    return None


def command(stage: Stage, output: Path) -> list[str]:
    """What runs; it writes `output` (a JSON object; for `numerics` pytest's XML)."""
    if stage.arguments[:1] == ("bench",):
        cli = [sys.executable, "-m", "vllm_pyramid.tools.cli", *stage.arguments]
        return [*cli, "--out", str(output.with_suffix(".bench")), "--json", str(output)]
    if stage.arguments:
        script, *arguments = stage.arguments
        path = str(ROOT / "scripts" / script)
        return [sys.executable, path, *arguments, "--out", str(output)]
    modules = [f"tests/kernels/triton_matrix/{name}" for name in MATRIX]
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    return [*pytest, f"--junitxml={output}", *modules]


def summarise_tests(path: Path) -> dict[str, Any]:
    """Counts a module and the names of what failed; raises RuntimeError unless all ran."""
    modules: dict[str, int] = {}
    wrong: list[str] = []
    skipped = 0
    for case in ElementTree.parse(path).iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2]
        modules[module] = modules.get(module, 0) + 1
        if case.find("failure") is not None or case.find("error") is not None:
            wrong.append(f"{module}::{case.get('name')}")
        skipped += case.find("skipped") is not None
    expected = {name.removesuffix(".py") for name in MATRIX}
    if wrong or skipped or set(modules) != expected:
        raise RuntimeError(f"failed: {wrong}; {skipped} skipped; ran {modules}")
    return {"tests": modules, "against": "the PyTorch reference in float64"}


def end(process: subprocess.Popen[Any]) -> None:
    """End a stage and what it has started, which would keep the device's memory.

    A bench's engines and servers are in sessions of their own: it ends them if it is asked to end,
    and could not if it were killed.
    """
    for sign, patience in ((signal.SIGTERM, RECHECK_STEPS), (signal.SIGKILL, None)):
        if sign == signal.SIGTERM and process.poll() is not None:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


class Processes:
    """The processes of the stages that run."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[Any]] = set()
        self._lock = Lock()
        self._is_over = False

    def start(self, line: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start one in a session of its own.

        Raises:
            OSError: there is no such program, or all were ended.
        """
        with self._lock:
            if self._is_over:
                raise OSError("the check was interrupted")
            process = subprocess.Popen(line, start_new_session=True, **options)
            self._running.add(process)
            return process

    def end(self, process: subprocess.Popen[Any]) -> None:
        """End one, if it has not ended."""
        end(process)
        with self._lock:
            self._running.discard(process)

    def end_all(self) -> None:
        """End those that run, and start no others."""
        with self._lock:
            self._is_over, running = True, [*self._running]
        for process in running:  # all are asked before the first is waited for
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            self.end(process)


PROCESSES = Processes()


def run_stage(stage: Stage, folder: Path) -> dict[str, Any]:
    """Run a stage to its end or its limit."""
    output, log = folder / f"{stage.name}.out", folder / f"{stage.name}.log"
    output.unlink(missing_ok=True)  # of an earlier run with the same folder of logs
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    environment["VLLM_CACHE_ROOT"] = str(folder / f"{stage.name}.cache")  # stages write at once
    environment |= dict(stage.variables)
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)
    begin = time.monotonic()
    with log.open("w") as stream:
        try:
            process = PROCESSES.start(
                command(stage, output),
                cwd=ROOT,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            return {"seconds": 0.0, "status": "failed", "reason": f"no process: {error}"}
        try:
            status = process.wait(stage.limit)
            problem = f"exit status {status}" if status else None
        except subprocess.TimeoutExpired:
            problem = f"still running after {stage.limit} s"
        finally:
            PROCESSES.end(process)
    result: dict[str, Any] = {"seconds": round(time.monotonic() - begin, 1)}
    try:
        if stage.arguments:
            if problem is None or output.exists():  # also what it had before it failed
                result["result"] = json.loads(output.read_text())
        else:
            result["result"] = summarise_tests(output)
    except (OSError, ValueError, RuntimeError, ElementTree.ParseError) as error:
        problem = f"{problem or 'bad result'}: {error}"
    if problem is not None:
        return result | {
            "status": "failed",
            "reason": problem,
            "log": log.read_text(errors="replace")[-LOG_TAIL:],
        }
    return result | {"status": "passed"}


def run_stages(
    stages: list[Stage], jobs: int, folder: Path
) -> Iterator[tuple[Stage, dict[str, Any]]]:
    """Run `jobs` stages at a time, then those that run alone; yield each as it ends.

    Closed before its end it ends what runs.
    """
    pool = ThreadPoolExecutor(jobs)
    futures = {pool.submit(run_stage, s, folder): s for s in stages if not s.alone}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
        for stage in stages:
            if stage.alone:
                print(f"{stage.name} ...", flush=True)
                yield stage, run_stage(stage, folder)
    except BaseException:
        PROCESSES.end_all()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# What of a stage's result goes into the table: the path of a number, what it is.
FIGURES = {
    "numerics": (("tests", "check_attention"), "tests of attention"),
    "kernels": (("rows", 0, "share_of_copy_bandwidth"), "of the copy bandwidth, decoding"),
    "engine": (("blocks_in_decode", "pyramidkv"), "blocks, pyramidkv"),
    "thinning": (("blocks_in_decode", "thins"), "blocks, thinned"),
    "start": (("blocks", "full"), "blocks of the cache"),
    "sync": (("blocks", "full"), "blocks of the cache"),
    "host": (("v_bytes_read_per_token", "kcache"), "bytes of V a token, kcache"),
}


def figure(name: str, entry: dict[str, Any]) -> str:
    """One number of a stage that passed, or why it did not."""
    if entry["status"] != "passed":
        return str(entry["reason"]).splitlines()[0][:60]
    if (wanted := FIGURES.get(name.split("-")[0])) is None:
        return "see the JSON"
    found: Any = entry["result"]
    for key in wanted[0]:
        found = found[key]
    return f"{found:.3g} {wanted[1]}" if isinstance(found, float) else f"{found} {wanted[1]}"


def table(report: dict[str, Any]) -> str:
    """A line a stage."""
    device = report["device"]
    lines = [f"{device['name']}, {device['driver']}, commit {report['commit']}"]
    lines.append(f"{'stage':32}{'status':9}{'seconds':>8}  result")
    for name, entry in report["stages"].items():
        seconds = f"{entry['seconds']:.0f}" if "seconds" in entry else ""
        lines.append(f"{name:32}{entry['status']:9}{seconds:>8}  {figure(name, entry)}")
    return "\n".join(lines)


def record(device: dict[str, Any]) -> str:
    """The entry that tells engines of a run in which nothing failed."""
    from vllm_pyramid.version import __version__ as package

    vllm = str(device["versions"]["vllm"]).partition("+")[0]
    return f'GpuRun("{package}", "{vllm}", "{device["name"]}"),'


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    parser.add_argument(
        "--only", nargs="+", metavar="STAGE", help="these alone; a name's beginning will do"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="stages at a time")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keeps what stages print")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and end")
    options = parser.parse_args()
    for prefix in options.only or ():
        if not any(stage.name.startswith(prefix) for stage in STAGES):
            names = ", ".join(stage.name for stage in STAGES)
            parser.error(f"no stage begins with {prefix!r}; there are {names}")
    return options


def main() -> int:
    options = parse_arguments()
    chosen = [s for s in STAGES if not options.only or s.name.startswith(tuple(options.only))]
    if options.dry_run:
        for stage in chosen:
            variables = "".join(f"{name}={value} " for name, value in stage.variables)
            line = " ".join(command(stage, Path("OUT")))
            print(f"{stage.name} (at most {stage.limit} s): {variables}{line}")
        print(f"{len(chosen)} stages, at most {sum(s.limit for s in chosen)} s -> {options.json}")
        return 0
    report: dict[str, Any] = {"device": describe_device(), "commit": commit(), "stages": {}}
    if options.only and options.json.exists():
        before = json.loads(options.json.read_text())
        if all(before.get(key) == report[key] for key in ("device", "commit")):
            report["stages"] = before["stages"]
    order = {stage.name: place for place, stage in enumerate(STAGES)}

    def note(stage: Stage, entry: dict[str, Any]) -> None:
        print(f"{stage.name}: {entry['status']} {entry.get('reason', '')}", flush=True)
        report["stages"][stage.name] = entry
        entries = sorted(report["stages"].items(), key=lambda one: order.get(one[0], len(order)))
        report["stages"] = dict(entries)
        options.json.write_text(json.dumps(report, indent=1) + "\n")  # also if cut short

    able = []
    for stage in chosen:
        if reason := lacking(stage, report["device"]):
            note(stage, {"status": "skipped", "reason": reason})
        else:
            able.append(stage)
    with ExitStack() as stack:
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder.resolve()  # stages run in the checkout
        folder.mkdir(parents=True, exist_ok=True)
        results = stack.enter_context(closing(run_stages(able, options.jobs, folder)))
        for stage, entry in results:
            note(stage, entry)
    print(table(report))
    failed = [name for name, entry in report["stages"].items() if entry["status"] == "failed"]
    print(f"{options.json}: {len(report['stages'])} stages, failed: {failed or 'none'}")
    needed = {stage.name for stage in STAGES if stage.arguments[:1] != ("bench",)}
    if not failed and needed <= report["stages"].keys():
        print(f"add to RUNS in vllm_pyramid/frontend/gpu_runs.py: {record(report['device'])}")
    return 1 if failed else 0


def end_with_stages() -> None:
    """End the stages too when this process is asked to end: they have sessions of their own."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


if __name__ == "__main__":
    end_with_stages()
    sys.exit(main())
