# SPDX-License-Identifier: Apache-2.0
"""Runs the measure that an `EngineOptions` describes: its processes, its rounds, its results."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from vllm_pyramid.tools.bench.cost import Machine
from vllm_pyramid.tools.bench.engines import Engines
from vllm_pyramid.tools.bench.options import EngineOptions, Latency, Prefix, Pressure, Throughput
from vllm_pyramid.tools.bench.prepare import Prepared
from vllm_pyramid.tools.bench.profile import table
from vllm_pyramid.tools.bench.report import say, write
from vllm_pyramid.tools.bench.results import make_rows
from vllm_pyramid.tools.bench.rounds import Samples, capacity, decode_windows, whole_jobs
from vllm_pyramid.tools.bench.samples import SampleStore
from vllm_pyramid.tools.bench.server_load import latencies_over_http
from vllm_pyramid.tools.command_parts import Progress

# Samples, the machine's rates if they were measured, and what is written beside the rows.
Measured = tuple[Samples, Machine | None, dict[str, Any]]


def run_measure(measure: str, options: EngineOptions, prepared: Prepared, console: Any) -> None:
    """Measure, write the results, and show them."""
    rounds = len(options.rounds) if options.resumable else 1
    if isinstance(options, Latency):
        rounds = options.repetitions * len(options.rates)
    total = len(prepared.variants) * prepared.job.num_prompts * rounds
    with ExitStack() as stack:
        if isinstance(options, Throughput | Pressure | Prefix) and options.resumable:
            identity = [prepared.identity(measure), options.rounds]
            store = SampleStore(options.out / "samples.jsonl", identity, fresh=options.fresh)
            stack.enter_context(store)  # until the results are written
            samples, machine, found = _whole_jobs(options, prepared, store, console, total)
        else:
            with Progress(console, total) as progress:
                samples, machine, found = _at_once(options, prepared, progress)
        rates = {"bandwidth": machine.bandwidth, "flops": machine.flops} if machine else None
        baseline = prepared.variants[0].label
        about = {"threads": prepared.threads, "machine": rates, **found, "baseline": baseline}
        rows = make_rows(measure, prepared.job, prepared.variants, samples, machine)
        write(measure, options, console, rows, about)
    if machine:
        say(
            console,
            f"allowed: by a streaming read of {machine.bandwidth / 1e9:.1f} GB/s and products of "
            f"{machine.flops / 1e9:.0f} GFLOP/s, measured in this run; baseline: {baseline}; in "
            "brackets the repetitions' range.",
        )
    if "profile" in found:
        console.print(table(found["profile"]))


def _at_once(options: EngineOptions, prepared: Prepared, progress: Progress) -> Measured:
    """The measures of which an interrupted run keeps nothing."""
    repetitions = options.repetitions
    if isinstance(options, Latency):
        rates, most = options.rates, options.max_concurrency
        return latencies_over_http(prepared, rates, most, repetitions, progress), None, {}
    share = not isinstance(options, Throughput)  # decode windows hold all requests at once
    with Engines(prepared, share=share, on_stage=progress.stage) as engines:
        if not isinstance(options, Throughput):
            return capacity(prepared, engines, progress), None, {}
        machine = engines.machine()
        samples, profiles = decode_windows(
            prepared, engines, repetitions, progress, profile=options.profile
        )
        return samples, machine, {"profile": profiles} if profiles else {}


def _whole_jobs(
    options: EngineOptions, prepared: Prepared, store: SampleStore, console: Any, total: int
) -> Measured:
    """The measures that go on after an interruption."""
    if found := sum(store.has(*which) for which in options.rounds):
        say(
            console,
            f"Going on with a run that was interrupted: {found} of {len(options.rounds)} "
            "repetitions are there (--fresh starts over).",
        )
    with (
        Progress(console, total) as progress,
        Engines(prepared, share=True, on_stage=progress.stage) as engines,
    ):
        samples = whole_jobs(prepared, engines, store, options.rounds, progress)
    return samples, store.machine, {"measured": store.places}
