# SPDX-License-Identifier: Apache-2.0
"""A user's methods that fail for some prompts: they end with an error, and no other does."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.failing import (
    ADDED,
    ALLOCATOR,
    EVICTED,
    HONEST,
    NAN,
    RAISES,
    REASONS,
    SHAPE,
    write_module,
)
from tests.engine.support import greedy, random_prompts
from tests.plumbing.server import serving

LIMITS = {"max_model_len": 512, "max_num_batched_tokens": 1024}


@pytest.fixture(scope="module")
def own_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patched:
        write_module(folder, patched)
        yield folder


def _prompts(lengths: list[int]) -> list[list[int]]:
    """The prompt of a length is the same in every batch."""
    return [random_prompts([length], vocab_size=2048, seed=length)[0] for length in lengths]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_others_get_the_tokens_that_they_get_alone(own_module, demo, asynchronous) -> None:
    engine = demo(
        kv_policy=str(own_module / "cursed.yaml"), async_scheduling=asynchronous, **LIMITS
    )
    right = engine.generate(_prompts(HONEST), greedy(8))
    others = [RAISES, ALLOCATOR, ADDED, HONEST[2], EVICTED, SHAPE]
    mixed = [HONEST[0], NAN, HONEST[1], *others]
    outcomes = dict(zip(mixed, engine.generate(_prompts(mixed), greedy(8)), strict=True))
    for length, alone in zip(HONEST, right, strict=True):
        assert outcomes[length].token_ids == alone.token_ids
        assert len(alone.token_ids) == 8 and alone.report["evicted_tokens"] >= 0
    for length, reason in REASONS.items():
        (ended,) = outcomes[length].output.outputs
        assert (ended.finish_reason, list(ended.token_ids)) == ("error", [])
        error = getattr(outcomes[length].output, "error", None)  # from vLLM 0.33 on
        assert reason in (ended.stop_reason or error.message)
    assert engine.scheduler.pyramid.failed.ended == {"scores": 1, "method": 5}
    engine.check_whole()
    # One that ends with its first token ends with the error, too.
    (only,) = engine.generate(_prompts([NAN]), greedy(1))
    assert only.output.outputs[0].finish_reason == "error"
    engine.check_whole()


@pytest.mark.slow
def test_over_http(random_model: Path, own_module: Path, tmp_path: Path) -> None:
    flags = ["--kv-policy", str(own_module / "cursed.yaml"), "--enforce-eager"]
    flags += ["--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20)]
    log = tmp_path / "server.log"
    # Without asserts, as some operators run Python.
    settings: dict[str, Any] = {"environment": {"PYTHONOPTIMIZE": "1"}, "fresh": True}
    with serving(random_model, *flags, log=log, **settings) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id

        def complete(length: int, **more: Any) -> Any:
            (prompt,) = _prompts([length])
            arguments = {"max_tokens": 4, "temperature": 0, **more}
            return client.completions.create(model=model, prompt=prompt, **arguments)

        before = complete(HONEST[0]).choices[0].text
        for length in (NAN, RAISES, ALLOCATOR, ADDED):
            reason = re.escape(REASONS[length])
            with pytest.raises(openai.InternalServerError, match=reason) as answer:
                complete(length)
            assert answer.value.status_code == 500
            with pytest.raises(openai.APIError, match=reason):
                list(complete(length, stream=True))
        assert complete(HONEST[0]).choices[0].text == before
        for _ in range(50):
            text = server.metrics_text()
            if 'failed_requests_total{engine="0",reason="method"} 6.0' in text:
                break
            time.sleep(0.2)
        assert 'vllm_pyramid:failed_requests_total{engine="0",reason="method"} 6.0' in text
        assert 'vllm_pyramid:failed_requests_total{engine="0",reason="scores"} 2.0' in text
        held = server.metrics()["vllm_pyramid:blocks_held"]
        assert not any(held.values())
    written = log.read_text()
    assert written.count("Traceback") == 3 and "ends with an error" in written
