# SPDX-License-Identifier: Apache-2.0
"""Hand-overs between engines of two ranks, and under vLLM's second model runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine import models
from tests.engine.support import random_prompts
from tests.engine.test_runner_v2 import SETTINGS as OF_RUNNERS
from tests.engine.test_runner_v2 import SHAPE, variables
from tests.plumbing.children import Child, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SETTINGS: dict[str, Any] = {
    **OF_RUNNERS,
    "additional_config": {"kv_policy": "pyramidkv", "kv_budget": 24, "kv_min_tokens": 0},
}
LENGTHS, ANSWER = (70, 100, 64), 12


PROMPTS = random_prompts(LENGTHS)
ALONE = [[prompt, greedy(ANSWER)] for prompt in PROMPTS]
SENT = [[prompt, greedy(1, kv_transfer_params={"do_remote_decode": True})] for prompt in PROMPTS]


def _with_tickets(first: int) -> list[Any]:
    """Requests with the tickets of an engine's own requests, from that of a number."""
    return [[prompt, greedy(ANSWER, ticket_of=first + at)] for at, prompt in enumerate(PROMPTS)]


def _given(sent: list[dict[str, Any]]) -> list[Any]:
    """Requests with the tickets that another engine gave."""
    return [
        [prompt, greedy(ANSWER, kv_transfer_params=one["report"])]
        for prompt, one in zip(PROMPTS, sent, strict=True)
    ]


def _check(handed: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    for one, other, length in zip(handed, alone, LENGTHS, strict=True):
        assert one["report"].pop("handed") == {"tokens": length}
        assert one["token_ids"] == other["token_ids"]
        assert one["report"] == other["report"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(models.SHAPES, "transfer", SHAPE)
    return models.write_model("transfer", tmp_path / "model")


def _run(
    folder: Path,
    model: Path,
    waves: list[list[Any]],
    triton: str | None = None,
    *,
    own: dict[str, Any],
    **env: str,
) -> dict[str, Any]:
    """Run the waves in a new process, in an engine over the folder of states."""
    connector = {
        "kv_connector": "PyramidConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(folder / "states"), "ttl_s": 1000},
    }
    llm = {"model": str(model), **SETTINGS, "kv_transfer_config": connector, **own}
    child = Child(
        folder / "child",
        (llm, waves),
        triton=triton,
        **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | env,
    )
    try:
        (result,) = child.results()
    finally:
        child.kill()
    return result


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "states").iterdir())


def test_ranks_of_other_numbers(tmp_path: Path, model: Path) -> None:
    """One rank sends to two, these to themselves, and to one: answers are those of one engine."""
    count, two = len(PROMPTS), {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    # A request behind those that are sent: the engine ends when it has ended, and they have gone.
    first = _run(tmp_path, model, [ALONE, [], SENT, [], ALONE[:1]], own={})["outputs"]
    alone, sent = first[:count], first[count : 2 * count]
    waves = [_given(sent), [], SENT, [], _with_tickets(count), [], SENT, [], ALONE[:1]]
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    result = _run(tmp_path, model, waves, own=two, **env)
    assert len(result["ranks"]) == 2
    found = result["outputs"]
    _check(found[:count], alone)
    _check(found[2 * count : 3 * count], alone)
    last = found[3 * count : 4 * count]
    assert {one["report"]["pyramid_ranks"] for one in last} == {2}
    assert len(_left(tmp_path)) == 3 * count, "a head and two parts of each"
    _check(_run(tmp_path, model, [_given(last)], own={})["outputs"], alone)
    assert not _left(tmp_path), "all parts are fetched once"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_second_runner(tmp_path: Path, model: Path, asynchronous: bool) -> None:
    """It takes the first token as a part of what is prefilled, without an addition of ours."""
    count = len(PROMPTS)
    result = _run(
        tmp_path,
        model,
        [ALONE, [], SENT, [], ALONE[:1], _with_tickets(count)],
        "attention",
        own={"async_scheduling": asynchronous, "enable_prefix_caching": asynchronous},
        **variables("2"),
    )
    assert "vllm_pyramid.worker.adapter_v2.AdapterV2" in result["runner"]
    _check(result["outputs"][-count:], result["outputs"][:count])
    assert not _left(tmp_path)
