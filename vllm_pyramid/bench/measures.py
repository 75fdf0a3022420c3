# SPDX-License-Identifier: Apache-2.0
"""Runs the measure that an `EngineOptions` describes: its processes, its rounds, its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_pyramid.bench.cost import Machine
from vllm_pyramid.bench.engines import Engines
from vllm_pyramid.bench.options import Capacity, EngineOptions, Latency, Pressure, Throughput
from vllm_pyramid.bench.prepare import Prepared
from vllm_pyramid.bench.profile import StepProfile, table
from vllm_pyramid.bench.progress import Progress
from vllm_pyramid.bench.report import write
from vllm_pyramid.bench.results import make_rows
from vllm_pyramid.bench.rounds import Samples, capacity, decode_windows, whole_jobs
from vllm_pyramid.bench.samples import SampleStore
from vllm_pyramid.bench.server_load import latencies_over_http

__all__ = ["run_measure"]


@dataclass
class _Measured:
    """`about` is written beside the rows; `machine` has rates of 0 where none were measured."""

    samples: Samples
    machine: Machine | None = None
    about: dict[str, Any] = field(default_factory=dict)
    profiles: Sequence[StepProfile] = ()


def run_measure(measure: str, options: EngineOptions, prepared: Prepared, console: Any) -> None:
    """Measure, write the results, and show them."""
    if isinstance(options, Latency):
        made = _latency(options, prepared, console)
    elif isinstance(options, Capacity):
        made = _capacity(prepared, console)
    elif isinstance(options, Throughput) and options.decode_only:
        made = _decode(options, prepared, console)
    else:
        assert isinstance(options, Throughput | Pressure)
        made = _whole_jobs(measure, options, prepared, console)
    machine = made.machine
    rates = None
    if machine is not None and machine.bandwidth:
        rates = {"bandwidth": machine.bandwidth, "flops": machine.flops}
    baseline = prepared.variants[0].label
    about = {"threads": prepared.threads, "machine": rates, **made.about, "baseline": baseline}
    if made.profiles:
        about["profile"] = [profile.as_dict() for profile in made.profiles]
    rows = make_rows(measure, prepared.job, prepared.variants, made.samples, machine)
    write(measure, options, console, rows, about)
    if rates:
        console.print(
            f"allowed: by a streaming read of {rates['bandwidth'] / 1e9:.1f} GB/s and products of "
            f"{rates['flops'] / 1e9:.0f} GFLOP/s, measured in this run; baseline: {baseline}; in "
            "brackets the repetitions' range.",
            highlight=False,
            soft_wrap=True,
        )
    if made.profiles:
        console.print(table(made.profiles))


def _progress(prepared: Prepared, console: Any, rounds: int = 1) -> Progress:
    """For so many rounds, each of a job of every variant."""
    return Progress(console, len(prepared.variants) * prepared.job.num_prompts * rounds)


def _latency(options: Latency, prepared: Prepared, console: Any) -> _Measured:
    rates, repetitions = options.rates, options.repetitions
    with _progress(prepared, console, len(rates) * repetitions) as progress:
        return _Measured(
            latencies_over_http(prepared, rates, options.max_concurrency, repetitions, progress)
        )


def _capacity(prepared: Prepared, console: Any) -> _Measured:
    with (
        _progress(prepared, console) as progress,
        Engines(prepared, share=True, on_stage=progress.stage) as engines,
    ):
        return _Measured(capacity(prepared, engines, progress))


def _decode(options: Throughput, prepared: Prepared, console: Any) -> _Measured:
    with (
        _progress(prepared, console) as progress,
        Engines(prepared, share=False, on_stage=progress.stage) as engines,
    ):
        machine = engines.machine()
        samples, profiles = decode_windows(
            prepared, engines, options.repetitions, progress, profile=options.profile
        )
        return _Measured(samples, machine, profiles=profiles)


def _whole_jobs(
    measure: str, options: Throughput | Pressure, prepared: Prepared, console: Any
) -> _Measured:
    path, identity = options.out / "samples.jsonl", prepared.identity(measure)
    rounds = [(pool, number) for pool in options.pools for number in range(options.repetitions)]
    with SampleStore(path, [identity, rounds], fresh=options.fresh) as store:
        if found := sum(store.has(*which) for which in rounds):
            console.print(
                f"Going on with a run that was interrupted: {found} of {len(rounds)} repetitions "
                "are there (--fresh starts over).",
                highlight=False,
                soft_wrap=True,
            )
        with (
            _progress(prepared, console, len(rounds)) as progress,
            Engines(prepared, share=True, on_stage=progress.stage) as engines,
        ):
            samples = whole_jobs(prepared, engines, store, rounds, progress)
    return _Measured(samples, store.machine, {"measured": store.places})
