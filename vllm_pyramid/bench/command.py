# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid bench`: its arguments, its progress display and its output."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm_pyramid
from vllm_pyramid.bench.arguments import add_arguments
from vllm_pyramid.command_parts import (
    check_writable,
    has_matplotlib,
    names,
    numbers,
    progress_bar,
)
from vllm_pyramid.config import parse_engine_args

if TYPE_CHECKING:
    from vllm_pyramid.bench.plan import Plan, Variant
    from vllm_pyramid.bench.rows import Row

__all__ = ["add_command"]

BUILT_IN = "built-in"


def add_command(commands: Any) -> None:
    """Add the sub-command, with its own sub-commands, to the parser of `vllm-pyramid`."""
    parser = commands.add_parser(
        "bench",
        help="measure throughput, capacity and latency side by side",
        description="Measures policies side by side: the same prompts, the same cache memory, in "
        "turns. The default model has random weights, so nothing is downloaded.",
    )
    measures = parser.add_subparsers(dest="measure", required=True, metavar="MEASURE")
    add_arguments(measures)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Entry point of the sub-command; 0 on success.

    Raises:
        ValueError: something that was asked for cannot be.
    """
    from rich.console import Console

    console = Console()
    if args.measure == "cost":
        return _run_cost(args, console)
    check_writable(args.out, (args.out / "samples.jsonl", args.json, args.csv))
    if args.measure == "scheduler":
        return _run_scheduler(args, console)
    return _run_engines(args, console)


def _run_engines(args: argparse.Namespace, console: Any) -> int:
    from vllm_pyramid.child import ChildError, orderly_termination

    if args.repetitions < 1:
        raise ValueError(f"--repetitions must be at least 1, not {args.repetitions}")
    with tempfile.TemporaryDirectory(prefix="vllm-pyramid-") as folder:
        try:
            with orderly_termination():
                plan, model, random = _plan(args, Path(folder))
                variants = _variants(args, plan)
                measure = _latency if args.measure == "latency" else _measure
                rows, about = measure(args, console, plan, variants, model, random)
        except ChildError as error:
            raise ValueError(str(error)) from error
        except KeyboardInterrupt:
            console.print(f"Interrupted. What is finished is in {args.out}.")
            return 130
    base = rows[0]
    _write(args, console, rows, {**about, "baseline": base.label})
    if machine := about.get("machine"):
        console.print(
            f"allowed: by a streaming read of {machine['bandwidth'] / 1e9:.1f} GB/s and products "
            f"of {machine['flops'] / 1e9:.0f} GFLOP/s, measured in this run; baseline: "
            f"{base.label}; in brackets the repetitions' range.",
            highlight=False,
            soft_wrap=True,
        )
    return 0


def _plan(args: argparse.Namespace, folder: Path) -> tuple[Plan, str, bool]:
    """The job, the model for vLLM, and whether its weights are made up."""
    from vllm_pyramid.bench.plan import Plan
    from vllm_pyramid.bench.shapes import SHAPES, named_shape, shape_of_config, write_model

    random = args.model in SHAPES
    if random:
        shape = named_shape(args.model, args.layers)
        write_model(shape, folder)
        model = str(folder)
    else:
        if args.layers is not None:
            raise ValueError(f"--layers is for the shapes {', '.join(SHAPES)}, not {args.model!r}")
        from vllm_pyramid.demo import model_path

        model = str(model_path()) if args.model == BUILT_IN else args.model
        shape = shape_of_config(model)
    pool = args.pool_prompts
    if args.measure == "pressure":
        pool = max(_fractions(args.pools, "--pools"))
    plan = Plan(
        shape=shape,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        num_prompts=args.num_prompts,
        pool_prompts=args.num_prompts if pool is None else pool,
        engine_args=parse_engine_args(args.engine_args),
    )
    return plan, model, random


def _fractions(text: str, what: str) -> tuple[float, ...]:
    found = []
    for name in names(text, what):
        try:
            value = float(name)
        except ValueError:
            value = 0.0
        if not value > 0:
            raise ValueError(f"{what}: {name!r} is not a number above 0")
        found.append(value)
    return tuple(found)


def _variants(args: argparse.Namespace, plan: Plan) -> list[Variant]:
    from vllm_pyramid.bench.plan import KVPRESS, variants_of

    policies = names(args.policies, "--policies")
    variants = variants_of(policies, names(args.budgets, "--budgets"), plan.prompt_len)
    peers = [variant for variant in variants if variant.is_peer]
    if peers and args.measure != "throughput":
        raise ValueError(
            f"{peers[0].policy} generates outside of vLLM: it has no pool, queue or server, and "
            "takes part in `bench throughput` alone"
        )
    if any(peer.policy.startswith(KVPRESS) for peer in peers) and not args.peer_python:
        raise ValueError(
            "kvpress needs another Transformers than vLLM: give --peer-python PATH, the Python of "
            "an environment with kvpress 0.5.5 (scripts/kvpress_parity/run.sh makes one in "
            "build/kvpress-venv)"
        )
    if args.peer_python and not os.access(args.peer_python, os.X_OK):
        raise ValueError(f"--peer-python {args.peer_python} is no program that can be run")
    return variants


def _threads(args: argparse.Namespace) -> int | None:
    """Of each engine; None where a GPU computes."""
    import torch

    from vllm_pyramid.bench.plan import default_threads

    if torch.cuda.is_available():
        if args.threads is not None:
            raise ValueError("--threads is for engines on the CPU; here a GPU computes")
        return None
    return default_threads() if args.threads is None else int(args.threads)


def _measure(
    args: argparse.Namespace,
    console: Any,
    plan: Plan,
    variants: Sequence[Variant],
    model: str,
    random: bool,
) -> tuple[list[Row], dict[str, Any]]:
    """`throughput`, `capacity` and `pressure`: engines in processes of their own."""
    from dataclasses import asdict

    from vllm_pyramid.bench.runs import Bench
    from vllm_pyramid.bench.sessions import Sessions
    from vllm_pyramid.store import Store, identity_of_model

    threads = _threads(args)
    pools = _fractions(args.pools, "--pools") if args.measure == "pressure" else ()
    if pools and min(pools) < 1:
        raise ValueError("--pools: a pool must hold at least one whole request: give 1 or more")
    stored = args.measure == "pressure" or (args.measure == "throughput" and not args.decode_only)
    jobs = len(variants) * plan.num_prompts
    total = jobs * (args.repetitions * max(1, len(pools)) if stored else 1)
    identity = [identity_of_model(args.model if random else model), args.measure, threads]
    with (
        closing(Store(args.out / "samples.jsonl", fresh=args.fresh)) as store,
        progress_bar(console) as progress,
    ):
        bar = progress.add_task("starting", total=total)

        def on_stage(text: str) -> None:
            progress.update(bar, description=text)

        bench = Bench(
            plan,
            variants,
            args.repetitions,
            store,
            identity,
            on_stage,
            lambda count: progress.advance(bar, count),
        )
        measure: Callable[[], list[Row]] = {
            "throughput": bench.decode if args.decode_only else bench.throughput,
            "capacity": bench.capacity,
            "pressure": lambda: bench.pressure(pools),
        }[args.measure]
        if stored and bench.is_known(pools or (plan.pool_prompts,)):
            rows = measure()
        else:
            sessions = Sessions(
                plan,
                variants,
                model,
                random=random,
                share=args.measure != "throughput" or not args.decode_only,
                threads=threads,
                peer_python=args.peer_python,
                on_stage=on_stage,
            )
            with sessions:
                bench.use(sessions)
                rows = measure()
        machine = asdict(bench.machine)
    return rows, {"threads": threads, "machine": machine if machine["bandwidth"] else None}


def _latency(
    args: argparse.Namespace,
    console: Any,
    plan: Plan,
    variants: Sequence[Variant],
    model: str,
    random: bool,
) -> tuple[list[Row], dict[str, Any]]:
    from vllm_pyramid.bench.latency import latency

    rates = _fractions(args.rates, "--rates")
    threads = _threads(args)
    total = len(rates) * args.repetitions * len(variants) * plan.num_prompts
    with progress_bar(console) as progress:
        bar = progress.add_task("starting", total=total)
        rows = latency(
            plan,
            variants,
            model,
            random=random,
            rates=rates,
            concurrency=args.max_concurrency,
            repetitions=args.repetitions,
            threads=threads,
            on_stage=lambda text: progress.update(bar, description=text),
            on_progress=lambda count: progress.advance(bar, count),
        )
    return rows, {"threads": threads}


def _run_scheduler(args: argparse.Namespace, console: Any) -> int:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    layers = numbers(args.layers, "--layers", 1)
    requests = numbers(args.requests, "--requests", 1)
    if args.steps < 1 or args.prompt_len < 64:
        raise ValueError("--steps must be at least 1 and --prompt-len at least 64")
    rows: list[Any] = []
    with progress_bar(console) as progress:
        bar = progress.add_task("starting", total=len(layers) * len(requests) * args.steps)
        from vllm_pyramid.bench.scheduler import scheduler_steps

        for depth in layers:
            for running in requests:
                progress.update(bar, description=f"{depth} layers, {running} requests")
                rows += scheduler_steps(
                    depth, running, args.steps, args.prompt_len, lambda: progress.advance(bar)
                )
    _write(args, console, rows, {})
    return 0


def _run_cost(args: argparse.Namespace, console: Any) -> int:
    from rich.table import Table

    from vllm_pyramid.bench.cost import MACHINES, Machine
    from vllm_pyramid.bench.paper import HEADINGS, as_markdown, cells, paper_rows
    from vllm_pyramid.bench.shapes import SHAPES, named_shape, shape_of_config

    known = args.model in SHAPES
    shape = named_shape(args.model, None) if known else shape_of_config(args.model)
    one = MACHINES[args.machine]
    machine = Machine(one.bandwidth, one.flops, one.memory, args.devices)
    rows = paper_rows(
        shape,
        machine,
        numbers(args.prompt_lens, "--prompt-lens", 16),
        names(args.budgets, "--budgets"),
        args.output_len,
        args.request_rate,
    )
    if args.markdown:
        print(as_markdown(rows), end="")
        return 0
    title = f"{args.model} on {args.devices} x {args.machine}, {args.output_len} tokens out"
    table = Table(title=f"{title}; engines for {args.request_rate:,.0f} requests/s")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    return 0


def _write(
    args: argparse.Namespace, console: Any, rows: Sequence[Any], about: dict[str, Any]
) -> None:
    from vllm_pyramid.bench import pictures
    from vllm_pyramid.bench.report import tables
    from vllm_pyramid.bench.rows import as_csv, as_json

    about = {
        "version": vllm_pyramid.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["vllm-pyramid", *sys.argv[1:]]),
        "processor": _processor(),
        **about,
    }
    for path in (args.out / f"{args.measure}.json", args.json):
        if path is not None:
            path.write_text(as_json(rows, about), encoding="utf-8")
    for path in (args.out / f"{args.measure}.csv", args.csv):
        if path is not None:
            path.write_text(as_csv(rows), encoding="utf-8")
    for table in tables(args.measure, rows):
        console.print(table)
    drawn: list[Path] = []
    if not args.no_pictures:
        if has_matplotlib():
            drawn = pictures.draw(args.measure, rows, args.out)
        else:
            console.print(
                "No pictures: they need matplotlib (pip install 'vllm-pyramid\\[bench]')."
            )
    written = [f"{args.measure}.json", f"{args.measure}.csv", *(path.name for path in drawn)]
    console.print(f"In {args.out}: {', '.join(written)}.", highlight=False, soft_wrap=True)


def _processor() -> str:
    """The processor's name, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"
