# SPDX-License-Identifier: Apache-2.0
"""Two engines in this process, and clients that send their requests to both as a router does."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state

from tests.engine.support import Engine, count_preemptions, greedy, start_engine
from tests.plumbing.server import free_port
from tests.scheduler.checks import check_pool
from vllm_pyramid.transfer.folder import FolderTransport

TTL_S, WAIT_S, LIMIT_GIB = 6.0, 1.0, 0.024  # of states: a few of them
STEPS_OF_CHECKS = 40
COMMON: dict[str, Any] = {
    "kv_budget": "20%",
    "dtype": "float32",
    "max_num_batched_tokens": 512,
    "hf_overrides": {"max_position_embeddings": 16_384},
}
# Where a client leaves, and what becomes of a state between the engines.
LEAVES = ("waiting", "prefilling", "with the ticket", "asking", "loading", "generating")
FATES = ("lost", "head damaged", "part damaged", "part lost", "fetched twice")


class Side:
    """One of several engines of this process: vLLM keeps the worker's connector in a global."""

    def __init__(self, model: Path, role: str, where: dict[str, Any], **own: Any) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        extra = {"ttl_s": TTL_S, "wait_s": WAIT_S, "limit_gib": LIMIT_GIB, **where}
        self.engine = start_engine(
            str(model),
            kv_transfer_config={
                "kv_connector": "PyramidConnector",
                "kv_role": role,
                "kv_connector_extra_config": extra,
            },
            **{**COMMON, **own},
        )
        self._agent: Any = kv_transfer_state._KV_CONNECTOR_AGENT
        self.in_scheduler: Any = self.engine.scheduler.connector

    @contextlib.contextmanager
    def active(self) -> Iterator[Engine]:
        """Its worker has its own connector here."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self._agent
        try:
            yield self.engine
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None

    def step(self) -> list[Any]:
        with self.active() as engine:
            return list(engine.client.step())

    def states(self) -> dict[str, Any]:
        """Where the states are that it serves, by their names: folders or dictionaries."""
        found: dict[str, Any] = {}
        for half in (self.in_scheduler, self._agent):
            place = half._transport
            if isinstance(place, FolderTransport):
                found |= {path.name: place._folder for path in place._folder.iterdir()}
            else:
                found |= dict.fromkeys(place._server.states, place._server)
        return found

    def close(self) -> None:
        self._agent.shutdown()
        self.in_scheduler.shutdown()
        self.engine.shutdown()


@dataclass
class Client:
    """A request that two engines answer.

    Attributes:
        leaves: where its client goes away, if at all. fate: of its state, if any.
        after: steps in that phase before the client goes. output: the last of either engine.
        twin: whether it asks with a ticket that another has.
    """

    prompt: list[int]
    leaves: str | None
    fate: str | None
    after: int
    policy: dict[str, Any]
    output: Any = None
    twin: bool = False


class Router:
    """Sends clients' requests to an engine that prefills, and with the tickets to the other."""

    def __init__(self, prefill: Side, decode: Side, seed: str, answer: int = 96) -> None:
        self.prefill, self.decode, self.answer = prefill, decode, answer
        self.source = random.Random(seed)
        self.first: dict[str, Client] = {}
        self.second: dict[str, Client] = {}
        self.seen: Counter[str] = Counter()
        self.expected: dict[tuple[Any, ...], list[int]] = {}
        self._outputs: list[Any] = []  # of the engine that prefills
        self._sent = 0

    def run(self, prompts: list[list[int]]) -> None:
        """Send all prompts, and wait until each has been answered or given up."""
        clients = [self._draw(prompt) for prompt in prompts]
        self._compute_expected(clients)
        steps = 0
        with count_preemptions(self.decode.engine) as preemptions:
            while clients or self.first or self.second:
                for _ in range(min(len(clients), self.source.choice([0, 1, 1, 4]))):
                    self._send(clients.pop())
                self._outputs += self.prefill.step()
                while self._outputs:
                    self._prefilled(self._outputs.pop(0))
                self._leave(self.prefill, self.first)
                for output in self.decode.step():
                    self._answered(output)
                self._leave(self.decode, self.second)
                steps += 1
                if steps % STEPS_OF_CHECKS == 0:
                    check_pool(self.prefill.engine.coordinator)
                    check_pool(self.decode.engine.coordinator)
        self.seen["preempted"] += preemptions["all"]

    def check_nothing_left(self) -> None:
        """No block is held on either side, and no state or reader of one is left."""
        end = time.monotonic() + 2 * TTL_S + 15
        sides = self.prefill, self.decode
        while any(side.engine.scheduler.has_requests() for side in sides) or self.prefill.states():
            assert time.monotonic() < end, f"left: {self.prefill.states()}"
            for side in sides:
                side.step()
            time.sleep(0.02)
        for side in sides:
            with side.active() as engine:
                engine.scheduler.reset_prefix_cache()
                engine.check_nothing_left()
            assert (
                not engine.scheduler.pyramid.chunks.loading and not engine.scheduler.pyramid.begun
            )
            incoming = side.in_scheduler._incoming
            assert not incoming._of_request and not incoming._loading
            worker = side._agent._of_worker.results()
            assert not worker.finished_sending and not worker.finished_recving

    def _draw(self, prompt: list[int]) -> Client:
        source = self.source
        return Client(
            prompt,
            source.choice(LEAVES) if source.random() < 0.35 else None,
            source.choice(FATES) if source.random() < 0.35 else None,
            source.randrange(6),
            source.choice([{}, {}, {}, {"kv_budget": "35%"}, {"kv_policy": "full"}]),
        )

    def _compute_expected(self, clients: list[Client]) -> None:
        """What one engine answers: the one that prefills, with room for all."""
        with self.prefill.active() as engine:
            for own in [dict(pairs) for pairs in {tuple(c.policy.items()) for c in clients}]:
                of_own = [client.prompt for client in clients if client.policy == own]
                for one in engine.generate(of_own, greedy(self.answer, **own)):
                    self.expected[*one.job.prompt, *own.items()] = one.token_ids
            engine.scheduler.reset_prefix_cache()

    def _send(self, client: Client) -> None:
        name = f"p{self._sent}"
        self._sent += 1
        params = greedy(1, **client.policy, kv_transfer_params={"do_remote_decode": True})
        self._add(self.prefill, name, client, params)
        self.first[name] = client

    @staticmethod
    def _add(side: Side, name: str, client: Client, params: Any) -> None:
        with side.active() as engine:
            engine.client.add_request(name, {"prompt_token_ids": client.prompt}, params)

    def _prefilled(self, output: Any) -> None:
        if not output.finished:
            return
        client, ticket = self.first.pop(output.request_id), output.kv_transfer_params
        if "pyramid_state" not in ticket:
            self.seen["no ticket"] += 1  # no room for its head
        elif client.leaves == "with the ticket":
            self.seen["left with the ticket"] += 1
            return
        elif client.fate:
            self._spoil(ticket["pyramid_state"], client)
        params = greedy(self.answer, **client.policy, kv_transfer_params=ticket)
        names = [output.request_id.replace("p", "d")]
        if client.fate == "fetched twice":
            names.append(f"{names[0]}-twin")
        for name in names:
            self.second[name] = (
                client
                if name == names[0]
                else Client(client.prompt, None, client.fate, 0, client.policy, twin=True)
            )
            self._add(self.decode, name, client, params)

    def _spoil(self, state: str, client: Client) -> None:
        """Let something happen to a state, as far as it is there yet."""
        assert client.fate is not None
        if client.fate == "fetched twice":
            return
        name = f"{state}.{'0' if 'part' in client.fate else 'head'}"
        end = time.monotonic() + 1
        while (place := self.prefill.states().get(name)) is None:
            if time.monotonic() > end:  # there was no room for it
                client.fate = None
                return
            self._outputs += self.prefill.step()
            time.sleep(0.002)
        self.seen[client.fate] += 1
        if isinstance(place, Path):
            path = place / name
            data = bytearray(path.read_bytes())
            data[-40] ^= 1
            path.unlink() if "lost" in client.fate else path.write_bytes(data)
            return
        with place.lock:
            served = place.states.pop(name)
            if "lost" in client.fate:
                served.release()
                return
            data = bytearray(b"".join(served.pieces))
            data[-40] ^= 1
            place.states[name] = served._replace(pieces=[memoryview(data)])

    def _answered(self, output: Any) -> None:
        client = self.second[output.request_id]
        client.output = output
        tokens = list(output.outputs[0].token_ids)
        expected = self.expected[*client.prompt, *client.policy.items()]
        assert tokens == expected[: len(tokens)], (output.request_id, client)
        if not output.finished:
            return
        del self.second[output.request_id]
        assert len(tokens) == self.answer and output.outputs[0].finish_reason == "length"
        handed = output.kv_transfer_params["handed"]
        self.seen["loaded" if handed["tokens"] else handed["because"]] += 1
        if client.fate and client.fate != "fetched twice":
            assert not handed["tokens"], f"a state that was {client.fate} is believed"

    def _leave(self, side: Side, clients: dict[str, Client]) -> None:
        """Abort the requests whose clients leave now."""
        for name in [name for name, client in clients.items() if self._goes(side, name, client)]:
            client = clients.pop(name)
            self.seen[f"left {client.leaves}"] += 1
            with side.active() as engine:
                engine.client.abort_request([name])

    def _goes(self, side: Side, name: str, client: Client) -> bool:
        scheduler = side.engine.scheduler
        known = next(
            (r for key, r in scheduler.requests.items() if key.startswith(f"{name}-")), None
        )
        if known is None or client.leaves is None:
            return False
        computed = known.num_computed_tokens
        is_there = {
            "waiting": side is self.prefill and not computed,
            "prefilling": side is self.prefill and 0 < computed < len(client.prompt),
            "asking": side is self.decode and not computed,
            "loading": known.request_id in scheduler.pyramid.chunks.loading,
            "generating": side is self.decode and computed > len(client.prompt),
        }.get(client.leaves, False)
        client.after -= is_there
        return is_there and client.after < 0


@contextlib.contextmanager
def two_engines(
    model: Path, folder: Path | None, *, blocks: int, **own: Any
) -> Iterator[tuple[Side, Side]]:
    """An engine that prefills with room for all, and one that decodes in a small pool."""
    address = f"127.0.0.1:{free_port()}"
    send: dict[str, Any] = {"folder": str(folder)} if folder else {"listen": address}
    fetch: dict[str, Any] = {"folder": str(folder)} if folder else {"peers": [address]}
    with contextlib.ExitStack() as stack:
        sides = []
        for role, where, count in (("kv_producer", send, 12_000), ("kv_consumer", fetch, blocks)):
            side = Side(model, role, where, num_gpu_blocks_override=count, **own)
            stack.callback(side.close)
            side.engine.shuffle_blocks()
            sides.append(side)
        yield sides[0], sides[1]
