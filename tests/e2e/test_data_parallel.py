# SPDX-License-Identifier: Apache-2.0
"""Two replicas behind one server, each with a pool and counters of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import check_answers
from tests.plumbing.one_device import (
    LENGTHS,
    Answers,
    answers_of_one_device,
    check_death,
    client_of,
    complete,
    flags,
    kept,
)
from tests.plumbing.server import Server, members, serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]
# Which replica gets which prompts: not the same number, nor the same lengths.
SENT = {0: (300, 181, 430, 212, 40), 1: (430, 181)}
REPLICAS = ("--data-parallel-size", "2", "--api-server-count", "1")
# Four pages of the six or seven that an eviction leaves: one of them is by choice.
SELECTED = {
    "kv_policy": "select-evicted",
    "kv_budget": "96",
    "kv_min_tokens": "0",
    "kv_policy_args": {"attend": {"budget": 64, "dense_layers": 1, "sinks": 16, "recent": 16}},
}


@pytest.fixture(scope="module")
def server(random_model: Path, folder: Path, one_device: Answers) -> Iterator[Server]:
    with serving(
        random_model, *flags(folder / "two"), *REPLICAS, log=folder / "server.log"
    ) as running:
        yield running


def test_each_replica_does_what_one_device_does(
    server: Server, client: openai.OpenAI, random_model: Path, folder: Path, one_device: Answers
) -> None:
    """And counts what it did, and nothing else."""
    _check_answers(client, random_model, one_device)
    one, two = kept(folder / "one"), kept(folder / "two")
    for length, (expected,) in one.items():
        served = [length in lengths for lengths in SENT.values()]
        assert two[length] == [expected] * sum(served), length

    by_engine = _wait_until_idle(server)
    assert set(by_engine) == set(SENT)
    for replica, lengths in SENT.items():
        metrics = by_engine[replica]
        reports = [one_device[length][1] for length in lengths]
        evicting = [report for report in reports if report["evicted_tokens"]]
        assert metrics["vllm:prompt_tokens_total"] == {-1: sum(lengths)}
        assert metrics["vllm_pyramid:evictions_total"] == {-1: len(evicting)}
        assert metrics["vllm_pyramid:tokens_evicted_total"] == {
            layer: sum(report["prompt_tokens"] - report["kept_tokens"][layer] for report in reports)
            for layer in range(8)
        }
        freed = sum(report["blocks_before"] - report["blocks_after"] for report in reports)
        assert sum(metrics["vllm_pyramid:blocks_freed_total"].values()) == freed


def _check_answers(client: openai.OpenAI, model: Path, one_device: Answers) -> None:
    """Send each replica its prompts."""
    for replica, lengths in SENT.items():
        rank = {"X-data-parallel-rank": str(replica)}
        check_answers(client, model, one_device, lengths, extra_headers=rank)


def _wait_until_idle(server: Server) -> dict[int, dict[str, dict[int, float]]]:
    """The metrics once no replica holds anything; the last that were read after ten seconds."""
    for _ in range(50):
        by_engine = server.metrics_by_engine()
        if not any(
            held for one in by_engine.values() for held in one["vllm_pyramid:blocks_held"].values()
        ):
            break
        time.sleep(0.2)
    return by_engine


def test_what_is_held_is_that_of_the_replica(server, client, random_model) -> None:
    rank = {"X-data-parallel-rank": "1"}
    stream = complete(
        client, random_model, LENGTHS[0], max_tokens=1500, stream=True, extra_headers=rank
    )
    for _ in range(3):
        next(iter(stream))
    by_engine = server.metrics_by_engine()
    held = [by_engine[replica]["vllm_pyramid:blocks_held"] for replica in (0, 1)]
    stream.close()
    assert set(held[0].values()) == {0}
    assert held[1][0] > held[1][7] > 0
    assert set(_wait_until_idle(server)[1]["vllm_pyramid:blocks_held"].values()) == {0}


def test_requests_are_shared_out(server, client, random_model, one_device) -> None:
    """By vLLM; whoever gets one answers the same."""
    before = _wait_until_idle(server)
    lengths = [*SENT[0], *SENT[0]]
    with ThreadPoolExecutor(len(lengths)) as threads:
        answers = list(threads.map(lambda length: complete(client, random_model, length), lengths))
    for length, answer in zip(lengths, answers, strict=True):
        report = answer.kv_transfer_params
        assert report == one_device[length][1]
    after = _wait_until_idle(server)
    evictions = [
        after[replica]["vllm_pyramid:evictions_total"][-1]
        - before[replica]["vllm_pyramid:evictions_total"][-1]
        for replica in (0, 1)
    ]
    assert sum(evictions) == 8 and all(evictions), evictions


def test_all_turns_of_a_session_go_to_one_replica(server, client, random_model) -> None:
    """The second turn finds what the first one left there; the sessions use both replicas."""
    before = server.metrics_by_engine()
    for number in range(6):
        tokens = [*range(100 + number, 400 + number)]
        for turn in (1, 2):
            answer: Any = client.completions.create(
                model=str(random_model),
                prompt=tokens,
                max_tokens=24,
                temperature=0,
                extra_headers={"X-KV-Session": f"session-{number}"},
                extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": "a"},
            )
            report = answer.kv_transfer_params
            assert len(report["kv_turns"]) == turn
            tokens = [*tokens, *answer.choices[0].token_ids, *range(500, 600)]
        assert report["resumed_tokens"] > 0, number
    after = _wait_until_idle(server)
    assert all(
        after[replica]["vllm_pyramid:evictions_total"][-1]
        > before[replica]["vllm_pyramid:evictions_total"].get(-1, 0)
        for replica in (0, 1)
    )


def test_killing_a_replica_ends_the_server(server, client, random_model) -> None:
    """The other replica is stopped: its answers end where they are, or have ended by then."""
    processes = {name: pid for pid, name in members(server.process.pid)}
    assert "VLLM::EngineCore_DP1" in processes
    replica = processes["VLLM::EngineCore_DP0"]
    ranks = [{"X-data-parallel-rank": str(rank)} for rank in SENT]
    log = check_death(
        server,
        client,
        random_model,
        lambda: os.kill(replica, signal.SIGKILL),
        headers=ranks,
        others=["finish_reason abort", "finish_reason ", "finish_reason length"],
    )
    assert "engine core exited unexpectedly" in log, log[-3000:]


def test_each_replica_selects_pages_of_its_own(random_model: Path, tmp_path: Path) -> None:
    """As one device does, in a server of its own, and counts the pages it has read."""
    one_device = answers_of_one_device(random_model, tmp_path / "one", SELECTED)
    command = (*flags(tmp_path / "two", SELECTED), *REPLICAS)
    with serving(random_model, *command, log=tmp_path / "server.log") as server:
        _check_answers(client_of(server), random_model, one_device)
        by_engine = _wait_until_idle(server)
    for replica, lengths in SENT.items():
        counted = []
        for pages in ("pages_read", "pages_visible"):
            expected = sum(one_device[length][1][pages] for length in lengths)
            assert by_engine[replica][f"vllm_pyramid:{pages}_total"] == {-1: expected}
            counted.append(expected)
        assert 0 < counted[0] < counted[1]
