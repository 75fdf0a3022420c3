# SPDX-License-Identifier: Apache-2.0
"""Conversations that go on with an evicted state: same tokens, exact hits, wrong inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.exceptions import VLLMValidationError

from tests.engine.conversations import FourTurns, Rows, ask, four_turns, kept_at_end, talk
from tests.engine.support import (
    EnginePool,
    Job,
    assert_same_tokens,
    greedy,
    is_compiled,
    random_prompts,
)

pytestmark = pytest.mark.engine

BLOCK = 16
SNAPKV = {"kv_policy": "snapkv", "kv_budget": 64, "kv_policy_args": {"window": 8}}
POLICIES: dict[str, dict[str, Any]] = {
    "snapkv": SNAPKV,
    "pyramidkv": {"kv_policy": "pyramidkv", "kv_budget": "25%", "kv_min_tokens": 128},
    "keydiff": {"kv_policy": "keydiff", "kv_budget": 100},
}
ANSWER = 40
# Tokens of what a user says in each turn; one is too short for an eviction of its own.
SAID = [300, 150, 60, 90]


def _settings(policy: str = "snapkv", **changes: Any) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_num_batched_tokens": 200,
        "max_num_seqs": 8,
        "max_model_len": 1024,
        **POLICIES[policy],
        **changes,
    }


@pytest.mark.parametrize(
    ("policy", "compiled"),
    [
        *((policy, False) for policy in POLICIES),
        pytest.param("snapkv", True, marks=pytest.mark.slow),
    ],
)
def test_tokens_and_what_is_kept_are_those_without_it(
    engines: EnginePool,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    policy: str,
    compiled: bool,
) -> None:
    """Hits change neither tokens nor reports nor what is kept."""
    found: list[FourTurns] = []
    for caching in (True, False):
        folder = tmp_path / str(caching)
        settings = _settings(policy, enable_prefix_caching=caching, kv_trace=str(folder))
        engine = engines.get(tiny_model("mistral"), enforce_eager=not compiled, **settings)
        assert is_compiled(engine) == compiled
        engine.shuffle_blocks()
        like = next(iter(found), None)
        found.append(four_turns(engine, folder, SAID, hits=caching, like=like))
        engine.check_whole()
    found[0].check_same(found[1])


def test_what_is_evicted_at_a_turns_end_is_what_its_request_evicted(
    engines: EnginePool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The traces of a conversation that is computed again are those of its turns."""
    settings = _settings("pyramidkv", kv_trace=str(tmp_path), enable_prefix_caching=False)
    engine = engines.get(tiny_model("mistral"), **settings)
    outcomes = talk(engine, random_prompts(SAID, seed=4))
    last = outcomes[-1].request_id
    for outcome in outcomes[:-1]:
        with np.load(tmp_path / f"{last}@{len(outcome.job.prompt)}.npz") as file:
            again = [file[f"kept_{layer}"].tobytes() for layer in range(engine.num_layers)]
        assert again == kept_at_end(tmp_path, outcome)


def test_what_does_not_go_on_is_a_miss(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    """Other tokens, another budget, other turns: the state before, the prompt, or nothing."""
    engine = engines.get(tiny_model("mistral"), **_settings(max_num_batched_tokens=512))
    engine.llm.reset_prefix_cache()
    look = Rows(engine)
    _, second = talk(engine, random_prompts([300, 120], seed=5))
    said = [*second.job.prompt, *second.token_ids]
    turns = second.report["kv_turns"]
    (more,) = random_prompts([70], seed=6)

    def cached(tokens: list[int], **own: Any) -> int:
        (outcome,) = engine.run([Job(tokens, greedy(2, **own))], look)
        return outcome.cached

    of_first, of_second = 339 // BLOCK * BLOCK, (460 + 39) // BLOCK * BLOCK
    assert turns == [300, 460] and of_second == 496
    # The prompt alone: KV of the full cache up to the first eviction, but for its window.
    exact = (300 - 8) // BLOCK * BLOCK
    assert cached([*said, *more], kv_turns=turns) == of_second
    assert cached([*said, *more], kv_turns=turns, kv_budget=80) == exact
    assert cached([*said, *more], kv_turns=[300]) == of_first
    assert cached([*said, *more], kv_turns=[300, 470]) == of_first
    assert cached([*said, *more], kv_turns=[200, 460]) == (200 - 8) // BLOCK * BLOCK
    assert cached([*said, *more]) == 300 // BLOCK * BLOCK, "it says nothing of a conversation"
    # A template that writes the answer in another way, from its 20th token on.
    other = [*second.job.prompt, *second.token_ids[:20], *more, *more]
    assert cached(other, kv_turns=turns) == 480
    assert cached([*said[:10], *more, *said], kv_turns=turns) == 0
    # A turn that ends too close behind another one is none, and changes nothing.
    assert cached([*said, *more], kv_turns=[300, 320, 460]) == of_second
    engine.check_whole()


def test_states_are_dropped_when_blocks_are_needed(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    """In a pool of one sequence nobody waits for a state, and answers are those of a large pool."""
    found = []
    for blocks in (2000, 4 * 1024 // BLOCK + 1):
        engine = engines.get(tiny_model("mistral"), **_settings(), num_gpu_blocks_override=blocks)
        outcomes = talk(engine, random_prompts([300, 60], seed=7))
        others = random_prompts([700, 650], seed=8)
        alone = engine.run([Job(tokens, greedy(4, logprobs=2)) for tokens in others])
        last = outcomes[-1]
        tokens = [*last.job.prompt, *last.token_ids, *random_prompts([50], seed=9)[0]]
        again = ask(engine, tokens, last.report["kv_turns"])
        found.append([*outcomes, *alone, again])
        resumed = [outcome.report["resumed_tokens"] for outcome in (outcomes[1], again)]
        assert resumed == [336, 432 if blocks == 2000 else 0]
        engine.check_whole()
    assert_same_tokens(found[0], found[1])


def test_salts_do_not_see_each_other(
    engines: EnginePool, tiny_model: Callable[[str], Path]
) -> None:
    """Users with salts of their own do not find each other's states."""
    engine = engines.get(tiny_model("mistral"), **_settings())
    tokens, more = random_prompts([300, 60], seed=10)

    def ask(salt: str, prompt: list[int], turns: list[int]) -> Any:
        request = {"prompt_token_ids": prompt, "cache_salt": salt}
        params = greedy(ANSWER, kv_turns=turns)
        return engine.llm.generate([request], params, use_tqdm=False)[0]

    answer = list(ask("a", tokens, []).outputs[0].token_ids)
    follow_up = [*tokens, *answer, *more]
    assert ask("b", follow_up, [300]).num_cached_tokens == 0
    assert ask("a", follow_up, [300]).num_cached_tokens == 336


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"kv_turns": [300]}, "ends at 300 tokens, and its prompt has 300"),
        ({"kv_turns": [200, 900]}, "ends at 900 tokens"),
        ({"kv_turns": [200, 200]}, "must rise"),
        ({"kv_turns": [0, 10]}, "must rise from at least 1"),
        ({"kv_turns": list(range(1, 514))}, "513 turns, and at most 512"),
        ({"kv_turns": "100,200"}, "must be a list of whole numbers"),
        ({"kv_turns": [100.0]}, "must be a list of whole numbers"),
        ({"kv_turns": [], "kv_policy": "full"}, "'full' .* work with kv_turns: it keeps every"),
        ({"kv_turn": []}, "kv_turns"),
    ],
)
def test_wrong_inputs(
    engines: EnginePool, tiny_model: Callable[[str], Path], own: dict[str, Any], message: str
) -> None:
    engine = engines.get(tiny_model("mistral"), **_settings())
    (prompt,) = random_prompts([300])
    with pytest.raises(VLLMValidationError, match=message):
        engine.client.add_request("wrong", {"prompt_token_ids": prompt}, greedy(4, **own))
    params = greedy(4, kv_turns=[100])
    params.prompt_logprobs = 1
    with pytest.raises(VLLMValidationError, match="prompt_logprobs"):
        engine.client.add_request("wrong", {"prompt_token_ids": prompt}, params)
    assert ask(engine, prompt, [100]).report["kv_turns"] == [100, 300]
