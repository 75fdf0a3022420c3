# SPDX-License-Identifier: Apache-2.0
"""What users know of vLLM stays whole beside eviction."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.support import Engine, Job, Start, greedy, random_prompts

MAX_LEN = 1024
SETTINGS: dict[str, Any] = {
    "kv_policy": "pyramidkv",
    "kv_budget": "12%",
    "max_model_len": MAX_LEN,
    "max_num_batched_tokens": 256,
    "skip_tokenizer_init": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


@pytest.fixture
def engine(demo: Start) -> Engine:
    return demo(**SETTINGS)


def _prompts(*lengths: int) -> list[list[int]]:
    return random_prompts(lengths, seed=5, vocab_size=2048)


def _sampling(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"ignore_eos": True, "max_tokens": 16, **options})


def test_stop_strings(engine: Engine) -> None:
    (free,) = engine.generate(_prompts(300), _sampling(temperature=0.0, max_tokens=24))
    text = free.output.outputs[0].text
    stop = text[len(text) // 2 :][:4]
    (stopped,) = engine.generate(
        _prompts(300), _sampling(temperature=0.0, max_tokens=24, stop=[stop])
    )
    completion = stopped.output.outputs[0]
    assert completion.finish_reason == "stop" and completion.stop_reason == stop
    assert completion.text == text[: text.index(stop)]
    # vLLM's front end sees the string and ends the request, which has been reported on before.
    assert stopped.report["evicted_tokens"] > 0
    engine.check_whole()


def test_seeds(engine: Engine) -> None:
    """The same text again, also where prompts are cut into chunks, whose samples are discarded."""
    prompts = _prompts(300, 170, 40, 900)
    first = engine.generate(prompts, _sampling(temperature=0.9, top_p=0.95, seed=1))
    again = engine.generate(prompts, _sampling(temperature=0.9, top_p=0.95, seed=1))
    other = engine.generate(prompts, _sampling(temperature=0.9, top_p=0.95, seed=2))
    assert [run.token_ids for run in first] == [run.token_ids for run in again]
    assert all(a.token_ids != b.token_ids for a, b in zip(first, other, strict=True))
    # The last prompt alone is cut into other, fewer chunks, and still draws the same numbers.
    # Rounding may decide a draw now and then, hence three seeds and not all of their tokens.
    same = 0
    for seed in (1, 2, 3):
        params = _sampling(temperature=0.9, seed=seed)
        together = engine.generate(prompts, params)
        (alone,) = engine.generate(prompts[-1:], params)
        same += together[-1].token_ids[0] == alone.token_ids[0]
    assert same >= 2


def test_prompt_logprobs(engine: Engine) -> None:
    """The prompt is attended to in full, so its log probabilities are those of `full`."""
    runs = [
        engine.generate(
            _prompts(300), _sampling(temperature=0.0, prompt_logprobs=1, extra_args=extra)
        )[0]
        for extra in (None, {"kv_policy": "full"})
    ]
    assert runs[0].report["evicted_tokens"] > 0 and runs[1].report["evicted_tokens"] == 0
    assert len(runs[0].output.prompt_logprobs) == 300
    for ours, full in zip(*(run.output.prompt_logprobs[1:] for run in runs), strict=True):
        assert {t: p.logprob for t, p in ours.items()} == {t: p.logprob for t, p in full.items()}


def test_samples_of_one_prompt_share_it(engine: Engine) -> None:
    """`n = 3`: in one step and in several; each evicts on its own."""
    engine.llm.reset_prefix_cache()
    before = engine.coordinator.counters.num_evictions
    prompt = {"prompt_token_ids": _prompts(400)[0]}
    (output,) = engine.llm.generate([prompt], _sampling(n=3, seed=7, max_tokens=6), use_tqdm=False)
    assert [len(choice.token_ids) for choice in output.outputs] == [6, 6, 6]
    assert engine.coordinator.counters.num_evictions - before == 3
    # None has computed it for itself.
    assert not engine.pool.duplicates and len(engine.pool.bundles) == 25
    engine.check_whole()


def test_sessions_where_requests_may_not_give_turns(demo: Start) -> None:
    """The server gives a session's turns itself, so they are no setting of the request."""
    own = {**SETTINGS, "enable_prefix_caching": True, "kv_request_overrides": "session"}
    engine = demo(**own)
    (first, more) = _prompts(300, 60)
    session = greedy(8, kv_session="a")
    (before,) = engine.run([Job(first, session)])
    (after,) = engine.run([Job([*first, *before.token_ids, *more], session)])
    assert after.report["resumed_tokens"] > 0 and len(after.token_ids) == 8
    engine.check_whole()
