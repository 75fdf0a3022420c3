# SPDX-License-Identifier: Apache-2.0
"""Turns of conversations that go on with what the turn before has left."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import RequestStatus

from tests.kv_cache.test_prefix_cache import Pair, prompt
from tests.scheduler.beside import Beside
from tests.scheduler.checks import check_pool
from tests.scheduler.harness import make_request
from vllm_pyramid.kv_cache.evicted_names import EvictedNames, turn_name
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.request import resolve
from vllm_pyramid.policy.request_keys import RequestKeys


def _pair(num_blocks: int = 400, *, late: bool = False, **changes: Any) -> Pair:
    values = {"max_model_len": 384, "max_num_batched_tokens": 96, "budget": 24}
    return (Late if late else Pair)(num_blocks, **{**values, **changes})


class Late(Pair):
    """A pair in which each step is scheduled before the output of the one before is processed."""

    late: list[Any]

    def step(self) -> dict[str, int]:
        self.late = getattr(self, "late", [])
        output = self.scheduler.schedule()
        self.late.append((output, self.worker.execute(output)))
        if len(self.late) > 1:
            self.scheduler.update_from_output(*self.late.pop(0))
        check_pool(self.scheduler.coordinator)
        return dict(output.num_scheduled_tokens)


def _say(pair: Pair, name: str, tokens: list[int], answer: int, turns: list[int]) -> list[int]:
    """Run a turn of a conversation; returns its prompt and its answer."""
    pair.add(name, tokens, answer, kv_turns=turns)
    request = pair.scheduler.requests[name]
    pair.run()
    return list(request.all_token_ids)


def _states(pair: Pair) -> list[int]:
    """Blocks of each row that holds something evicted, the next to be dissolved first."""
    return [len(row.blocks) for row in pair.pool.idle if row.hash and b"@" in row.hash[32:33]]


def test_other_lengths_under_one_name_have_another_key() -> None:
    """As of an allocator of one's own that was edited between two starts."""
    policy = load_policy("snapkv", 24)
    served = resolve(policy, RequestKeys.parse({"kv_turns": [70]}))
    plans = [load_policy(name, 24).plan(200, 3, 4) for name in ("snapkv", "pyramidkv", "snapkv")]
    keys = []
    for plan in plans:
        found = EvictedNames.of(served, plan)
        assert found is not None
        keys.append(found.keys)
    assert keys[0] == keys[2] and keys[0][1] != keys[1][1]


def test_another_source_of_an_own_class_has_another_key(tmp_path, monkeypatch) -> None:
    keys = []
    for number, comment in enumerate(("", "", "# edited")):
        text = "from vllm_pyramid.methods.observation_window import ObservationWindowScorer\n"
        text += f"class Mine(ObservationWindowScorer):\n    kind: str{comment}\n"
        (tmp_path / f"mine{number}").mkdir()
        (tmp_path / f"mine{number}" / "own_scorer_of_keys.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path / f"mine{number}")
        monkeypatch.delitem(sys.modules, "own_scorer_of_keys", raising=False)
        policy = load_policy("snapkv", 24, {"scorer": "own_scorer_of_keys:Mine"})
        found = EvictedNames.of(
            resolve(policy, RequestKeys.parse({"kv_turns": [70]})), policy.plan(200, 3, 4)
        )
        assert found is not None
        keys.append(found.keys[1])
    assert keys[0] == keys[1] != keys[2]


def test_a_state_of_another_size_in_the_host_is_a_miss() -> None:
    """It would be copied into blocks that it does not fit."""
    resumed = []
    for wrong in (False, True):
        pair = _pair(num_blocks=3 * 40, host_slots=60)
        said = _say(pair, "first", prompt(70), 21, [])
        pair.pool.free_blocks(pair.pool.get_new_blocks(pair.pool.get_num_free_blocks()))
        host = pair.host
        assert not _states(pair)
        (base,) = [name for name, entry in host._entries.items() if entry.origin == "first"]
        if wrong:
            entry = host._entries[base]
            host._entries[base] = replace(entry, num_blocks=entry.num_blocks - 1)
        _say(pair, "second", [*said, *prompt(40, 500)], 4, [70])
        resumed.append(pair.worker.num_resumed)
    assert resumed == [1, 0]


def test_it_is_dissolved_from_its_end_and_its_survivors_last() -> None:
    pair = _pair(num_blocks=3 * 40)
    said = _say(pair, "first", prompt(70), 21, [])
    # Survivors: 24 tokens and what fills their blocks, up to row 17; then 4 whole rows.
    base = 3 * 7
    assert _states(pair) == [3] * 4 + [base]
    free = pair.pool.free_block_queue.num_free_blocks
    others = len(pair.pool.idle) - 5  # of the prompt, which are older
    pair.pool.free_blocks(pair.pool.get_new_blocks(free + 3 * others + 1))
    assert _states(pair) == [3] * 3 + [base]
    pair.add("second", [*said, *prompt(40, 500)], 4, kv_turns=[70])
    pair.run()
    assert pair.worker.num_adopted == 72 + 3 * 4
    pair.scheduler.reset_prefix_cache()
    assert not _states(pair)
    pair.add("third", [*said, *prompt(40, 500)], 4, kv_turns=[70])
    pair.run()
    assert pair.worker.num_resumed == 1, "it found what was forgotten"


def test_a_short_answer_leaves_the_state_of_its_turn() -> None:
    """The last survivor's row is not full; the turn names it."""
    pair = _pair()
    said = _say(pair, "first", prompt(70), 21, [])
    tokens = [*said, *prompt(42, 500)]
    assert len(tokens) % 4 == 1
    said = _say(pair, "second", tokens, 2, [70])
    assert pair.worker.num_adopted == 90 // 4 * 4
    _say(pair, "third", [*said, *prompt(40, 700)], 2, [70, len(tokens)])
    assert pair.worker.num_adopted == 90 // 4 * 4 + len(tokens)


def test_a_turn_with_two_answers_is_found_by_each_and_by_itself() -> None:
    pair = _pair()
    tokens, adopted = prompt(70), 0
    said = _say(pair, "first", tokens, 21, [])
    other = [*tokens, *prompt(40, 500)]
    for name, prompt_tokens, found in (
        ("cut", other, 70),
        ("again", [*said, *prompt(40, 600)], 88),
        ("another", [*tokens, 7, *prompt(40, 700)], 70),
        ("a part", [*said[:75], *prompt(40, 800)], 72),
        ("less than a block", [*said[:71], *prompt(40, 900)], 70),
    ):
        _say(pair, name, prompt_tokens, 21, [70])
        adopted += found
        assert pair.worker.num_adopted == adopted, name
    assert pair.worker.num_resumed == 5
    _say(pair, "other", [*prompt(69), 5, *prompt(40, 500)], 21, [70])
    assert pair.worker.num_resumed == 5, "its last token differs"
    _say(pair, "near", prompt(75), 2, [70])
    assert pair.worker.num_resumed == 5, "the queries of its end are computed in one step"


@pytest.mark.parametrize("answer", [2, 21])
def test_a_turn_is_found_in_the_host_too(answer: int) -> None:
    pair = _pair(num_blocks=3 * 40, host_slots=60)
    _say(pair, "first", prompt(70), answer, [])
    pair.pool.free_blocks(pair.pool.get_new_blocks(pair.pool.get_num_free_blocks()))
    assert not _states(pair)
    _say(pair, "second", [*prompt(70), *prompt(40, 500)], 4, [70])
    assert (pair.worker.num_resumed, pair.worker.num_adopted) == (1, 70)


@pytest.mark.parametrize("where", ["device", "host", "both"])
def test_those_who_go_on_share_what_stays_in_place(where: str) -> None:
    """The first span of a conversation is with its base, or in the host, and is loaded once."""
    pair = _pair(num_blocks=3 * 60, host_slots=200)
    pair.add("first", prompt(70), 5, kv_turns=[], kv_keep=[0, 33])
    pair.run()
    if where != "device":
        pair.pool.free_blocks(pair.pool.get_new_blocks(pair.pool.get_num_free_blocks()))
        assert not _states(pair) and not pair.pool.bundles
    if where == "both":  # what begins alike brings the first blocks of the span back
        pair.add("other", prompt(20), 1)
        pair.run()
    for name, start in (("second", 500), ("third", 900)):
        pair.add(name, [*prompt(70), *prompt(40, start)], 4, kv_turns=[70], kv_keep=[0, 33])
    pair.step()
    prefixes = pair.scheduler.coordinator.prefixes
    second, third = (prefixes.of(name).bundles[prefixes.cache] for name in ("second", "third"))
    assert (pair.worker.num_resumed, pair.worker.num_adopted) == (
        2,
        2 * 70 + (16 if where == "both" else 0),
    )
    assert second == third and len(second) == 33 // 4
    pair.run()
    for name in ("second", "third"):
        assert not prefixes.of(name).bundles[prefixes.cache]


def test_a_base_is_not_given_away_for_the_span_before_it() -> None:
    """The span comes from the host, into the blocks of what was used least recently."""
    pair = _pair(num_blocks=3 * 60, host_slots=200)
    pair.add("first", prompt(70), 5, kv_turns=[], kv_keep=[0, 33])
    pair.run()
    pair.pool.touch_prefix([row.hash for row in pair.pool.idle if row.hash and row.origin])
    free = pair.pool.get_num_free_blocks()
    pair.pool.free_blocks(pair.pool.get_new_blocks(free - sum(_states(pair))))
    assert len(pair.pool.bundles) == 1 and _states(pair), "not the base alone"
    pair.add("other", prompt(96, 5000), 1, kv_policy="full")  # used since
    pair.run()
    held = pair.pool.get_new_blocks(pair.pool.get_num_free_blocks() - pair.pool._idle_blocks)
    pair.add("second", [*prompt(70), *prompt(8, 500)], 2, kv_turns=[70], kv_keep=[0, 33])
    while pair.scheduler.requests:
        output = pair.scheduler.schedule()
        pair.scheduler.update_from_output(output, pair.worker.execute(output))
    assert pair.worker.num_resumed == 1
    pair.pool.free_blocks(held)


def test_a_turn_without_its_first_span_is_a_miss() -> None:
    pair = _pair(num_blocks=3 * 60)
    pair.add("first", prompt(70), 5, kv_turns=[], kv_keep=[0, 33])
    pair.run()
    name = next(iter(pair.pool.bundles))  # the first tokens' bundle
    states = [row.hash for row in pair.pool.idle if row.hash and b"@" in row.hash[32:33]]
    pair.pool.touch_prefix(states)
    blocks = pair.pool.get_new_blocks(pair.pool.get_num_free_blocks() - sum(_states(pair)))
    pair.pool.free_blocks(blocks)
    assert name not in pair.pool.bundles and _states(pair)
    pair.add("second", [*prompt(70), *prompt(40, 500)], 4, kv_turns=[70], kv_keep=[0, 33])
    pair.run()
    assert pair.worker.num_resumed == 0


@pytest.mark.parametrize("length", [76, 77, 78, 81, 82, 90])
def test_a_session_is_found_up_to_the_last_chunk(length: int) -> None:
    """A policy that asks for no queries computes two tokens: all whole blocks before them."""
    pair = _pair(policy="keydiff", policy_args=(("window", 4), ("sinks", 1)))
    said = _say(pair, "first", prompt(70), 21, [])
    _say(pair, "second", said[:length], 2, [70])
    assert pair.worker.num_adopted == (length - 2) // 4 * 4


def test_turns_are_forgotten_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_pyramid.kv_cache.session_cache.MAX_TURNS", 1)
    pair = _pair()
    for index in range(2):
        _say(pair, f"r{index}", prompt(70, 100 * index), 21, [])
    for index in (1, 0):
        _say(pair, f"s{index}", [*prompt(70, 100 * index), *prompt(40, 500)], 4, [70])
        assert pair.worker.num_resumed == 1


def test_what_names_a_turn() -> None:
    """Its tokens and all that its blocks' hashes tell; nothing where these tell less."""

    def name(tokens: list[int], point: int, salt: str | None = None, key: bytes = b"k") -> Any:
        request = make_request("r", tokens, hash_block_size=4, cache_salt=salt)
        return turn_name(request, request.block_hashes, 4, point, key)

    found = name(prompt(20), 10)
    assert found is not None and found[32:] == b"@k"
    assert found == name([*prompt(10), 7, 7, 7], 10)
    others = [name(prompt(20), 11), name([*prompt(9), 7, 7, 7], 10), name(prompt(20), 10, "a")]
    others += [name([1, *prompt(20)[1:]], 10), name(prompt(20), 10, key=b"l")]
    assert None not in others and len({found, *others}) == 6
    assert name(prompt(20), 3) is None and name(prompt(20), 8) is None
    request = make_request("r", prompt(20), hash_block_size=4)
    for offset, length, told in ((0, 8, True), (6, 3, False), (9, 1, False), (10, 4, True)):
        at = PlaceholderRange(offset=offset, length=length)
        request.mm_features = [MultiModalFeatureSpec(None, "image", "an image", at)]
        assert (turn_name(request, request.block_hashes, 4, 10, b"k") is not None) == told


def test_who_evicts_nothing_in_its_turn_leaves_the_same_state() -> None:
    """Less than 32 tokens behind a turn's end nothing is evicted; the next turn may."""
    pair = _pair()
    said = _say(pair, "first", prompt(70), 6, [])
    tokens = [*said, *prompt(10, 500)]
    said = _say(pair, "second", tokens, 9, [70])
    assert pair.worker.num_evictions == 1
    assert pair.worker.num_adopted == 75 // 4 * 4 == 72
    _say(pair, "third", [*said, *prompt(30, 700)], 2, [70, len(tokens)])
    assert pair.worker.num_evictions == 2
    assert pair.worker.num_adopted == 72 + 94 // 4 * 4


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_hit_leaves_the_queries_of_a_prompts_end_at_which_nothing_goes(drafts: int) -> None:
    """Rounded to blocks, some of these prompts keep at their end all that they hold."""
    quiet = 0
    for n in range(52, 70):
        pair = _pair(policy="pyramidkv", drafts=drafts)
        pair.add("first", prompt(50), 21, kv_turns=[], kv_budget="30%")
        request = pair.scheduler.requests["first"]
        pair.run()
        said = list(request.all_token_ids)
        pair.add("second", said[:n], 4, kv_turns=[50], kv_budget="30%")
        plan = pair.scheduler.coordinator.plans.of("second")
        quiet += plan.end_number not in plan.giving
        pair.run()
        assert pair.worker.num_adopted <= n - pair.scheduler.pyramid.policy.min_last_chunk, n
    assert quiet > 1


def test_who_is_aborted_inside_its_prompt_leaves_what_it_had() -> None:
    pair = _pair(max_num_batched_tokens=20)
    tokens = [*prompt(70), *prompt(100, 500)]
    pair.add("first", tokens, 4, kv_turns=[70])
    while pair.scheduler.requests["first"].num_computed_tokens < 110:
        pair.step()
    computed = pair.scheduler.requests["first"].num_computed_tokens
    pair.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    pair.step()
    _say(pair, "second", tokens, 4, [70])
    assert pair.worker.num_adopted == computed // 4 * 4


def test_a_turn_behind_the_prompt_ends_with_an_error_and_the_engine_goes_on() -> None:
    """Front ends refuse it; whoever comes by another way must not end the engine."""
    pair = _pair()
    request = make_request("wrong", prompt(50), 4, {"kv_turns": [60]}, hash_block_size=4)
    pair.scheduler.add_request(request)
    assert "wrong" in pair.scheduler.grammar_compile_error_reqs
    _say(pair, "right", prompt(70), 4, [])


# Beside layers that do not evict ------------------------------------------------------------------

WINDOW, CHUNK, DRAFT = Beside("sliding", 10), Beside("chunked", 12), Beside("draft")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "beside", [(WINDOW,), (Beside("sliding", 3), CHUNK), (DRAFT, WINDOW, DRAFT)]
)
def test_hits_beside_other_layers_are_as_long_as_they_can_be(asynchronous, beside) -> None:
    """Wherever a request ends, its state ends at the last edge of a block before."""
    for answer in range(18, 26):
        pair = _pair(800, late=asynchronous, asynchronous=asynchronous, beside=beside)
        tokens, turns, adopted = prompt(70), [], 0
        for index in range(3):
            said = _say(pair, f"r{index}", tokens, answer, turns)
            assert pair.worker.num_resumed == index
            assert pair.worker.num_adopted == adopted
            turns = [*turns, len(tokens)]
            adopted += (len(said) - 1) // 4 * 4
            tokens = [*said, *prompt(40, 500 + 100 * index)]
        assert pair.worker.num_resumed_beside


def test_what_stands_beside_an_eviction_is_named_by_what_it_depends_on() -> None:
    """Of a row of a window: the evictions before its last token, and nothing before the first."""
    pair = _pair(beside=(WINDOW,))
    said = _say(pair, "first", prompt(72), 20, [])
    tokens = [*said, *prompt(40, 500)]
    pair.add("second", tokens, 4, kv_turns=[72])
    known = pair.scheduler.coordinator.plans.records["second"]
    assert known.terms.evicted is not None
    first, second = (b"@" + key for key in known.terms.evicted.keys.values())
    # The last token of row 17 is attended to before the first turn's end evicts.
    ends = {4: b"", 72: b"", 73: first, 76: first, len(tokens): first, len(tokens) + 1: second}
    assert {end: known.terms.suffix(end) for end in ends} == ends
    pair.add("alone", tokens, 4)
    known = pair.scheduler.coordinator.plans.records["alone"]
    assert known.terms.suffix(len(tokens)) == b"" and known.terms.suffix(len(tokens) + 1) is None
    pair.run()


@pytest.mark.parametrize(("gone", "resumed", "adopted"), [(1, 1, 84), (5, 0, 64)])
def test_a_state_is_found_as_far_as_its_windows_are_there(gone, resumed, adopted) -> None:
    """Without the last row of a window, up to it; without those behind its base not at all."""
    pair = _pair(beside=(WINDOW,))
    said = _say(pair, "first", prompt(70), 21, [])
    pair.add("second", [*said, *prompt(40, 500)], 4, kv_turns=[70], kv_turn_mode="resume")
    pool, hashes = pair.pool, pair.scheduler.requests["second"].block_hashes[22 - gone : 22]
    windows = [row for row in pool.idle if row.hash and row.hash[32:35] == b"/0@"]
    windows = [row for row in windows if row.hash and row.hash[:32] in hashes]
    assert len(windows) == gone
    for row in windows:  # as if their blocks had been needed
        del pool.idle[row]
        pool._idle_blocks -= len(row.blocks)
        pool._forget(row)
        pool.free_blocks(row.blocks)
    pair.run()
    assert (pair.worker.num_resumed, pair.worker.num_adopted) == (resumed, adopted)


@pytest.mark.parametrize(("num_blocks", "resumed"), [(303, 0), (304, 1)])
def test_what_is_copied_beside_is_not_given_away_for_the_copy(num_blocks, resumed) -> None:
    """Where the pool has no room beside the windows' rows either, the prompt is computed again.

    The second turn needs 63 blocks at its peak in the layers that evict, and 18 in each of 8
    windows, of which it copies 8 behind its first 88 tokens. The state has 33 blocks.
    """
    assert 63 + 8 * 18 + 33 + 8 * 8 == 304
    beside = (Beside("sliding", 30),) * 8
    pair = _pair(num_blocks, max_model_len=132, max_num_batched_tokens=8, beside=beside)
    said = _say(pair, "first", prompt(70), 21, [])
    _say(pair, "second", [*said, *prompt(35, 500)], 4, [70])
    assert pair.worker.num_resumed == resumed


def test_a_state_is_not_dissolved_for_what_is_copied_from_windows() -> None:
    """Where it is older than all else that is idle, and nothing else is free."""
    pair = _pair(beside=(WINDOW,) * 3)
    said = _say(pair, "first", prompt(70), 21, [])
    of_state = _states(pair)
    for row in list(pair.pool.idle):
        assert row.hash is not None
        if b"@" not in row.hash[32:33]:
            pair.pool.touch_bundle(row.hash)
    free = pair.pool.free_block_queue.num_free_blocks
    assert pair.pool.add_idle(BlockHash(bytes(32)), pair.pool.get_new_blocks(free))
    assert _states(pair) == of_state
    _say(pair, "second", [*said, *prompt(40, 500)], 4, [70])
    assert pair.worker.num_resumed == 1


@pytest.mark.parametrize("block_size", [4, 8])
def test_what_a_state_asks_for_is_what_it_takes(block_size: int) -> None:
    """Beside windows with blocks as long as those of the layers that evict, or half as long."""
    beside = (WINDOW, Beside("sliding", 21), DRAFT)
    pair = _pair(900, beside=beside, block_size=block_size)
    said = _say(pair, "first", prompt(70), 21, [])
    tokens = [*said, *prompt(40, 500)]
    pair.add("second", tokens, 4, kv_turns=[70])
    coordinator, request = pair.scheduler.coordinator, pair.scheduler.requests["second"]
    record = coordinator.plans.records["second"]
    found = coordinator.stores.find(request, record, len(tokens), lambda point: 8)
    assert found == len(said) // 8 * 8
    asked = coordinator.get_num_blocks_to_allocate("second", len(tokens))
    free = pair.pool.get_num_free_blocks()
    coordinator.allocate_new_computed_blocks("second", (), found, 0)
    coordinator.allocate_new_blocks("second", len(tokens), len(tokens))
    assert free - pair.pool.get_num_free_blocks() == asked
    check_pool(coordinator)
