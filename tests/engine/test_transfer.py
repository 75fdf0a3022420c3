# SPDX-License-Identifier: Apache-2.0
"""Evicted states that travel from one engine to another, or to the same one again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import nixl_utils

from tests.engine.support import (
    Engine,
    Job,
    Outcome,
    Start,
    count_preemptions,
    greedy,
    random_prompts,
)
from vllm_pyramid.kv_cache.bundle_file import FORMAT
from vllm_pyramid.transfer import reasons

pytestmark = [pytest.mark.engine, pytest.mark.long]

LENGTHS = (100, 160, 333, 512, 20)
ANSWER = 20
SEND = {"do_remote_decode": True}


def connector(folder: Path, role: str = "kv_both", **own: Any) -> KVTransferConfig:
    """The connector over a folder; TCP where `own` has an address."""
    where = {} if {"listen", "peers"} & own.keys() else {"folder": str(folder)}
    return KVTransferConfig(
        kv_connector="PyramidConnector", kv_role=role, kv_connector_extra_config={**where, **own}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture
def start(tiny: Start, folder: Path) -> Start:
    """`start(policy, **settings)`: an engine that sends to itself, unless told otherwise."""

    def get(policy: str = "pyramidkv", **own: Any) -> Engine:
        settings: dict[str, Any] = {
            "kv_policy": policy,
            "kv_budget": "30%",
            "dtype": "float32",
            "kv_transfer_config": connector(folder),
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 256,
        }
        return tiny("mistral", **(settings | own))

    return get


@pytest.fixture(autouse=True)
def empty(folder: Path) -> Iterator[None]:
    """Every test leaves a folder without states."""
    yield
    for path in folder.iterdir():
        path.unlink(missing_ok=True)  # engines drop states by themselves, too


def send(engine: Engine, prompts: Sequence[list[int]], params: Any = None) -> list[dict[str, Any]]:
    """Prefill prompts, wait until their states are sent, and return their tickets."""
    outcomes = engine.generate(prompts, params or greedy(1, kv_transfer_params=SEND))
    drain(engine)
    return [outcome.report for outcome in outcomes]


def drain(engine: Engine) -> None:
    """Step until no blocks are pinned, as a server does while it is idle."""
    end = time.monotonic() + 30
    while engine.scheduler.has_requests():
        engine.client.step()
        assert time.monotonic() < end, "blocks of a request that has ended stay pinned"


def with_ticket(ticket: dict[str, Any], answer: int = ANSWER, **own: Any) -> Any:
    return greedy(answer, kv_transfer_params=ticket, **own)


def asking(
    prompts: Sequence[list[int]],
    tickets: Sequence[dict[str, Any]],
    answer: int = ANSWER,
    **own: Any,
) -> list[Job]:
    """Requests with the tickets of their prompts."""
    pairs = zip(prompts, tickets, strict=True)
    return [Job(prompt, with_ticket(ticket, answer, **own)) for prompt, ticket in pairs]


def without_ticket(report: dict[str, Any]) -> dict[str, Any]:
    return {key: report[key] for key in report.keys() - {"handed"}}


def check_equal(found: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """Tokens and reports of one engine."""
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert without_ticket(one.report) == without_ticket(other.report)


@pytest.mark.parametrize("policy", ["pyramidkv", "auto", "snapkv"])
@pytest.mark.parametrize("caching", [False, True])
def test_two_engines_answer_as_one(start: Start, folder: Path, policy: str, caching: bool) -> None:
    """In one batch with requests of other engines, whose prompts end after the first have begun."""
    prompts = random_prompts(LENGTHS, seed=3)
    sender = start(
        policy, kv_transfer_config=connector(folder, "kv_producer"), enable_prefix_caching=caching
    )
    tickets = send(sender, prompts)
    sender.check_nothing_left()
    page = sender.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    for ticket in tickets:  # a part has the blocks that the plan keeps, and a head before them
        size = (folder / f"{ticket['pyramid_state']}.0").stat().st_size
        assert 0 < size - ticket["blocks_after"] * page < 512
    engine = start(
        policy, kv_transfer_config=connector(folder, "kv_consumer"), enable_prefix_caching=caching
    )
    engine.shuffle_blocks()
    beside = [Job(prompt, greedy(ANSWER)) for prompt in random_prompts([200, 60], seed=4)]
    expected = engine.run([*(Job(prompt, greedy(ANSWER)) for prompt in prompts), *beside])
    engine.scheduler.reset_prefix_cache()
    jobs = asking(prompts, tickets)
    for index, job in enumerate(jobs):
        job.arrival = index // 2
    found = engine.run([*jobs, *beside])
    check_equal(found, expected)
    assert [one.report["handed"]["tokens"] for one in found[: len(jobs)]] == list(LENGTHS)
    assert "handed" not in found[-1].report
    assert not list(folder.iterdir()), "a state is fetched once"
    engine.check_nothing_left()


def test_the_decoding_engine_never_holds_the_prompt(start: Start, folder: Path) -> None:
    """In a pool without room for it, a request begins with the tails and computes no prompt."""
    engine = start("pyramidkv")
    (prompt,) = random_prompts([512])
    (ticket,) = send(engine, [prompt])
    peak, computed = 0, 0

    def look(engine: Engine) -> None:
        nonlocal peak
        used = engine.usable_blocks - engine.pool.get_num_free_blocks()
        peak = max(peak, used)

    schedule = engine.scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal computed
        output = schedule(*args, **kwargs)
        computed += output.total_num_scheduled_tokens
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", counted)
        (found,) = engine.run([Job(prompt, with_ticket(ticket, 16))], look)
    assert found.report["handed"] == {"tokens": 512}
    # 512 is a multiple of the block: each layer gets one block for what is generated.
    assert peak == ticket["blocks_after"] + engine.num_layers
    assert ticket["blocks_after"] < ticket["blocks_before"] / 2
    assert computed == 15, "a step for each token but the first"
    assert found.output.prompt_token_ids == prompt
    assert len(found.token_ids) == 16


@pytest.mark.parametrize(
    ("asynchronous", "nixl"), [(False, False), (True, False), (True, True)], ids=str
)
def test_over_tcp(start: Start, asynchronous: bool, nixl: bool) -> None:
    """Or by NIXL, where the package is installed."""
    if nixl and not nixl_utils.is_nixl_available():
        pytest.skip("the package nixl is not installed")
    address = "127.0.0.1:17731"
    engine = start(
        "pyramidkv",
        async_scheduling=asynchronous,
        kv_transfer_config=connector(
            Path(), listen=address, peers=[address], nixl=nixl, limit_gib=0.25
        ),
    )
    prompts = random_prompts(LENGTHS, seed=8)
    expected = engine.generate(prompts, greedy(ANSWER))
    tickets = send(engine, prompts)
    assert {ticket["pyramid_peer"] for ticket in tickets} == {address}
    found = engine.run(asking(prompts, tickets))
    check_equal(found, expected)
    assert all(one.report["handed"]["tokens"] for one in found)
    engine.check_nothing_left()


def test_what_looks_at_the_answer_sees_the_first_token(start: Start) -> None:
    """Penalties, bad words, fewest tokens and stop tokens."""
    engine = start("pyramidkv")
    (prompt,) = random_prompts([300], seed=12)
    plain = engine.generate([prompt], greedy(ANSWER))[0].token_ids
    settings: list[dict[str, Any]] = [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.9},
        {"min_tokens": 4, "stop_token_ids": [plain[1], plain[2]]},
        {"stop_token_ids": [plain[3]]},
        {"max_tokens": 2},
    ]
    for own in settings:
        params = {"temperature": 0.0, "max_tokens": ANSWER, "detokenize": False, **own}
        (expected,) = engine.generate([prompt], SamplingParams(**params, ignore_eos=True))
        first = SamplingParams(
            **{**params, "max_tokens": 1, "min_tokens": 0},
            ignore_eos=True,
            extra_args={"kv_transfer_params": SEND},
        )
        (ticket,) = send(engine, [prompt], first)
        again = SamplingParams(**params, ignore_eos=True, extra_args={"kv_transfer_params": ticket})
        (found,) = engine.generate([prompt], again)
        assert found.report["handed"] == {"tokens": 300}, own
        assert found.token_ids == expected.token_ids, own
        assert found.output.outputs[0].stop_reason == expected.output.outputs[0].stop_reason
        assert found.output.outputs[0].finish_reason == expected.output.outputs[0].finish_reason
    engine.check_nothing_left()


def _params(**own: Any) -> Any:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 8, "detokenize": False, "ignore_eos": True, **own}
    )


@pytest.mark.parametrize(
    ("label", "own"),
    [
        ("logprobs", {"logprobs": 2}),
        ("logprobs", {"prompt_logprobs": 1, "extra_args": {"kv_policy": "full"}}),
        ("seed", {"seed": 3, "temperature": 1.0}),
        ("short", {"max_tokens": 1}),
        ("uncached", {"skip_reading_prefix_cache": True}),
    ],
)
def test_what_cannot_be_exact_is_computed(start, folder, label, own) -> None:
    engine = start("pyramidkv")
    (prompt,) = random_prompts([200], seed=5)
    (expected,) = engine.generate([prompt], _params(**own))
    (ticket,) = send(engine, [prompt])
    extra = {**own.pop("extra_args", {}), "kv_transfer_params": ticket}
    (found,) = engine.generate([prompt], _params(**own, extra_args=extra))
    check_equal([found], [expected])
    assert found.report["handed"] == {"tokens": 0, "because": reasons.WORDS[label]}
    end = time.monotonic() + 5
    while list(folder.iterdir()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not list(folder.iterdir()), "the other engine is told to drop it"


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _other_version(path: Path) -> None:
    data = bytearray(path.read_bytes())
    assert data[12] == FORMAT
    data[12] += 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "label"),
    [
        (lambda head, part: head.unlink(), reasons.ABSENT),
        (lambda head, part: _flip(head, 150), reasons.UNREAD),
        (lambda head, part: _other_version(head), reasons.UNREAD),
        (lambda head, part: part.unlink(), reasons.UNREAD),
        (lambda head, part: _flip(part, 5000), reasons.UNREAD),
        (lambda head, part: part.write_bytes(part.read_bytes()[:-100]), reasons.UNREAD),
        (lambda head, part: part.write_bytes(part.read_bytes() + bytes(100)), reasons.UNREAD),
        (lambda head, part: part.write_bytes(head.read_bytes()), reasons.UNREAD),
    ],
    ids=["no-head", "head", "version", "no-part", "part", "cut", "longer", "swapped"],
)
def test_a_damaged_state_costs_a_prefill(start, folder, damage, label) -> None:
    """The same tokens, by an own computation; beside others that nothing happens to."""
    engine = start("pyramidkv", kv_transfer_config=connector(folder, wait_s=0.2))
    prompts = random_prompts([300, 170, 90], seed=6)
    expected = engine.generate(prompts, greedy(ANSWER))
    tickets = send(engine, prompts[:2])
    state = tickets[0]["pyramid_state"]
    damage(folder / f"{state}.head", folder / f"{state}.0")
    jobs = [*asking(prompts[:2], tickets), Job(prompts[2], greedy(ANSWER))]
    before = dict(engine.scheduler.pyramid.reports.policy_stats().get("handed", {}))
    found = engine.run(jobs)
    check_equal(found, expected)
    assert found[0].report["handed"] == {"tokens": 0, "because": reasons.WORDS[label]}
    assert found[1].report["handed"] == {"tokens": 170}
    now = engine.scheduler.pyramid.reports.policy_stats()["handed"]
    assert now[label] == before.get(label, 0) + 1
    engine.check_nothing_left()


def test_a_state_of_something_else_is_not_believed(start: Start) -> None:
    engine = start("pyramidkv")
    first, second = random_prompts([200, 200], seed=7)
    tickets = send(engine, [first] * 4)
    expected = engine.generate([second], greedy(ANSWER))
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({}, {"kv_budget": "20%"}),
        ({}, {"kv_policy": "full"}),
        ({"pyramid_state": "0" * 32}, {}),
        ({"pyramid_state": "../../etc/passwd"}, {}),
        ({"pyramid_peer": "10.0.0.1:80"}, {}),
        ({"pyramid_state": 7}, {}),
    ]
    for index, (changed, own) in enumerate(cases):
        prompt = second if index == 0 else first
        expected = engine.generate([prompt], greedy(ANSWER, **own))
        ticket = {**tickets[min(index, 3)], **changed}
        (found,) = engine.run([Job(prompt, with_ticket(ticket, **own))])
        check_equal([found], expected)
        label = [reasons.DIFFERS] * 3 + [reasons.ABSENT] + [reasons.TICKET] * 3
        assert found.report["handed"]["because"] == reasons.WORDS[label[index]], index
    engine.check_nothing_left()


@pytest.mark.parametrize("own", [{"kv_policy": "full"}, {"kv_keep": [0, 90]}], ids=str)
def test_settings_of_requests(start: Start, own: dict[str, Any]) -> None:
    """A whole prompt; spans, whose blocks the first engine has in a head, the other in a tail."""
    engine = start("pyramidkv", enable_prefix_caching=True)
    front, *ends = random_prompts([96, 200, 140], seed=15)
    prompts = [[*front, *end] for end in ends]
    expected = engine.generate(prompts, greedy(ANSWER, **own))
    tickets = send(engine, prompts, greedy(1, kv_transfer_params=SEND, **own))
    found = engine.run(asking(prompts, tickets, **own))
    check_equal(found, expected)
    assert [one.report["handed"]["tokens"] for one in found] == [296, 236]
    engine.scheduler.reset_prefix_cache()
    engine.check_nothing_left()


def test_a_turn_of_a_conversation_computes_its_prompt(start: Start) -> None:
    engine = start("pyramidkv", enable_prefix_caching=True)
    (prompt,) = random_prompts([200], seed=16)
    expected = engine.generate([prompt], greedy(ANSWER, kv_turns=[]))
    (ticket,) = send(engine, [prompt], greedy(1, kv_turns=[], kv_transfer_params=SEND))
    engine.scheduler.reset_prefix_cache()
    (found,) = engine.run([Job(prompt, with_ticket(ticket, kv_turns=[]))])
    assert found.token_ids == expected[0].token_ids
    assert found.report["handed"] == {"tokens": 0, "because": reasons.WORDS["turns"]}
    engine.scheduler.reset_prefix_cache()
    engine.check_nothing_left()


def test_turns_that_leave_no_trace_come_from_any_engine(start: Start) -> None:
    """With `kv_turn_mode: exact` a turn's state follows from its prompt alone."""
    engine, exact = start("pyramidkv", enable_prefix_caching=True), {"kv_turn_mode": "exact"}
    tokens, turns = random_prompts([200], seed=24)[0], []
    for more in random_prompts([0, 90, 70], seed=25):
        tokens = [*tokens, *more]
        own = {"kv_turns": list(turns), **exact}
        (expected,) = engine.generate([tokens], greedy(ANSWER, **own))
        engine.scheduler.reset_prefix_cache()  # as another engine, which has not seen the turns
        (ticket,) = send(engine, [tokens], greedy(1, kv_transfer_params=SEND, **own))
        engine.scheduler.reset_prefix_cache()
        (found,) = engine.run([Job(tokens, with_ticket(ticket, **own))])
        assert found.token_ids == expected.token_ids
        assert found.report["handed"] == {"tokens": len(tokens)}
        turns.append(len(tokens))
        tokens = [*tokens, *found.token_ids]
    engine.scheduler.reset_prefix_cache()
    engine.check_nothing_left()


def test_an_answer_that_ends_by_itself_needs_no_other_engine(start: Start, folder: Path) -> None:
    engine = start("pyramidkv")
    (prompt,) = random_prompts([200], seed=10)
    (plain,) = engine.generate([prompt], greedy(1))
    params = _params(
        max_tokens=1, stop_token_ids=plain.token_ids, extra_args={"kv_transfer_params": SEND}
    )
    (ended,) = engine.generate([prompt], params)
    assert "pyramid_state" not in ended.report and not list(folder.iterdir())
    # Stop tokens of the second request alone: its first token ends it.
    (ticket,) = send(engine, [prompt])
    own = _params(stop_token_ids=plain.token_ids, extra_args={"kv_transfer_params": ticket})
    (found,) = engine.generate([prompt], own)
    assert found.token_ids == plain.token_ids
    assert found.report["handed"]["because"] == reasons.WORDS[reasons.SHORT]


def test_an_engine_that_evicts_under_pressure_receives_states(start: Start, folder: Path) -> None:
    """What it receives is at its floor. Its own prompts are whole until it orders them to evict."""
    with pytest.raises(ValueError, match=r"kv_role kv_both.*leave the flag out there"):
        start("pyramidkv", kv_evict="pressure")  # it would send, too
    prompts, own = random_prompts(LENGTHS, seed=21), random_prompts([390, 410, 280], seed=22)
    sender = start("pyramidkv", kv_transfer_config=connector(folder, "kv_producer"))
    expected = sender.generate(prompts, greedy(60))
    tickets = send(sender, prompts)
    engine = start(
        "pyramidkv",
        kv_evict="pressure",
        kv_transfer_config=connector(folder, "kv_consumer"),
        enable_prefix_caching=True,
        kv_admission="prompt",
        num_gpu_blocks_override=390,  # all fit at their floors
        max_model_len=640,
    )
    whole = engine.generate(own, greedy(1))
    (lost,) = random_prompts([350], seed=23)
    jobs = [Job(prompt, greedy(60)) for prompt in own]
    jobs += asking(prompts, tickets, 60)
    jobs.append(Job(lost, with_ticket(tickets[0], 60)))  # another prompt's: computed here
    found = engine.run(jobs)
    handed = found[len(own) : -1]
    for one, other, length in zip(handed, expected, LENGTHS, strict=True):
        assert one.token_ids == other.token_ids
        assert one.report["blocks_after"] == other.report["blocks_after"]
        assert one.report["handed"] == {"tokens": length}
        assert one.report["evicted_to"] == []
    assert [one.token_ids[:1] for one in found[: len(own)]] == [one.token_ids for one in whole]
    assert any(one.report["evicted_to"] for one in (*found[: len(own)], found[-1]))
    assert not found[-1].report["handed"]["tokens"]
    engine.scheduler.reset_prefix_cache()
    engine.check_nothing_left()


def test_preempted_behind_a_state(start: Start) -> None:
    """In a pool that runs out, requests compute their prompts again and say the same."""
    prompts = random_prompts([300, 280, 290, 310, 270], seed=14)
    found: list[list[Outcome]] = []
    for blocks in (4000, 165):
        own = {"num_gpu_blocks_override": blocks, "max_model_len": 640}
        engine = start("pyramidkv", kv_admission="prompt", **own)
        tickets = send(engine, prompts)
        with count_preemptions(engine) as preemptions:
            found.append(engine.run(asking(prompts, tickets, 200)))
        assert (preemptions["all"] > 0) == (blocks == 165)
        engine.check_nothing_left()
    check_equal(found[1], found[0])
    said = {one.report["handed"].get("because") for one in found[1]}
    assert reasons.WORDS[reasons.PREEMPTED] in said
