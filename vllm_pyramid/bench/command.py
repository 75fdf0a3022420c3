# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid bench`: from the command line to the measure that was asked for."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from vllm_pyramid.bench.arguments import add_arguments
from vllm_pyramid.command_parts import check_writable, names, numbers, progress_bar

__all__ = ["add_command"]


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
    from vllm_pyramid.bench import conduct
    from vllm_pyramid.bench.asked import plan_of, variants_asked
    from vllm_pyramid.bench.output import write
    from vllm_pyramid.bench.profile import table
    from vllm_pyramid.child_process import ChildError, orderly_termination

    if args.repetitions < 1:
        raise ValueError(f"--repetitions must be at least 1, not {args.repetitions}")
    if args.profile and not args.decode_only:
        raise ValueError("--profile looks into decode steps: give --decode-only too")
    with tempfile.TemporaryDirectory(prefix="vllm-pyramid-") as folder:
        try:
            with orderly_termination():
                plan, model, random = plan_of(args, Path(folder))
                variants = variants_asked(args, plan)
                measure = conduct.servers if args.measure == "latency" else conduct.engines
                rows, about = measure(args, console, plan, variants, model, random)
        except ChildError as error:
            raise ValueError(str(error)) from error
        except KeyboardInterrupt:
            kept = f"the same command goes on with what is finished, in {args.out}"
            console.print(
                f"Interrupted: {kept if conduct.is_kept(args) else 'nothing of it is kept'}."
            )
            return 130
    base = rows[0]
    profiles = about.pop("profile", [])
    if profiles:
        about["profile"] = [one.as_dict() for one in profiles]
    write(args, console, rows, {**about, "baseline": base.label})
    if machine := about.get("machine"):
        console.print(
            f"allowed: by a streaming read of {machine['bandwidth'] / 1e9:.1f} GB/s and products "
            f"of {machine['flops'] / 1e9:.0f} GFLOP/s, measured in this run; baseline: "
            f"{base.label}; in brackets the repetitions' range.",
            highlight=False,
            soft_wrap=True,
        )
    if profiles:
        console.print(table(profiles))
    return 0


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
    from vllm_pyramid.bench.output import write

    write(args, console, rows, {})
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
