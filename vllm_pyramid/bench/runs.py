# SPDX-License-Identifier: Apache-2.0
"""The measures: who is asked what, in which order."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_pyramid.bench.cost import Machine
from vllm_pyramid.bench.measure import Measurement
from vllm_pyramid.bench.plan import Plan, Variant
from vllm_pyramid.bench.rows import Row, job_row, predicted_rate, row_of, with_ratios
from vllm_pyramid.bench.sessions import Sessions
from vllm_pyramid.store import Store, key_of

__all__ = ["Bench"]


@dataclass
class Bench:
    """What all measures need.

    Attributes:
        variants: the first is the baseline that the others are compared with.
        repetitions: of each measurement. store: of earlier ones.
        identity: what a stored result depends on beside the job.
        on_stage: told what is being done. on_progress: told of requests that are through.
    """

    plan: Plan
    variants: Sequence[Variant]
    repetitions: int
    store: Store
    identity: Any
    on_stage: Callable[[str], None]
    on_progress: Callable[[int], None]
    _sessions: Sessions | None = None

    @property
    def sessions(self) -> Sessions:
        """What measures."""
        assert self._sessions is not None, "nothing was started: everything should be known"
        return self._sessions

    @property
    def machine(self) -> Machine:
        """Its rates, as they were measured with the results."""
        known = self.store.get(key_of(self.identity, "machine"))
        return Machine(**known) if known else Machine(0.0, 0.0)

    def use(self, sessions: Sessions) -> None:
        """Measure with these; the machine's rates come first."""
        self._sessions = sessions
        machine = asdict(sessions.machine())
        self.store.put(key_of(self.identity, "machine"), machine)

    def is_known(self, pools: Sequence[float]) -> bool:
        """Whether earlier runs have measured all jobs with these pools."""
        keys = [self._key(pool, i) for pool in pools for i in range(self.repetitions)]
        return all(self.store.get(key) is not None for key in keys)

    def _key(self, pool_prompts: float, repetition: int) -> str:
        variants = [asdict(variant) for variant in self.variants]
        return key_of(self.identity, variants, asdict(self.plan), pool_prompts, repetition)

    def throughput(self) -> list[Row]:
        """The whole job, A B A B."""
        return self._jobs("throughput", self.plan.pool_prompts)

    def pressure(self, pools: Sequence[float]) -> list[Row]:
        """The whole job with smaller and smaller pools."""
        return [row for pool in pools for row in self._jobs("pressure", pool)]

    def _jobs(self, measure: str, pool_prompts: float) -> list[Row]:
        runs: list[list[Measurement]] = [[] for _ in self.variants]
        ready = False
        for repetition in range(self.repetitions):
            key = self._key(pool_prompts, repetition)
            # All variants of a repetition or none: they are compared with each other.
            if (known := self.store.get(key)) is not None:
                for made, run in zip(runs, known["runs"], strict=True):
                    made.append(Measurement(**run))
                self.on_progress(self.plan.num_prompts * len(self.variants))
                continue
            if not ready:
                self._prepare(pool_prompts)
                ready = True
            prompts = self.plan.prompts(repetition)
            measured = []
            for variant in self.variants:
                self.on_stage(f"{variant.label}, {repetition + 1} of {self.repetitions}")
                run = self.sessions.run(variant, prompts, self.plan.output_len, self.on_progress)
                measured.append(run)
            self.store.put(key, {"runs": [asdict(run) for run in measured]})
            for made, run in zip(runs, measured, strict=True):
                made.append(run)
        base = runs[0]
        return [
            with_ratios(
                row_of(measure, self.plan, variant, pool_prompts, self.machine, made),
                _rates(made),
                _rates(base),
            )
            for variant, made in zip(self.variants, runs, strict=True)
        ]

    def _prepare(self, pool_prompts: float) -> None:
        """Set the pools, and let every process do everything once."""
        prompts = self.plan.prompts(-1)[:1]
        for variant in self.variants:
            self.on_stage(f"{variant.label}, warm-up")
            self.sessions.limit_pool(variant, pool_prompts)
            self.sessions.run(variant, prompts, min(8, self.plan.output_len), lambda _: None)

    def decode(self) -> list[Row]:
        """Windows of decode steps, A B A B, of as many requests as each has room for.

        Raises:
            ValueError: the requests have too few tokens left for the windows.
        """
        filled = self._fill()
        left = min(answer.get("tokens_left", self.plan.output_len) for answer in filled) - 1
        steps = left // (self.repetitions + 1)
        if steps < 1:
            raise ValueError(
                f"--output-len {self.plan.output_len} is too short: behind the prefill of all "
                f"prompts {max(left, 0)} decode steps are left for {self.repetitions + 1} windows; "
                f"ask for at least {self.plan.output_len + self.repetitions + 1 - left}"
            )
        rates: list[list[float]] = [[] for _ in self.variants]
        for window in range(self.repetitions + 1):  # the first warms up
            for variant, made in zip(self.variants, rates, strict=True):
                self.on_stage(f"{variant.label}, window {window} of {self.repetitions}")
                answer = self.sessions.steps(variant, steps)
                if window:
                    made.append(answer["batch"] * steps / sum(answer["seconds"]))
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
                predicted_decode_tokens_per_s=predicted_rate(
                    self.plan, variant, self.machine, batch
                ),
            )
            rows.append(with_ratios(row, {"decode": made}, {"decode": base}))
        return rows

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
            before_queueing=answer.get("before_queueing"),
            decode_blocks=answer.get("blocks"),
        )


def _rates(runs: Sequence[Measurement]) -> dict[str, list[float | None]]:
    return {
        "output": [run.output_tokens_per_s for run in runs],
        "decode": [run.decode_tokens_per_s for run in runs],
        "ttft": [run.ttft_ms[0] for run in runs],
        "tpot": [run.tpot_ms[0] for run in runs],
    }
