# SPDX-License-Identifier: Apache-2.0
"""Replicas with front ends of their own, behind a load balancer that is not vLLM's.

vLLM 0.32 takes `--data-parallel-external-lb` and `--data-parallel-rank` for mixtures of experts
alone, and asks for independent servers of a dense model. `--data-parallel-hybrid-lb` it takes: with
one replica on each host it is an external load balancer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest
from vllm.distributed.kv_events import AllBlocksCleared

from tests.plumbing.kv_events import Subscriber, blocks
from tests.plumbing.one_device import (
    LENGTHS,
    PROMPTS,
    Answers,
    answers_of_one_device,
    client_of,
    complete,
    flags,
)
from tests.plumbing.server import Server, free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BLOCK = 16  # tokens: with a policy the default on a CPU


@pytest.fixture(scope="module")
def one_device(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of_one_device(random_model, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def subscribers() -> Iterator[list[Subscriber]]:
    """One for each replica: its port is that of the flag plus the replica's number."""
    events, again = free_port(), free_port()
    found = [Subscriber(f"tcp://*:{events + rank}", f"tcp://*:{again + rank}") for rank in range(2)]
    yield found
    for subscriber in found:
        subscriber.close()


@pytest.fixture(scope="module")
def servers(
    random_model: Path,
    one_device: Answers,
    subscribers: list[Subscriber],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("balanced")
    config = json.dumps(asdict(subscribers[0].config))
    common = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
    place = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port()))
    with ExitStack() as stack:
        found = []
        for rank in range(2):
            own = ("--data-parallel-hybrid-lb", "--data-parallel-start-rank", str(rank))
            command = (*flags(folder / f"trace{rank}"), *common, *place, *own)
            server = Server(
                random_model,
                *command,
                "--kv-events-config",
                config,
                log=folder / f"{rank}.log",
            )
            stack.callback(server.kill)
            found.append(server)
        for server in found:
            server.wait_until_ready(400)
        yield found


def test_each_front_end_answers_for_its_replica(
    servers: list[Server], random_model: Path, one_device: Answers
) -> None:
    """As one device does; each counts what it was sent."""
    for rank, server in enumerate(servers):
        client = client_of(server)
        for length in LENGTHS[rank:]:
            answer = complete(client, random_model, length)
            assert (answer.choices[0].token_ids, answer.kv_transfer_params) == one_device[length]
        (metrics,) = server.metrics_by_engine().values()
        sent = LENGTHS[rank:]
        assert metrics["vllm:prompt_tokens_total"] == {-1: sum(sent)}
        evicting = [length for length in sent if one_device[length][1]["evicted_tokens"]]
        assert metrics["vllm_pyramid:evictions_total"] == {-1: len(evicting)}


def test_each_replica_announces_its_prompts(
    servers: list[Server], subscribers: list[Subscriber], random_model: Path
) -> None:
    """Over TCP, from the scheduler's process."""
    for rank, subscriber in enumerate(subscribers):
        expected = sum(length // BLOCK for length in LENGTHS[rank:])
        told = []
        while len(told) < expected:
            batch = subscriber.batch()
            assert batch.data_parallel_rank == rank
            assert not any(isinstance(event, AllBlocksCleared) for event in batch.events)
            told += blocks(batch.events)
        tokens = {tuple(block["token_ids"]) for block in told}
        assert tokens == {
            tuple(PROMPTS[length][start : start + BLOCK])
            for length in LENGTHS[rank:]
            for start in range(0, length - BLOCK + 1, BLOCK)
        }
