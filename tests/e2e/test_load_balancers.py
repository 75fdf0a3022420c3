# SPDX-License-Identifier: Apache-2.0
"""Two front ends with two replicas each, behind a load balancer that is not vLLM's.

vLLM 0.32 takes `--data-parallel-external-lb` and `--data-parallel-rank` for mixtures of experts
alone, and asks for independent servers of a dense model. `--data-parallel-hybrid-lb` with one
replica each it turns into that, and the front end of a dense model ends with an AssertionError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict

import pytest

from tests.e2e.conftest import check_answers
from tests.plumbing.kv_events import Subscriber, blocks
from tests.plumbing.one_device import LENGTHS, PROMPTS, client_of, flags
from tests.plumbing.server import Server, free_port, free_ports

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BLOCK = 16  # tokens: with a policy the default on a CPU
PLACE = ("--data-parallel-size", "4", "--data-parallel-size-local", "2", "--api-server-count", "1")


@pytest.fixture(scope="module")
def subscribers() -> Iterator[list[Subscriber]]:
    """One for each replica: its port is that of the flag plus the replica's number."""
    events = free_ports(8)
    again = events + 4
    found = [Subscriber(f"tcp://*:{events + rank}", f"tcp://*:{again + rank}") for rank in range(4)]
    yield found
    for subscriber in found:
        subscriber.close()


@pytest.fixture(scope="module")
def servers(random_model, one_device, subscribers, folder) -> Iterator[list[Server]]:
    config = json.dumps(asdict(subscribers[0].config))
    meet = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port()))
    with ExitStack() as stack:
        found = []
        for number in range(2):
            own = ("--data-parallel-hybrid-lb", "--data-parallel-start-rank", str(2 * number))
            command = (*flags(folder / f"trace{number}"), *PLACE, *meet, *own)
            log = folder / f"{number}.log"
            server = Server(random_model, *command, "--kv-events-config", config, log=log)
            stack.callback(server.kill)
            found.append(server)
        for server in found:
            server.wait_until_ready(400)
        yield found


def test_each_front_end_answers_for_its_replicas(servers, random_model, one_device) -> None:
    """As one device does, and counts what its own replicas did."""
    for number, server in enumerate(servers):
        sent = LENGTHS[number:]
        check_answers(client_of(server), random_model, one_device, sent)
        by_engine = server.metrics_by_engine()
        assert set(by_engine) == {2 * number, 2 * number + 1}
        evicting = [length for length in sent if one_device[length][1]["evicted_tokens"]]
        for name, total in (
            ("vllm:prompt_tokens_total", sum(sent)),
            ("vllm_pyramid:evictions_total", len(evicting)),
        ):
            assert sum(metrics[name].get(-1, 0) for metrics in by_engine.values()) == total


def test_each_replica_announces_its_prompts(servers, subscribers, one_device) -> None:
    """Over TCP, from the schedulers' processes; under its own number."""
    computed = {
        length: PROMPTS[length] + ([] if report["evicted_tokens"] else answer[:-1])
        for length, (answer, report) in one_device.items()
    }
    for number in range(len(servers)):
        expected = {
            tuple(computed[length][start : start + BLOCK])
            for length in LENGTHS[number:]
            for start in range(0, len(computed[length]) - BLOCK + 1, BLOCK)
        }
        told: set[tuple[int, ...]] = set()
        end = time.monotonic() + 20
        while told != expected:
            assert time.monotonic() < end, f"{len(expected - told)} blocks were not announced"
            for rank in (2 * number, 2 * number + 1):
                if subscribers[rank].has_more(0.2):
                    batch = subscribers[rank].batch()
                    assert batch.data_parallel_rank == rank
                    told |= {tuple(block["token_ids"]) for block in blocks(batch.events)}
            assert told <= expected
