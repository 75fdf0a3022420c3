# SPDX-License-Identifier: Apache-2.0
"""What holds for every policy, on one engine that is running: prefixes and turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.engine.bench import SALTS, Bench, fresh, small_pool, whole_blocks
from tests.engine.conversations import Rows, kept_at_end
from tests.engine.matrix import BLOCK, WHOLE
from tests.engine.support import Job, Outcome, greedy, kept_at_evictions, random_prompts

ANSWER = 18  # tokens of a turn


def shared(bench: Bench, salt: str | None) -> list[Outcome]:
    """Requests that share prefixes in all ways; without a salt, none finds another's."""
    trunk, first, second, tail, short = random_prompts([150, 110, 90, 40, 90])
    own: dict[str, Any] = bench.case.own[0] if bench.case.own else WHOLE
    one, other = [*trunk, *first], [*tail, *second]

    def job(prompt: list[int], tokens: int, arrival: int = 0, **own: Any) -> Job:
        return Job(prompt, greedy(tokens, logprobs=2, **own), arrival)

    waves = [
        [job(one, 18), job([*trunk, *second], 6, 1)],
        [job(one, 8), job(one, 6, **own)],
        [job(one, 18, **WHOLE), job([*one, *tail], 6)],
        [job([*trunk, *tail], 6, **WHOLE), job(trunk[:100], 6)],
        # Two at once that compute the same, and one that is given up in the middle.
        [job(other, 6), job(other, 6), replace(job([*other, *first], 30), abort_after=3)],
        [job([*other, *first], 6), job(other, 3, **WHOLE)],
        # In one step: the second one reads what the first one has just written.
        [job(short, 4), job(short, 4)],
    ]
    watch = Rows(bench.engine) if salt is not None and bench.watches else None
    outcomes = []
    for wave in waves:
        jobs = fresh(wave) if salt is None else [replace(job, salt=salt) for job in wave]
        outcomes += bench.engine.run(jobs, watch)
    assert watch is None or watch.most > 5
    return [outcome for outcome in outcomes if outcome.output is not None]


def a_hit_is_a_miss(bench: Bench) -> None:
    """Tokens, reports and kept positions; no block that others may find is written."""
    bench.engine.shuffle_blocks()
    hits, misses = shared(bench, f"hits{next(SALTS)}"), shared(bench, None)
    bench.check_same(hits, misses)
    assert not any(one.cached for one in misses)
    assert sum(one.cached > 0 for one in hits) >= 6, [one.cached for one in hits]


def hits_are_as_long_as_they_can_be(bench: Bench) -> None:
    """All that was computed, but for the queries that score, wherever the prompts part."""
    prompt, other, more = random_prompts([500, 400, 200], seed=1)
    cached = _cached(bench)
    assert cached(prompt) == 0
    for own in ({}, *bench.case.own):
        assert cached(prompt, **own) == _but_window(bench, 500)
    assert cached(prompt, **WHOLE) == 499 // BLOCK * BLOCK
    assert cached(prompt[:300]) == _but_window(bench, 300)
    assert cached([*prompt, *more]) == 500 // BLOCK * BLOCK
    assert cached([*prompt, *more]) == _but_window(bench, 700)
    assert cached([*prompt[:400], *other]) == 400
    assert cached(other) == 0, "it never began with these tokens"
    assert bench.engine.llm.reset_prefix_cache()
    assert cached(prompt) == 0


def _cached(bench: Bench) -> Callable[..., int]:
    """`cached(tokens, **own)`: a prompt's tokens that were in the cache of one salt."""
    watch, salt = Rows(bench.engine) if bench.watches else None, f"hits{next(SALTS)}"

    def cached(tokens: list[int], **own: Any) -> int:
        return bench.engine.run([Job(tokens, greedy(2, **own), salt=salt)], watch)[0].cached

    return cached


def _but_window(bench: Bench, tokens: int) -> int:
    least = max(bench.policy.trace_window, 2)  # whose attention scores, or a trace reports
    return (tokens - least) // BLOCK * BLOCK


def salts_are_apart(bench: Bench) -> None:
    (prompt,) = random_prompts([400], seed=2)
    number = next(SALTS)

    def cached(salt: str) -> int:
        job = Job(prompt, greedy(2), salt=f"{salt}{number}")
        return bench.engine.run([job])[0].cached

    found = [cached(salt) for salt in "abab"]
    assert found[:2] == [0, 0] and min(found[2:]) >= BLOCK


def _talk(bench: Bench, salts: Callable[[], str], like: Sequence[Outcome] = ()) -> list[Outcome]:
    """Four turns, one of them short, and the third once more."""
    tokens: list[int] = []
    turns: list[int] = []
    outcomes: list[Outcome] = []
    watch = Rows(bench.engine) if bench.watches else bench.look
    for turn, words in enumerate(random_prompts([220, 110, 20, 60], seed=3)):
        tokens = [*tokens, *words]
        job = Job(tokens, greedy(ANSWER, logprobs=2, kv_turns=turns), salt=salts())
        outcomes += bench.engine.run([job], watch)
        assert outcomes[-1].report["kv_turns"] == [*turns, len(tokens)]
        tokens = [*tokens, *(like or outcomes)[turn].token_ids]
        turns = outcomes[-1].report["kv_turns"]
    outcomes += bench.engine.run([replace(outcomes[2].job, name="again", salt=salts())])
    return outcomes


def a_resumed_turn_is_a_computed_one(bench: Bench) -> None:
    """Where the answer before was evicted from, and where it is found no more, or by others."""
    number = next(SALTS)
    hits = _talk(bench, lambda: f"talk{number}")
    misses = _talk(bench, lambda: f"fresh{next(SALTS)}", hits)
    bench.check_same(hits, misses, kept=False)
    kept = [[kept_at_end(bench.folder, one) for one in run] for run in (hits, misses)]
    assert kept[0] == kept[1]
    # What is computed again is evicted at the ends of earlier turns as these evicted it.
    again = kept_at_evictions(bench.folder, misses[3])
    for one in hits[:3]:
        n = len(one.job.prompt)
        ours = kept_at_evictions(bench.folder, one)[n]
        assert all(torch.equal(a, b) for a, b in zip(ours, again.get(n, ours), strict=True))
    assert len(again) >= 3
    resumed = [one.report["resumed_tokens"] for one in hits]
    before = [len(one.job.prompt) + ANSWER - 1 for one in (*hits[:3], hits[1])]
    assert resumed == [0, *(tokens // BLOCK * BLOCK for tokens in before)]
    assert not any(one.report["resumed_tokens"] for one in misses)
    with small_pool(
        bench.engine, whole_blocks(bench, 520)
    ):  # states are dropped for others' blocks
        first, last = (
            replace(one.job, name=f"small{index}", salt=f"small{number}")
            for index, one in enumerate(hits[:2])
        )
        (one,) = bench.engine.run([first])
        bench.engine.run(bench.jobs((500,)))
        (late,) = bench.engine.run([last], bench.look)
    bench.check_same([one, late], hits[:2], kept=False)
    assert late.report["resumed_tokens"] == 0


def what_does_not_go_on_is_a_miss(bench: Bench) -> None:
    """Other tokens, another budget, other turns: the state before, the prompt, or nothing."""
    first, words, more = random_prompts([300, 120, 70], seed=5)
    salt = f"turns{next(SALTS)}"

    def ask(tokens: list[int], turns: list[int]) -> list[int]:
        job = Job(tokens, greedy(ANSWER, kv_turns=turns), salt=salt)
        return [*tokens, *bench.engine.run([job])[0].token_ids]

    second = [*ask(first, []), *words]
    said, turns = [*ask(second, [300]), *more], [300, len(second)]
    watch = Rows(bench.engine) if bench.watches else None

    def cached(tokens: list[int], **own: Any) -> int:
        params = greedy(2, **(own and {**own, "kv_turn_mode": "resume"}))
        return bench.engine.run([Job(tokens, params, salt=salt)], watch)[0].cached

    of_first, of_second = ((end + ANSWER - 1) // BLOCK * BLOCK for end in turns)
    assert cached(said, kv_turns=turns) == of_second
    assert cached(said, kv_turns=turns, **bench.case.own[0]) == _but_window(bench, 300)
    assert cached(said, kv_turns=[300]) == of_first
    assert cached(said, kv_turns=[300, 445]) == of_first
    assert cached(said, kv_turns=[200, turns[1]]) == _but_window(bench, 200)
    assert cached(said) == 300 // BLOCK * BLOCK, "it says nothing of a conversation"
    # A template that writes the answer in another way, from its tenth token on.
    other = [*said[: turns[1] + 10], *more, *more]
    assert cached(other, kv_turns=turns) == (turns[1] + 10) // BLOCK * BLOCK
    assert cached([*said[:10], *more, *said], kv_turns=turns) == 0
    # A turn that ends too close behind another one is none, and changes nothing.
    assert cached(said, kv_turns=[300, 320, turns[1]]) == of_second
