# SPDX-License-Identifier: Apache-2.0
"""The measures with engines: all variants alternate, A B A B, so that other load meets all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_pyramid.tools.bench.engines import Engines
from vllm_pyramid.tools.bench.job import WARM_UP_SEED, Variant
from vllm_pyramid.tools.bench.prepare import Prepared, processor
from vllm_pyramid.tools.bench.profile import WINDOWS, step_profile
from vllm_pyramid.tools.bench.samples import Sample, SampleStore
from vllm_pyramid.tools.command_parts import Progress

Samples = list[tuple[Variant, Sample]]


def whole_jobs(
    prepared: Prepared,
    engines: Engines,
    store: SampleStore,
    rounds: Sequence[tuple[float, int]],
    progress: Progress,
) -> Samples:
    """The whole job in each round: with a pool, for the n-th time. What `store` has is used.

    A round has all variants: they are compared with each other.
    """
    job, variants = prepared.job, prepared.variants
    machine, ready = None, None
    samples: Samples = []
    for pool, number in rounds:
        measured = store.load(pool, number)
        if measured is not None:
            progress.advance(job.num_prompts * len(variants))
        else:
            machine = machine or engines.machine()
            if ready != pool:
                _warm_up(prepared, engines, pool, progress)
                ready = pool
            prompts, later, measured = job.prompts(number), job.later_turns(number), []
            for variant in variants:
                progress.stage(f"{variant.label}, {number + 1}")
                sample = engines.run(variant, prompts, job.output_len, progress.advance, later)
                measured.append(sample | {"pool_prompts": pool})
            store.save(pool, number, measured, processor(), machine)
        samples += zip(variants, measured, strict=True)
    return samples


def _warm_up(prepared: Prepared, engines: Engines, pool: float, progress: Progress) -> None:
    """Set the pools, and let every process do everything once."""
    prompts = prepared.job.prompts(WARM_UP_SEED)[:1]
    for variant in prepared.variants:
        progress.stage(f"{variant.label}, warm-up")
        engines.limit_pool(variant, pool)
        engines.run(variant, prompts, min(8, prepared.job.output_len), lambda _: None)


def capacity(prepared: Prepared, engines: Engines, progress: Progress) -> Samples:
    """How many requests decode at once. Nothing is timed."""
    return _fill(prepared, engines, progress, clear=True)


def _fill(prepared: Prepared, engines: Engines, progress: Progress, *, clear: bool) -> Samples:
    filled = []
    for variant in prepared.variants:
        progress.stage(f"{variant.label}, prefill")
        sample = engines.fill(variant, progress.advance)
        filled.append((variant, sample | {"pool_prompts": prepared.job.pool_prompts}))
        if clear:
            engines.ask(variant, "clear")
    return filled


def decode_windows(
    prepared: Prepared, engines: Engines, repetitions: int, progress: Progress, *, profile: bool
) -> tuple[Samples, list[dict[str, Any]]]:
    """Windows of decode steps, of as many requests as each variant admits.

    Args:
        profile: find out where a step's time goes too, of engines but not of peers.

    Raises:
        ValueError: the requests have too few tokens left for the windows, or the steps cannot be
            profiled.
    """
    profiled = [variant for variant in prepared.variants if profile and not variant.is_peer]
    if profile and not profiled:
        raise ValueError("--profile is for engines of vLLM: name a policy in --policies")
    for variant in profiled:  # before the windows, not after them
        if reason := engines.ask(variant, "profile_refusal"):
            raise ValueError(reason)
    filled = _fill(prepared, engines, progress, clear=False)
    timed = repetitions + 1  # the first one warms up
    steps = _window_steps(prepared, filled, timed + (WINDOWS if profile else 0))
    samples = []
    for window in range(timed):
        for variant, sample in filled:
            progress.stage(f"{variant.label}, window {window} of {repetitions}")
            answer = engines.ask(variant, "steps", count=steps)
            rate = answer["batch"] * steps / sum(answer["seconds"])
            decode = {"decode_tokens_per_s": rate, "decode_batch": answer["batch"]}
            if window:
                samples.append((variant, sample | decode))
    profiles = []
    for variant, sample in filled:
        if variant in profiled:
            progress.stage(f"{variant.label}, profile")
            made = engines.ask(variant, "profile", count=WINDOWS * steps)
            profiles.append(step_profile(variant, sample["resident_max"], made))
        engines.ask(variant, "clear")
    return samples, profiles


def _window_steps(prepared: Prepared, filled: Sequence[tuple[Variant, Any]], windows: int) -> int:
    """Steps of each of the windows, in which no request finishes or is preempted."""
    job = prepared.job
    left = min(sample.get("tokens_left", job.output_len) for _, sample in filled) - 1
    room = min(sample.get("steps_left", left) for _, sample in filled)
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
