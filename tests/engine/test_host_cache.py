# SPDX-License-Identifier: Apache-2.0
"""The host cache in an engine: what has left a small pool comes back, to the byte."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conversations import Rows, ask, kept_at_end
from tests.engine.paged_paper import SummaryCheck, pages_read
from tests.engine.support import (
    Engine,
    Job,
    Models,
    Outcome,
    Start,
    assert_same_tokens,
    greedy,
    random_prompts,
)
from tests.plumbing.children import Child
from tests.plumbing.children import greedy as plain_greedy
from vllm_pyramid.kv_cache import host_cache

BLOCK, LAYERS, LONGEST, WINDOW = 16, 4, 1024, 8
KILLED = Path(__file__).parents[1] / "plumbing/killed.py"
# One sequence of the greatest length, and the null block.
SMALL_POOL = LAYERS * LONGEST // BLOCK + 1
SNAPKV = {"kv_policy": "snapkv", "kv_budget": 64, "kv_policy_args": {"window": WINDOW}}
OF_CHILDREN: dict[str, Any] = {  # of engines in processes of their own
    "dtype": "float32",
    "max_model_len": LONGEST,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": SMALL_POOL,
    "kv_cache_memory_bytes": 64 << 20,
    "additional_config": {**SNAPKV, "kv_min_tokens": 0, "kv_host_cache": 0.0625},
}
KINDS: dict[str, dict[str, Any]] = {
    "snapkv": {**SNAPKV, "dtype": "float32"},
    "fp8": {"kv_policy": "full", "kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


def engine_of(tiny: Start, traces: Path, kind: str = "snapkv", **changes: Any) -> Engine:
    settings = {
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "max_model_len": LONGEST,
        "num_gpu_blocks_override": SMALL_POOL,
        "kv_host_cache": 0.0625,
        **KINDS[kind],
        **changes,
    }
    if kind == "snapkv":
        settings["kv_trace"] = str(traces)
    return tiny("mistral", **settings)


def push_out(engine: Engine) -> None:
    """Let other prompts take every block of the pool."""
    engine.generate(random_prompts([900, 900], seed=99), greedy(2))


def totals(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = engine.scheduler.pyramid.reports.policy_stats()["host_cache"]
    return dict(found)


class Contents(Rows):
    """The bytes of a prompt's first bundles, by their hashes, whenever the pool has them."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        super().__init__(engine)
        self._count = tokens // BLOCK
        self.hashes: list[Any] = []
        self.by_hash: dict[Any, bytes] = {}
        self.same = 0

    def __call__(self, engine: Engine) -> None:
        if not self.hashes:
            (request,) = engine.scheduler.requests.values()
            self.hashes = engine.coordinator.prefixes.cache.hashes(request)[: self._count]
        super().__call__(engine)
        for row, content in self.seen.items():
            if row.hash in self.hashes:
                known = self.by_hash.setdefault(row.hash, content)
                assert known == content, "it came back with other bytes"
                self.same += known is not content


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_comes_back_to_the_byte(tiny: Start, traces: Path, kind: str) -> None:
    """With the tokens, logits and kept positions of the run that computed it."""
    engine = engine_of(tiny, traces, kind)
    assert engine.llm.reset_prefix_cache()
    (prompt,) = random_prompts([500], seed=1)
    found = 496 if kind == "fp8" else (500 - WINDOW) // BLOCK * BLOCK
    look = Contents(engine, found)
    (first,) = engine.run([Job(prompt, greedy(20, logprobs=2))], look)
    look(engine)
    assert len(look.by_hash) == len(look.hashes) == found // BLOCK, "all of it is in the pool"
    push_out(engine)
    assert not engine.pool.longest_prefix(look.hashes)
    before = totals(engine)
    (again,) = engine.run([Job(prompt, greedy(20, logprobs=2))], look)
    assert (first.cached, again.cached) == (0, found)
    after = totals(engine)
    assert after["hits"] - before["hits"] == found
    page = engine.coordinator.layer_specs[0].page_size_bytes
    assert after["bytes_loaded"] - before["bytes_loaded"] == found // BLOCK * LAYERS * page
    assert look.same > 100
    if kind == "fp8":  # the last tokens were computed in a chunk of another length
        assert again.token_ids[0] == first.token_ids[0]
    else:
        assert_same_tokens([again], [first])
        assert kept_at_end(traces, again) == kept_at_end(traces, first)
        assert again.report == first.report
    engine.check_whole()


@pytest.mark.parametrize("kind", ["spread", "box of an evicted fp8 cache"])
def test_a_prefix_comes_back_with_its_summaries(tiny, tmp_path, monkeypatch, kind) -> None:
    """Tokens behind it read the same pages, whether it was found on the device, host or disk."""
    attend = {"budget": 96, "dense_layers": 1, "sinks": 16, "recent": 16}
    own: dict[str, Any] = {"kv_policy": "select", "dtype": "float32"}
    if kind != "spread":
        attend |= {"scorer": "box", "combine": "max"}
        own = {"kv_policy": "select-evicted", "kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}
    settings = {
        "max_num_batched_tokens": 256,
        "max_model_len": LONGEST,
        "num_gpu_blocks_override": SMALL_POOL,
        "kv_host_cache": 0.0625,
        "kv_host_cache_dir": str(tmp_path),
        "kv_policy_args": {"attend": attend},
        **own,
    }
    (prompt,) = random_prompts([500], seed=1)
    found = 500 // BLOCK * BLOCK if kind == "spread" else (500 - 48) // BLOCK * BLOCK
    engine = tiny("mistral", max_num_seqs=8, **settings)
    check = SummaryCheck()

    def ask_again(on_step: Callable[[Engine], None] = check) -> tuple[Outcome, list[Any]]:
        with pages_read(engine) as pages:
            (outcome,) = engine.run([Job(prompt, greedy(30, logprobs=2))], on_step)
        return outcome, [pages[key] for key in sorted(pages, key=lambda key: key[1:])]

    first, _ = ask_again()
    device = ask_again()
    push_out(engine)
    before = totals(engine)
    host = ask_again()
    after = totals(engine)
    assert after["hits"] - before["hits"] == found
    block = engine.coordinator.layer_specs[0]
    summary = 2 * block.num_kv_heads * block.head_size * max(block.dtype.itemsize, 2)
    moved = block.page_size_bytes + summary
    assert after["bytes_loaded"] - before["bytes_loaded"] == found // BLOCK * LAYERS * moved
    engine.check_whole()
    push_out(engine)  # what was kept on the device is in the host, and so in a file
    engine = tiny("mistral", max_num_seqs=7, **settings)
    monkeypatch.setattr(host_cache, "MOST_READ", 1)
    steps = [0]

    def count(engine: Engine) -> None:
        check(engine)
        steps.append(totals(engine)["file_bytes_read"])

    restarted = ask_again(count)
    of_steps = [now - before for before, now in pairwise(steps)]
    assert max(of_steps) <= LAYERS * moved and sum(map(bool, of_steps)) == found // BLOCK
    assert totals(engine)["file_bytes_read"] > 0
    assert check.pages > 1000
    for outcome, pages in (host, restarted):
        assert (outcome.cached, device[0].cached) == (found, found)
        assert pages == device[1] and len(pages) == 29 * (LAYERS - 1)
        assert outcome.token_ids == device[0].token_ids
        assert outcome.logprobs == device[0].logprobs  # floats, bit for bit
        assert outcome.report["pages_read"] < 0.7 * outcome.report["pages_visible"]
    if kind == "spread":  # fp8: the last tokens were computed in a chunk of another length
        assert_same_tokens([device[0]], [first])
    engine.check_whole()


def test_an_exact_turn_keeps_what_a_fresh_prompt_keeps(tiny: Start, traces: Path) -> None:
    """Bit for bit, whatever earlier turns evicted, with the whole prompt from the host."""
    engine = engine_of(tiny, traces)
    assert engine.llm.reset_prefix_cache()
    said = random_prompts([400, 90, 70], seed=2)
    tokens: list[int] = []
    turns: list[int] = []
    exact: list[Outcome] = []
    for words in said:
        tokens = [*tokens, *words]
        params = greedy(30, logprobs=2, kv_turns=turns, kv_turn_mode="exact")
        exact += engine.run([Job(tokens, params)])
        turns = exact[-1].report["kv_turns"]
        tokens = [*tokens, *exact[-1].token_ids]
        push_out(engine)
    assert [outcome.report["kv_turn_mode"] for outcome in exact] == ["exact"] * 3
    assert turns == [400, 520, 620]
    # Whole prompts are found; the answer of the turn before is computed.
    assert [outcome.cached for outcome in exact] == [0, 400, 512]
    assert [outcome.report["resumed_tokens"] for outcome in exact] == [0, 0, 0]
    last = exact[-1]
    # The same three prompts as conversations that resume, which evict where the turns ended.
    resumed = ask(engine, last.job.prompt, turns[:-1], 30)
    assert resumed.report["kv_turn_mode"] == "resume" and resumed.report["inner_evictions"] == 2
    assert kept_at_end(traces, resumed) != kept_at_end(traces, last)
    for outcome in exact:
        assert engine.llm.reset_prefix_cache()
        (fresh,) = engine.run([Job(outcome.job.prompt, greedy(30, logprobs=2))])
        assert fresh.cached == 0 and outcome.report["inner_evictions"] == 0
        assert kept_at_end(traces, outcome) == kept_at_end(traces, fresh)
        assert_same_tokens([outcome], [fresh])
    engine.check_whole()


def test_an_evicted_state_comes_back(tiny: Start, traces: Path) -> None:
    """A turn resumes what the turn before kept, after others have had all of the pool."""
    engine = engine_of(tiny, traces)
    assert engine.llm.reset_prefix_cache()
    first_words, more = random_prompts([400, 80], seed=3)
    found = []
    for pushes in (False, True):
        assert engine.llm.reset_prefix_cache()
        first = ask(engine, first_words, [], 40)
        if pushes:
            push_out(engine)
        tokens = [*first_words, *first.token_ids, *more]
        found.append(ask(engine, tokens, [400], 20))
    whole = (400 + 39) // BLOCK * BLOCK
    assert [outcome.report["resumed_tokens"] for outcome in found] == [whole, whole]
    assert [outcome.cached for outcome in found] == [whole, whole]
    assert_same_tokens(found[1:], found[:1])
    assert kept_at_end(traces, found[1]) == kept_at_end(traces, found[0])
    engine.check_whole()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, tiny_model: Any) -> Iterator[Child]:
    """Two ranks with a pool of one sequence, a host cache and a folder; then two on the folder."""
    prompt, *others = random_prompts([900, 800, 850], seed=5)
    params = plain_greedy(20)
    waves = [[[prompt, params]], [[others[0], params]], [[others[1], params]], [[prompt, params]]]
    folder = tmp_path_factory.mktemp("host-ranks")
    own = {**OF_CHILDREN["additional_config"], "kv_host_cache_dir": str(folder / "kv")}
    settings = {
        "model": str(tiny_model("llama-mha")),
        **OF_CHILDREN,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "additional_config": own,
    }
    child = Child(
        folder / "child",
        (settings, waves),
        (settings, [[[prompt, params]]]),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    yield child
    child.kill()


def test_two_ranks_store_their_own_heads(two_ranks: Child) -> None:
    """In host memory, and in files that the next ranks find."""
    result, after_restart = two_ranks.results(800)
    first, *_, again = result["outputs"]
    (last,) = after_restart["outputs"]
    assert first["cached"] == 0
    for later in (again, last):
        assert later["cached"] == (900 - WINDOW) // BLOCK * BLOCK
        assert later["token_ids"] == first["token_ids"]
        assert later["report"] == first["report"]


def test_memory_that_the_machine_does_not_have(tiny_model: Models) -> None:
    from vllm_pyramid import LLM

    with pytest.raises(ValueError, match=r"--kv-host-cache 1e\+05 \(GiB\) does not fit into"):
        LLM(str(tiny_model("mistral")), skip_tokenizer_init=True, **SNAPKV, kv_host_cache=100000)


@pytest.mark.usefixtures("prepared_programs")
def test_a_conversation_goes_on_after_kill_9(tmp_path: Path, tiny_model: Models) -> None:
    """Its second turn resumes the state in the folder: tokens and hits as without the kill."""
    llm = {
        "model": str(tiny_model("mistral")),
        **OF_CHILDREN,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
    }
    request = tmp_path / "request.json"
    said = random_prompts([400, 80], seed=6)
    request.write_text(json.dumps({"llm": llm, "folder": str(tmp_path / "kv"), "said": said}))
    turns: list[dict[str, Any]] = []
    for life, status in (("first", -signal.SIGKILL), ("second", 0)):
        with (tmp_path / "log").open("w+") as log:
            done = subprocess.run(
                [sys.executable, str(KILLED), str(request), life],
                stdout=log,
                stderr=log,
                env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
                start_new_session=True,
                timeout=400,
            )
            log.seek(0)
            lines = [line for line in log if "leaked" not in line]
            assert done.returncode == status, "".join(lines)[-8000:]
        turns += json.loads(request.with_suffix(f".{life}").read_text())["turns"]
    first, without_kill, after = turns
    assert (first["cached"], without_kill["cached"]) == (0, (400 + 39) // BLOCK * BLOCK)
    assert after == without_kill
