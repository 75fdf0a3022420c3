# SPDX-License-Identifier: Apache-2.0
"""The measures with engines: all variants alternate, A B A B, so that other load affects all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_pyramid.tools.bench.job import WARM_UP_SEED, Variant
from vllm_pyramid.tools.bench.options import EngineOptions, Throughput
from vllm_pyramid.tools.bench.prepare import Prepared
from vllm_pyramid.tools.bench.processes import Engines
from vllm_pyramid.tools.bench.report import Samples, make_rows, write
from vllm_pyramid.tools.command_parts import Progress


def run_measure(measure: str, options: EngineOptions, prepared: Prepared, console: Any) -> None:
    """Measure, write the results, and show them."""
    steady = isinstance(options, Throughput) and options.decode_only
    rounds = 1 if steady else len(options.rounds)
    total = len(prepared.variants) * prepared.job.num_prompts * rounds
    # Decode windows hold the requests of all variants at once.
    with (
        Progress(console, total) as progress,
        Engines(prepared, share=not steady, on_stage=progress.stage) as engines,
    ):
        if steady:
            samples = decode_windows(prepared, engines, options.repetitions, progress)
        else:
            samples = whole_jobs(prepared, engines, options.rounds, progress)
    about = {"threads": prepared.threads, "baseline": prepared.variants[0].label}
    write(measure, options, make_rows(measure, prepared.job, prepared.variants, samples), about)


def whole_jobs(
    prepared: Prepared, engines: Engines, rounds: Sequence[tuple[float, int]], progress: Progress
) -> Samples:
    """Run the whole job in each round (a pool and the number of a repetition), variant by variant.

    When the pool changes, every process runs one short request first.
    """
    job, ready = prepared.job, None
    samples: Samples = []
    for pool, number in rounds:
        if ready != pool:
            warm_up = job.prompts(WARM_UP_SEED)[:1]
            for variant in prepared.variants:
                progress.stage(f"{variant.label}, warm-up")
                engines.limit_pool(variant, pool)
                engines.ask(variant, "run", **_job_of(variant, warm_up, min(8, job.output_len)))
            ready = pool
        prompts, later = job.prompts(number), job.later_turns(number)
        for variant in prepared.variants:
            progress.stage(f"{variant.label}, {number + 1}")
            task = _job_of(variant, prompts, job.output_len)
            task |= {"later": later, "concurrency": job.concurrency}
            task["resume"] = job.resume and not variant.is_stock
            sample = engines.ask(variant, "run", progress.advance, **task)
            sample |= {"pool_prompts": pool, "read_share": _read_share(variant, sample)}
            samples.append((variant, sample))
    return samples


def _job_of(variant: Variant, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    return {"prompts": prompts, "max_tokens": max_tokens, "budget": variant.budget}


def fill(prepared: Prepared, engines: Engines, progress: Progress) -> Samples:
    """Let as many requests decode as each variant admits. Nothing is timed."""
    filled = []
    for variant in prepared.variants:
        progress.stage(f"{variant.label}, prefill")
        job = _job_of(variant, prepared.job.prompts(0), prepared.job.output_len)
        sample = engines.ask(variant, "fill", progress.advance, **job)
        filled.append((variant, sample | {"pool_prompts": prepared.job.pool_prompts}))
    return filled


def decode_windows(
    prepared: Prepared, engines: Engines, repetitions: int, progress: Progress
) -> Samples:
    """Time windows of decode steps, of as many requests as each variant admits.

    ValueError: the requests have too few tokens left for the windows.
    """
    filled = fill(prepared, engines, progress)
    timed = repetitions + 1  # the first one warms up
    steps = _window_steps(prepared, filled, timed)
    samples: Samples = []
    for window in range(timed):
        for variant, sample in filled:
            progress.stage(f"{variant.label}, window {window} of {repetitions}")
            answer = engines.ask(variant, "steps", count=steps)
            rate = answer["batch"] * steps / sum(answer["seconds"])
            decode = {"decode_tokens_per_s": rate, "decode_batch": answer["batch"]}
            decode["read_share"] = _read_share(variant, answer)
            if window:
                samples.append((variant, sample | decode))
    return samples


def _read_share(variant: Variant, answer: dict[str, Any]) -> float | None:
    """Return which share of the pages that generated tokens saw they read; None without a choice.

    ValueError: the policy selects pages, and all were read.
    """
    read, visible = answer["pages_read"], answer["pages_visible"]
    if not visible:
        return None
    if read == visible:
        raise ValueError(
            f"{variant.label} selects pages, and generated tokens read all {visible} that they "
            "saw: give longer prompts, or a smaller budget in the policy's section `attend`"
        )
    return float(read / visible)


def _window_steps(prepared: Prepared, filled: Sequence[tuple[Variant, Any]], windows: int) -> int:
    """Return the steps of each window, in which no request finishes or is preempted."""
    job = prepared.job
    left = min(sample["tokens_left"] for _, sample in filled) - 1
    room = min(sample["steps_left"] for _, sample in filled)
    if left < windows:
        raise ValueError(
            f"--output-len {job.output_len} is too short: after the prefill of all prompts "
            f"{max(left, 0)} decode steps are left for {windows} windows; give at least "
            f"{job.output_len + windows - left}"
        )
    if room < windows:
        raise ValueError(
            f"the admitted requests have room for {room} further steps of the {windows} windows "
            f"before one is preempted: give another --pool-prompts than {job.pool_prompts:g}, or "
            "fewer --num-prompts"
        )
    return min(left, room) // windows
