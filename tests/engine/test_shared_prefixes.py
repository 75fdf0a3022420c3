# SPDX-License-Identifier: Apache-2.0
"""Requests behind one long prefix read its pages together, and answer as each would alone."""

from __future__ import annotations

from tests.engine.support import Job, Start, assert_same_tokens, greedy, random_prompts
from vllm_pyramid.kernels.contract import FEWEST_KEYS
from vllm_pyramid.kernels.cpu.library import shared_rows

PREFIX, TAILS, ANSWER = 1600, (40, 90, 33, 64, 121, 57, 75, 48, 100), 12
HEADS, LAYERS = 4, 4  # of the model "mistral"


def test_a_request_answers_in_a_group_as_alone(tiny: Start) -> None:
    """Decode a group that keeps everything among requests that evict, in float32."""
    engine = tiny(
        "mistral",
        dtype="float32",
        enable_prefix_caching=True,
        max_model_len=2048,
        kv_policy="snapkv",
        kv_budget=64,
        kv_policy_args={"window": 8},
    )
    assert PREFIX > FEWEST_KEYS
    prefix, *tails = random_prompts([PREFIX, *TAILS], seed=11)
    whole = [Job([*prefix, *tail], greedy(ANSWER, logprobs=2, kv_policy="full")) for tail in tails]
    evicting = [Job([*prefix, *tail], greedy(ANSWER, logprobs=2)) for tail in tails[:2]]
    engine.shuffle_blocks()
    engine.run([Job([*prefix, 9], greedy(1, kv_policy="full"))])

    def run(jobs: list[Job]) -> tuple[list, int]:
        before = shared_rows()
        again = [Job(job.prompt, job.params) for job in jobs]
        return engine.run(again), shared_rows() - before

    alone = []
    for job in [*whole, *evicting]:
        (outcome,), rows = run([job])
        assert rows == 0 and outcome.cached > 0
        alone.append(outcome)
    assert all(o.report["evicted_tokens"] > 0 for o in alone[len(whole) :])
    together, rows = run([*whole, *evicting])
    assert all(outcome.cached >= PREFIX - 16 for outcome in together[: len(whole)])
    # From the step in which all decode to the end.
    assert rows >= (ANSWER - 4) * len(whole) * HEADS * LAYERS
    assert_same_tokens(together, alone)
    reversed_order, rows = run([*evicting, *reversed(whole)])
    assert rows >= (ANSWER - 4) * len(whole) * HEADS * LAYERS
    assert_same_tokens(reversed_order, [*alone[len(whole) :], *reversed(alone[: len(whole)])])
    engine.check_whole()
