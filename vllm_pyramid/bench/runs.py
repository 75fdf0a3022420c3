# SPDX-License-Identifier: Apache-2.0
"""The measures: who is asked what, in which order."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from vllm_pyramid.bench.cost import Machine
from vllm_pyramid.bench.history import History
from vllm_pyramid.bench.measure import Measurement
from vllm_pyramid.bench.plan import WARM_UP_SEED, Plan, Variant
from vllm_pyramid.bench.profile import WINDOWS, StepProfile
from vllm_pyramid.bench.rows import Row, job_row, predicted_rate, row_of, with_ratios
from vllm_pyramid.bench.sessions import Sessions

__all__ = ["Bench"]


@dataclass
class Bench:
    """What all measures need.

    Attributes:
        variants: the first is the baseline that the others are compared with.
        sessions: what measures. repetitions: of each measurement.
        on_stage: told what is being done. on_progress: told of requests that are through.
        with_profiles: whether `decode` also finds out where a step's time goes.
        profiles: what it found; of engines, not of peers.
    """

    plan: Plan
    variants: Sequence[Variant]
    sessions: Sessions
    repetitions: int
    on_stage: Callable[[str], None]
    on_progress: Callable[[int], None]
    with_profiles: bool = False
    profiles: list[StepProfile] = field(default_factory=list)

    @cached_property
    def machine(self) -> Machine:
        """Its rates, measured when they are first asked for."""
        self.on_stage("measuring the machine")
        return self.sessions.machine()

    def jobs(self, measure: str, pools: Sequence[float], history: History) -> list[Row]:
        """The whole job with each pool in turn, A B A B."""
        made = [self._repetitions(pool, history) for pool in pools]
        return [
            row
            for pool, runs in zip(pools, made, strict=True)
            for row in self._rows(measure, pool, history.machine, runs)
        ]

    def _repetitions(self, pool_prompts: float, history: History) -> list[list[Measurement]]:
        """The runs of every variant."""
        runs: list[list[Measurement]] = [[] for _ in self.variants]
        ready = False
        for repetition in range(self.repetitions):
            # All variants of a repetition or none: they are compared with each other.
            measured = history.take(pool_prompts, repetition)
            if measured is not None:
                self.on_progress(self.plan.num_prompts * len(self.variants))
            else:
                machine = self.machine
                if not ready:
                    self._prepare(pool_prompts)
                    ready = True
                prompts = self.plan.prompts(repetition)
                measured = []
                for variant in self.variants:
                    self.on_stage(f"{variant.label}, {repetition + 1} of {self.repetitions}")
                    measured.append(
                        self.sessions.run(variant, prompts, self.plan.output_len, self.on_progress)
                    )
                history.put(pool_prompts, repetition, measured, machine)
            for made, run in zip(runs, measured, strict=True):
                made.append(run)
        return runs

    def _rows(
        self, measure: str, pool: float, machine: Machine, runs: Sequence[Sequence[Measurement]]
    ) -> list[Row]:
        base = _rates(runs[0])
        return [
            with_ratios(
                row_of(measure, self.plan, variant, pool, machine, made), _rates(made), base
            )
            for variant, made in zip(self.variants, runs, strict=True)
        ]

    def _prepare(self, pool_prompts: float) -> None:
        """Set the pools, and let every process do everything once."""
        prompts = self.plan.prompts(WARM_UP_SEED)[:1]
        for variant in self.variants:
            self.on_stage(f"{variant.label}, warm-up")
            self.sessions.limit_pool(variant, pool_prompts)
            self.sessions.run(variant, prompts, min(8, self.plan.output_len), lambda _: None)

    def decode(self) -> list[Row]:
        """Windows of decode steps, A B A B, of as many requests as each has room for.

        Raises:
            ValueError: the requests have too few tokens left for the windows, or their steps
                cannot be profiled.
        """
        if self.with_profiles:
            self._check_profiles()
        machine = self.machine
        filled = self._fill()
        timed = self.repetitions + 1  # the first warms up
        windows = timed + (WINDOWS if self.with_profiles else 0)
        left = min(answer.get("tokens_left", self.plan.output_len) for answer in filled) - 1
        room = min(answer.get("steps_left", left) for answer in filled)
        if left < windows:
            raise ValueError(
                f"--output-len {self.plan.output_len} is too short: behind the prefill of all "
                f"prompts {max(left, 0)} decode steps are left for {windows} windows; ask for at "
                f"least {self.plan.output_len + windows - left}"
            )
        if room < windows:
            raise ValueError(
                f"the requests that came in have room for {room} further steps of the {windows} "
                f"windows before one is thrown out: give another --pool-prompts than "
                f"{self.plan.pool_prompts:g}, or fewer --num-prompts"
            )
        steps = min(left, room) // windows
        rates: list[list[float]] = [[] for _ in self.variants]
        for window in range(timed):
            for variant, made in zip(self.variants, rates, strict=True):
                self.on_stage(f"{variant.label}, window {window} of {self.repetitions}")
                answer = self.sessions.steps(variant, steps)
                if window:
                    made.append(answer["batch"] * steps / sum(answer["seconds"]))
        if self.with_profiles:
            self._profile(filled, WINDOWS * steps)
        base = rates[0]
        rows = []
        for variant, answer, made in zip(self.variants, filled, rates, strict=True):
            self.sessions.clear(variant)
            batch = answer["resident"]
            row = replace(
                self._filled_row("throughput", variant, answer),
                decode_tokens_per_s=statistics.median(made),
                decode_batch=batch,
                repetitions=len(made),
                decode_low=min(made),
                decode_high=max(made),
                predicted_decode_tokens_per_s=predicted_rate(self.plan, variant, machine, batch),
            )
            rows.append(with_ratios(row, {"decode": made}, {"decode": base}))
        return rows

    def _check_profiles(self) -> None:
        """Now, and not behind the windows.

        Raises:
            ValueError: there is nothing to profile, or it cannot be.
        """
        engines = [variant for variant in self.variants if not variant.is_peer]
        if not engines:
            raise ValueError("--profile is for engines of vLLM: name a policy in --policies")
        for variant in engines:
            if reason := self.sessions.profile_refusal(variant):
                raise ValueError(reason)

    def _profile(self, filled: Sequence[dict[str, Any]], steps: int) -> None:
        """Where the time of the engines' steps goes."""
        for variant, answer in zip(self.variants, filled, strict=True):
            if variant.is_peer:
                continue
            self.on_stage(f"{variant.label}, profile")
            made = self.sessions.profile(variant, steps)
            budget = variant.budget or "100%"
            self.profiles.append(StepProfile.of(variant.policy, budget, answer["resident"], made))

    def capacity(self) -> list[Row]:
        """How many requests decode at once; nothing is timed."""
        rows = []
        for variant, answer in zip(self.variants, self._fill(clear=True), strict=True):
            rows.append(self._filled_row("capacity", variant, answer))
        return rows

    def _fill(self, *, clear: bool = False) -> list[dict[str, Any]]:
        prompts = self.plan.prompts(0)
        filled = []
        for variant in self.variants:
            self.on_stage(f"{variant.label}, prefill")
            filled.append(
                self.sessions.fill(variant, prompts, self.plan.output_len, self.on_progress)
            )
            if clear:
                self.sessions.clear(variant)
        return filled

    def _filled_row(self, measure: str, variant: Variant, answer: dict[str, Any]) -> Row:
        return replace(
            job_row(measure, self.plan, variant, self.plan.pool_prompts),
            resident_max=answer["resident"],
            to_their_end=answer.get("to_their_end"),
            before_queueing=answer.get("before_queueing"),
            decode_blocks=answer.get("blocks"),
            peak_blocks=answer.get("peak_blocks"),
        )


def _rates(runs: Sequence[Measurement]) -> dict[str, list[float | None]]:
    return {
        "output": [run.output_tokens_per_s for run in runs],
        "decode": [run.decode_tokens_per_s for run in runs],
        "ttft": [run.ttft_ms[0] for run in runs],
        "tpot": [run.tpot_ms[0] for run in runs],
    }
