# SPDX-License-Identifier: Apache-2.0
"""The bytes of a state, tickets from clients, and the connector's settings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig

from vllm_pyramid.kv_cache.bundle_file import FORMAT, DamagedFileError, sealed
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.request import for_request
from vllm_pyramid.transfer.settings import TransferSettings
from vllm_pyramid.transfer.states import (
    MismatchError,
    State,
    Ticket,
    asks,
    check_params,
    heads_of,
    request_key,
    sources,
)

STATE = State(Ticket("0123456789abcdef" * 2, "", 2), "namespace", "key")
BLOCKS = bytes(range(256)) * 4
LAYOUT = "1 times 128 bytes"


class Memory:
    """A transport within the test."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def put(self, name: str, pieces: Any) -> None:
        self.held[name] = b"".join(pieces)

    def get(self, name: str, peer: str, largest: int) -> memoryview | None:
        found = self.held.get(name)
        if found is not None and len(found) > largest:
            raise DamagedFileError("it is too large")
        return None if found is None else memoryview(found)

    def drop(self, names: Sequence[str], peer: str) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def memory() -> Memory:
    """A head, and the part of rank 1, whose first KV head is 3."""
    found = Memory()
    STATE.put_head(found, 70_000)
    found.put(STATE.ticket.name(1), sealed(STATE.part(3, 8, LAYOUT).begin(), BLOCKS))
    return found


def part_of(
    memory: Memory, state: State = STATE, first_head: int = 3, blocks: int = 8, layout: str = LAYOUT
) -> memoryview | None:
    return state.fetch(memory, 1, state.part(first_head, blocks, layout), len(BLOCKS))


def test_what_is_put_is_fetched(memory: Memory) -> None:
    assert [*memory.held] == [STATE.ticket.names[0], STATE.ticket.names[2]]
    assert STATE.fetch_head(memory, 2**17) == 70_000
    found = part_of(memory)
    assert found is not None
    assert bytes(found) == BLOCKS
    assert STATE.fetch(memory, 0, STATE.part(0, 8, LAYOUT), len(BLOCKS)) is None
    assert STATE.fetch_head(Memory(), 2**17) is None
    with pytest.raises(DamagedFileError, match="first token is 70000, and there are 70000"):
        STATE.fetch_head(memory, 70_000)


def test_any_change_or_cut_is_noticed(memory: Memory) -> None:
    source = random.Random(0)
    for name, data in [*memory.held.items()]:
        others = [data[:length] for length in (0, 1, 17, 18, 40, len(data) - 33, len(data) - 1)]
        for at in [*range(40), *source.sample(range(len(data)), 100)]:
            changed = bytearray(data)
            changed[at] ^= 1 << source.randrange(8)
            others.append(bytes(changed))
        for other in (*others, data + b"x"):
            memory.held[name] = other
            with pytest.raises(DamagedFileError):
                STATE.fetch_head(memory, 2**17) if name.endswith("head") else part_of(memory)


def test_another_version_is_not_read(memory: Memory) -> None:
    data = bytearray(memory.held[STATE.ticket.name("head")])
    assert data[12] == FORMAT
    data[12] += 1
    memory.held[STATE.ticket.name("head")] = bytes(data)
    with pytest.raises(DamagedFileError, match="another format"):
        STATE.fetch_head(memory, 2**17)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"state": STATE._replace(namespace="nomespace")}, "model, version"),
        ({"state": STATE._replace(key="yek")}, "prompt, policy"),
        ({"first_head": 2}, "prompt, policy"),
        ({"blocks": 7}, "prompt, policy"),
        ({"layout": "128 times 1 bytes"}, "layout of blocks"),
    ],
)
def test_another_part_is_refused(memory: Memory, changed: Any, reason: str) -> None:
    with pytest.raises(MismatchError, match=reason):
        part_of(memory, **changed)


def test_another_head_is_refused(memory: Memory) -> None:
    """Also one of another number of ranks than the ticket says."""
    for other in (
        STATE._replace(namespace="nomespace"),
        STATE._replace(key="yek"),
        STATE._replace(ticket=STATE.ticket._replace(ranks=3)),
    ):
        with pytest.raises(MismatchError):
            other.fetch_head(memory, 2**17)
    name = STATE.ticket.name("head")
    memory.held["f" * 32 + ".head"] = memory.held[name]
    with pytest.raises(MismatchError):
        STATE._replace(ticket=Ticket("f" * 32, "", 2)).fetch_head(memory, 2**17)


def test_blocks_of_another_size_are_refused(memory: Memory) -> None:
    with pytest.raises(DamagedFileError, match="1024 bytes, not 1040"):
        STATE.fetch(memory, 1, STATE.part(3, 8, LAYOUT), 1040)


@pytest.mark.parametrize(
    ("ranks", "heads"),
    [
        (1, [range(4)]),
        (2, [range(2), range(2, 4)]),
        (4, [range(1), range(1, 2), range(2, 3), range(3, 4)]),
        (8, [range(head, head + 1) for head in (0, 0, 1, 1, 2, 2, 3, 3)]),
    ],
)
def test_ranks_have_heads_as_in_vllm(ranks: int, heads: list[range]) -> None:
    """With more ranks than heads, `QKVParallelLinear` gives neighbours the same one."""
    assert [heads_of(rank, ranks, 4) for rank in range(ranks)] == heads


@pytest.mark.parametrize("theirs", [1, 2, 4, 8])
@pytest.mark.parametrize("mine", [1, 2, 4, 8])
def test_each_head_comes_from_one_rank(mine: int, theirs: int) -> None:
    for rank in range(mine):
        heads = heads_of(rank, mine, 4)
        found = [*sources(heads, theirs, 4)]
        assert all(held == heads_of(source, theirs, 4) for source, held in found)
        held = [head for _, one in found for head in one if head in heads]
        assert held == [*heads]


def test_a_key_names_prompt_policy_budget_and_spans() -> None:
    policy = load_policy("pyramidkv", "30%")
    prompts = [list(range(200)), [*range(199), 7]]
    keys = []
    for prompt, own in (
        (prompts[0], {}),
        (prompts[1], {}),
        (prompts[0], {"kv_budget": "20%"}),
        (prompts[0], {"kv_policy": "full"}),
        (prompts[0], {"kv_keep": [0, 32]}),
    ):
        served = for_request(policy, own)
        plan: Any = served.plan(len(prompt), 4, 16)
        keys.append(request_key(served, plan, prompt))
        assert keys[-1] == request_key(for_request(policy, own), plan, list(prompt))
    assert len({*keys}) == len(keys)
    served = for_request(policy, {})
    other: Any = served.plan(200, 5, 16)  # a model of more layers
    assert request_key(served, other, prompts[0]) not in keys


# Tickets ----------------------------------------------------------------------------------------


def test_a_ticket_survives_the_client() -> None:
    ticket = Ticket.new("10.0.0.1:7700", 4)
    assert Ticket.parse({**ticket.as_params(), "kv_policy": "auto"}) == ticket
    assert Ticket.new("", 1).state != Ticket.new("", 1).state
    assert asks(ticket.as_params(), "do_remote_prefill")
    assert not asks(ticket.as_params(), "do_remote_decode")


@pytest.mark.parametrize(
    "state",
    [
        *(None, 3, "", "../" + "a" * 29, "/etc/passwd", "A" * 32, "a" * 31, "a" * 33),
        *("a" * 32 + "\n", "a" * 31 + "/", "a" * 31 + "\0", ["a" * 32], "\u0663" * 32),
    ],
)
def test_a_state_has_a_number_for_a_name(state: Any) -> None:
    assert Ticket.parse({"pyramid_state": state, "pyramid_peer": ""}) is None


def test_a_peer_is_a_text() -> None:
    assert Ticket.parse({"pyramid_state": "a" * 32, "pyramid_peer": ["10.0.0.1", 1]}) is None
    assert Ticket.parse({"pyramid_state": "a" * 32}) == Ticket("a" * 32, "", 1)


@pytest.mark.parametrize("ranks", [0, -1, 257, True, "2", 2.0, None, [1]])
def test_ranks_are_a_small_number(ranks: Any) -> None:
    """A client's number leads to as many ports."""
    assert Ticket.parse({"pyramid_state": "a" * 32, "pyramid_ranks": ranks}) is None


@pytest.mark.parametrize("params", [None, 3, "do_remote_decode", [], {"do_remote_decode": 1}])
def test_other_parameters_ask_for_nothing(params: Any) -> None:
    assert not asks(params, "do_remote_decode")


def test_several_answers_do_not_share_a_first_token() -> None:
    for given in ({"do_remote_decode": True}, {"do_remote_prefill": True}):
        extra = {"kv_transfer_params": given}
        check_params(SamplingParams(n=1, extra_args=extra))
        with pytest.raises(ValueError, match="send n requests"):
            check_params(SamplingParams(n=2, extra_args=extra))
    check_params(SamplingParams(n=2, extra_args={"kv_transfer_params": {"other": 1}}))
    check_params(SamplingParams(n=2))


# Settings ---------------------------------------------------------------------------------------


def settings(role: str = "kv_both", **extra: Any) -> TransferSettings:
    return TransferSettings.of(
        KVTransferConfig(
            kv_connector="PyramidConnector", kv_role=role, kv_connector_extra_config=extra
        )
    )


def test_settings_of_each_role() -> None:
    found = settings(folder="/dev/shm/states")
    assert (found.sends, found.fetches, found.name) == (True, True, "")
    sender = settings("kv_producer", listen="10.0.0.1:7700", ttl_s=5)
    assert (sender.sends, sender.fetches, sender.name) == (True, False, "10.0.0.1:7700")
    assert sender.listen == ("10.0.0.1", 7700)
    assert sender.ttl_s == 5
    fetcher = settings("kv_consumer", peers=["10.0.0.1:7700", "[fe80::1]:80"])
    assert fetcher.peers == {"10.0.0.1:7700": ("10.0.0.1", 7700), "[fe80::1]:80": ("fe80::1", 80)}


@pytest.mark.parametrize(
    ("role", "extra", "message"),
    [
        ("kv_both", {}, "needs folder or listen"),
        ("kv_consumer", {}, "needs folder or peers"),
        ("kv_both", {"foldr": "x"}, r"no key \['foldr'\]"),
        ("kv_both", {"folder": ""}, "must be a path"),
        ("kv_both", {"folder": "x", "listen": "a:1"}, "leave one of them out"),
        ("kv_consumer", {"folder": "x", "peers": ["a:1"]}, "leave one of them out"),
        ("kv_both", {"listen": "7700"}, "HOST:PORT"),
        ("kv_both", {"listen": "host:70000"}, "HOST:PORT"),
        ("kv_both", {"listen": "host:\u0663"}, "HOST:PORT"),
        ("kv_both", {"listen": "0.0.0.0:7700"}, "names no host"),
        ("kv_consumer", {"peers": "a:1"}, "must be a list"),
        ("kv_consumer", {"peers": [["a", 1]]}, "HOST:PORT"),
        ("kv_both", {"folder": "x", "ttl_s": 0}, "ttl_s must be a positive number"),
        ("kv_both", {"folder": "x", "wait_s": "1"}, "wait_s must be a positive number"),
        ("kv_both", {"folder": "x", "limit_gib": True}, "limit_gib must be a positive number"),
    ],
)
def test_wrong_settings_say_what_to_change(role: str, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(role, **extra)


def test_settings_without_any() -> None:
    nothing = SimpleNamespace(
        kv_connector_extra_config=None, is_kv_producer=True, is_kv_consumer=True, kv_role="kv_both"
    )
    with pytest.raises(ValueError, match="needs folder or listen"):
        TransferSettings.of(nothing)
