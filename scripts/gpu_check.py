# SPDX-License-Identifier: Apache-2.0
"""Runs everything that a GPU is needed for, and writes one JSON file.

    scripts/gpu_check.sh [--json FILE] [--logs FOLDER] [--jobs N] [--only STAGE ...] [--dry-run]

Stages (each in a process of its own, with a time limit):
- numerics: every Triton kernel, compiled, against the reference in float64 (pytest -m gpu);
- kernels: their times against the copy bandwidth measured in the same run;
- engine-*: answers of `full` agree with those of vLLM without a policy (what that means where
  kernels may round otherwise: scripts/gpu_agreement.py), and `pyramidkv` evicts and gives blocks
  back, for each attention backend, eagerly and with CUDA graphs, on both of vLLM's model runners,
  and in engine-fp8-* with an 8-bit cache;
- thinning-*: `pyramidinfer` on both runners: where it keeps all its answers agree with those of
  `full`, and in float32 its survivors and answers with the same method in Transformers;
- start-*: engines that start as a user's do, without a fixed size of the cache (graphs are captured
  for their memory and taken down first): in one process, with an engine core of its own, on two
  GPUs;
- sync-check*: policies of all kinds with an error for each wait for the device in a step and, as
  for every engine core of its own, for each kernel that is compiled behind the warm-up;
- host-values, host-values-sync: the same for `kcache` and for survivors whose V is in host memory;
- throughput-*, decode-*: `vllm-pyramid bench throughput` on the shape of Llama 3 8B with random
  weights: stock vLLM and policies side by side in the same amount of cache, `auto` with prompts of
  1k and 8k tokens, `pyramidkv` with 8k and 32k, `select` with 8k to 128k. What runs at once is less
  on a card of 78 GiB than on one of 120 and more;
- http: the same shape behind two servers with vLLM's defaults (scripts/gpu_http.py);
- fp8-*: throughput and http with 8-bit caches.

A stage is `passed`, `failed` or, only where the device lacks what it needs, `skipped` with the
reason; a stage that fails ends no other. At the end there is one table, and the exit status is 1 if
any failed. With `--only` and `--missing` (those alone that have not passed), the stages that FILE
already holds from the same device and commit are kept, so a run may be cut into several. With
`--jobs`, stages that take no times run beside each other, and the others alone after them;
PYTEST_ADDOPTS="-n 4" splits the numerics among processes.

Most stages have run on one H200 (lab/results/h200.md).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from importlib import metadata
from pathlib import Path
from typing import Any

# The folder of this file is where Python looks first.
from gpu_processes import Processes, exit_when_asked
from gpu_stages import MATRIX, STAGES, Stage, fitted, lacking

ROOT = Path(__file__).resolve().parents[1]
LOG_TAIL = 4000  # characters of a failed stage's output that go into the JSON
PROCESSES = Processes()


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


def run_stage(stage: Stage, folder: Path) -> dict[str, Any]:
    """Run a stage to its end or its limit."""
    output, log = folder / f"{stage.name}.out", folder / f"{stage.name}.log"
    output.unlink(missing_ok=True)  # of an earlier run with the same folder of logs
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    # Stages that run beside each other would write at once; those that run alone compile once.
    cache = "alone" if stage.alone else stage.name
    environment["VLLM_CACHE_ROOT"] = str(folder / f"{cache}.cache")
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


# What stages that measure speed compare: over HTTP, in decode windows, in whole jobs.
RATIOS = ("speed_ratio", "decode_ratio", "output_ratio")
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
        last = entry["result"]["rows"][-1]
        ratio = next(last[key] for key in RATIOS if last.get(key) is not None)
        return f"{last.get('variant') or last['policy']}: {ratio:.3g} of the first's speed"
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
    parser.add_argument("--missing", action="store_true", help="those alone that have not passed")
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
    if (options.only or options.missing) and options.json.exists():
        before = json.loads(options.json.read_text())
        if all(before.get(key) == report[key] for key in ("device", "commit")):
            report["stages"] = before["stages"]
    if options.missing:
        stages = report["stages"]
        chosen = [s for s in chosen if stages.get(s.name, {}).get("status") != "passed"]
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
            able.append(fitted(stage, report["device"]["memory_gib"]))
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
    needed = {stage.name for stage in STAGES if not stage.measures}
    if not failed and needed <= report["stages"].keys():
        print(f"add to RUNS in vllm_pyramid/frontend/gpu_runs.py: {record(report['device'])}")
    return 1 if failed else 0


if __name__ == "__main__":
    exit_when_asked()  # and end the stages, which have sessions of their own
    sys.exit(main())
