# SPDX-License-Identifier: Apache-2.0
"""The bytes of a state, tickets from clients, and the connector's settings."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig

from vllm_pyramid.kv_cache.bundle_file import FORMAT, DamagedFileError, sealed
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.request import for_request
from vllm_pyramid.transfer.settings import TransferSettings
from vllm_pyramid.transfer.ticket import Ticket, asks, check_params
from vllm_pyramid.transfer.wire import (
    LARGEST_HEAD,
    MismatchError,
    StateHead,
    StateId,
    pack_head,
    pack_part,
    request_key,
    unpack_head,
    unpack_part,
)

pytestmark = pytest.mark.cpu

STATE = StateId("0123456789abcdef" * 2, "namespace", "key")
HEAD = StateHead(tokens=131_072, first_token=17)
BLOCKS = bytes(range(256)) * 4


def joined(pieces: list[memoryview]) -> memoryview:
    return memoryview(b"".join(pieces))


def test_what_is_packed_is_unpacked() -> None:
    head = joined(pack_head(STATE, HEAD))
    assert len(head) < LARGEST_HEAD
    assert unpack_head(STATE, head) == HEAD
    part = joined(pack_part(STATE, 3, 8, BLOCKS))
    assert bytes(unpack_part(STATE, 3, 8, len(BLOCKS), part)) == BLOCKS


def test_any_change_or_cut_is_noticed() -> None:
    head, part = joined(pack_head(STATE, HEAD)), joined(pack_part(STATE, 0, 8, BLOCKS))
    source = random.Random(0)
    for data in (head, part):
        for at in [*range(40), *source.sample(range(len(data)), 100)]:
            changed = bytearray(data)
            changed[at] ^= 1 << source.randrange(8)
            with pytest.raises(DamagedFileError):
                unpack_head(STATE, memoryview(changed))
            with pytest.raises(DamagedFileError):
                unpack_part(STATE, 0, 8, len(BLOCKS), memoryview(changed))
        for length in [0, 1, 17, 18, 40, len(data) - 33, len(data) - 1]:
            with pytest.raises(DamagedFileError):
                unpack_head(STATE, data[:length])
            with pytest.raises(DamagedFileError):
                unpack_part(STATE, 0, 8, len(BLOCKS), data[:length])


def test_another_version_is_not_read() -> None:
    data = bytearray(joined(pack_head(STATE, HEAD)))
    assert data[12] == FORMAT
    data[12] += 1
    with pytest.raises(DamagedFileError, match="another format"):
        unpack_head(STATE, memoryview(data))


@pytest.mark.parametrize(
    ("other", "rank", "blocks", "reason"),
    [
        (STATE._replace(namespace="other"), 0, 8, "model, version"),
        (STATE._replace(key="other"), 0, 8, "prompt, policy"),
        (STATE._replace(state="f" * 32), 0, 8, "prompt, policy"),
        (STATE, 1, 8, "prompt, policy"),
        (STATE, 0, 7, "prompt, policy"),
    ],
)
def test_another_state_is_refused(other: StateId, rank: int, blocks: int, reason: str) -> None:
    part = joined(pack_part(STATE, 0, 8, BLOCKS))
    with pytest.raises(MismatchError, match=reason):
        unpack_part(other, rank, blocks, len(BLOCKS), part)
    with pytest.raises(MismatchError):
        unpack_head(STATE, part)


def test_blocks_of_another_size_are_refused() -> None:
    part = joined(pack_part(STATE, 0, 8, BLOCKS))
    with pytest.raises(DamagedFileError, match="1024 bytes of blocks, not 1000"):
        unpack_part(STATE, 0, 8, 1000, part)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{}", b"\xff", b'{"tokens": 3}', b'{"tokens": -1, "first_token": 2}'),
        *(b'{"tokens": "3", "first_token": 2}', b'{"tokens": true, "first_token": 2}'),
    ],
)
def test_a_head_with_another_content_is_damaged(content: bytes) -> None:
    with pytest.raises(DamagedFileError):
        unpack_head(STATE, joined(sealed(STATE.begin(-1, 0), content)))


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
    ticket = Ticket.new("10.0.0.1:7700")
    assert Ticket.parse({**ticket.as_params(), "kv_policy": "auto"}) == ticket
    assert Ticket.new("").state != Ticket.new("").state
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
    assert Ticket.parse({"pyramid_state": "a" * 32}) == Ticket("a" * 32, "")


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
        ("kv_both", {"foldr": "x"}, "no key 'foldr'"),
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
