# SPDX-License-Identifier: Apache-2.0
"""A method that fails in one of two ranks alone: the other one does not wait for it for ever."""

from __future__ import annotations

import re
import time
from pathlib import Path

import openai
import pytest

from tests.engine.failing import HONEST, NAN, ONE_RANK, RAISES, REASONS, write_module
from tests.engine.support import random_prompts
from tests.plumbing.one_device import LONGEST_SECONDS, client_of
from tests.plumbing.server import Server, serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FLAGS = [
    *("--tensor-parallel-size", "2", "--enforce-eager", "--max-model-len", "512"),
    *("--kv-cache-memory-bytes", str(32 << 20), "--kv-min-tokens", "0"),
]


def _complete(server: Server, model: Path, length: int) -> list[int]:
    (prompt,) = random_prompts([length], seed=length)
    answer = client_of(server).completions.create(
        model=str(model),
        prompt=prompt,
        max_tokens=4,
        temperature=0,
        extra_body={"return_token_ids": True},
        timeout=2 * LONGEST_SECONDS,
    )
    extra = answer.choices[0].model_extra
    assert extra is not None
    tokens: list[int] = extra["token_ids"]
    return tokens


@pytest.mark.parametrize("scorer", ["cursed", "asking"])
def test_one_rank_fails(random_model, tmp_path, monkeypatch, scorer) -> None:
    """A scorer of each rank's own ends its request; one that all ranks wait in ends the server."""
    write_module(tmp_path, monkeypatch)
    flags = ["--kv-policy", str(tmp_path / f"{scorer}.yaml"), *FLAGS]
    with serving(random_model, *flags, log=tmp_path / "server.log") as server:
        before = _complete(server, random_model, HONEST[0])
        assert len(before) == 4
        with pytest.raises(openai.InternalServerError, match=re.escape(REASONS[NAN])):
            _complete(server, random_model, NAN)
        if scorer == "cursed":
            for length in (RAISES, ONE_RANK):
                with pytest.raises(openai.InternalServerError) as answer:
                    _complete(server, random_model, length)
                assert answer.value.status_code == 500
                assert "method" in str(answer.value) or "KeyError" in str(answer.value)
            assert _complete(server, random_model, HONEST[0]) == before
            held = server.metrics()["vllm_pyramid:blocks_held"]
            assert not any(held.values())
            return
        start = time.monotonic()
        with pytest.raises(openai.APIError):
            _complete(server, random_model, ONE_RANK)
        server.process.wait(LONGEST_SECONDS)
        print(f"the server ended {time.monotonic() - start:.1f} s later")
        assert time.monotonic() - start < LONGEST_SECONDS
        written = server.log.read_text()
    assert (
        "on the second rank alone" in written
        and "Worker failed during a collective step" in written
    )
