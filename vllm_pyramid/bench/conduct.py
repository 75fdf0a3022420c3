# SPDX-License-Identifier: Apache-2.0
"""Carries out what was asked for, with engines or servers, under a progress bar."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from vllm_pyramid.bench import sessions
from vllm_pyramid.bench.asked import fractions, identity_of, pools_of, threads_of
from vllm_pyramid.bench.cost import Machine
from vllm_pyramid.bench.history import History
from vllm_pyramid.bench.latency import latency
from vllm_pyramid.bench.output import processor
from vllm_pyramid.bench.plan import Plan, Variant
from vllm_pyramid.bench.rows import Row
from vllm_pyramid.bench.runs import Bench
from vllm_pyramid.command_parts import progress_bar
from vllm_pyramid.store import Store

__all__ = ["engines", "is_kept", "servers"]

Made = tuple[list[Row], dict[str, Any]]  # rows, and what to say about them


def is_kept(args: argparse.Namespace) -> bool:
    """Whether an interrupted run goes on: where repetitions are whole jobs."""
    return args.measure == "pressure" or (args.measure == "throughput" and not args.decode_only)


def engines(
    args: argparse.Namespace,
    console: Any,
    plan: Plan,
    variants: Sequence[Variant],
    model: str,
    random: bool,
) -> Made:
    """`throughput`, `capacity` and `pressure`: engines in processes of their own."""
    threads = threads_of(args)
    if not is_kept(args):
        if args.profile and threads is None:
            raise ValueError(
                "--profile times operators as they return, which means nothing on a GPU: use "
                "vLLM's own profiler there (--profiler-config)"
            )
        rows, bench = _with_sessions(args, console, plan, variants, model, random, None)
        # `capacity` times nothing, and needs no rates.
        machine = bench.machine if args.decode_only else None
        about: dict[str, Any] = {"threads": threads, "machine": _rates(machine)}
        if args.profile:
            about["profile"] = bench.profiles
        return rows, about
    pools = pools_of(args) if args.measure == "pressure" else (plan.pool_prompts,)
    identity = identity_of(args, plan, variants, args.model if random else model)
    with closing(Store(args.out / "samples.jsonl")) as store:
        history = History(
            store, identity, pools, args.repetitions, processor=processor(), fresh=args.fresh
        )
        if history.found:
            console.print(
                f"Going on with the run of {history.begun[:16]}, which was interrupted: "
                f"{history.found} of {len(pools) * args.repetitions} repetitions are there "
                "(--fresh begins anew).",
                highlight=False,
                soft_wrap=True,
            )
        rows, _ = _with_sessions(args, console, plan, variants, model, random, (history, pools))
    about = {"threads": threads, "machine": _rates(history.machine)}
    return rows, {**about, "begun": history.begun, "measured": history.places}


def _rates(machine: Machine | None) -> dict[str, float] | None:
    """As they are written; None where no engine of ours has measured them."""
    if machine is None or not machine.bandwidth:
        return None
    return {"bandwidth": machine.bandwidth, "flops": machine.flops}


def _with_sessions(
    args: argparse.Namespace,
    console: Any,
    plan: Plan,
    variants: Sequence[Variant],
    model: str,
    random: bool,
    kept: tuple[History, Sequence[float]] | None,
) -> tuple[list[Row], Bench]:
    """Start everything and measure."""
    rounds = args.repetitions * len(kept[1]) if kept else 1
    with progress_bar(console) as progress:
        bar = progress.add_task("starting", total=len(variants) * plan.num_prompts * rounds)

        def on_stage(text: str) -> None:
            progress.update(bar, description=text)

        started = sessions.Sessions(
            plan,
            variants,
            model,
            random=random,
            share=not args.decode_only,
            threads=threads_of(args),
            peer_python=args.peer_python,
            on_stage=on_stage,
        )
        with started:
            bench = Bench(
                plan,
                variants,
                started,
                args.repetitions,
                on_stage,
                lambda count: progress.advance(bar, count),
                with_profiles=args.profile,
            )
            if kept:
                history, pools = kept
                return bench.jobs(args.measure, pools, history), bench
            return bench.capacity() if args.measure == "capacity" else bench.decode(), bench


def servers(
    args: argparse.Namespace,
    console: Any,
    plan: Plan,
    variants: Sequence[Variant],
    model: str,
    random: bool,
) -> Made:
    """`latency`: servers, under a client of vLLM's."""
    rates = fractions(args.rates, "--rates")
    threads = threads_of(args)
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
