# SPDX-License-Identifier: Apache-2.0
"""Random lives of random requests over the real schedulers and the real block pool."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.plans import plan_for
from tests.plumbing.pairwise import covering
from tests.scheduler.beside import FIRST_LAYER
from tests.scheduler.checks import check_pool, host_of
from tests.scheduler.harness import (
    FILE_WORDS,
    ORDINARY_TOKEN,
    SERIAL,
    PlainWorker,
    Setup,
    make_request,
    make_scheduler,
)
from tests.scheduler.harness import Row as WorkerRow
from tests.scheduler.router import Router
from tests.scheduler.variants import VARIANTS, features
from vllm_pyramid.compat.side_channel import read_report
from vllm_pyramid.kv_cache.evicted_names import turn_name
from vllm_pyramid.kv_cache.host_files import HostFiles
from vllm_pyramid.methods.host_values import HostValues
from vllm_pyramid.methods.solved import SolvingAllocator
from vllm_pyramid.methods.solved.scheduler import SampledShares
from vllm_pyramid.plan import (
    DeferredPlan,
    LevelPlan,
    Plan,
    RetentionPlan,
    least_given_back,
    peak_blocks,
)
from vllm_pyramid.policy.capabilities import Feature
from vllm_pyramid.policy.kept_spans import Spans, flat, only_leading
from vllm_pyramid.policy.request import resolve
from vllm_pyramid.policy.request_keys import RequestKeys
from vllm_pyramid.scheduler.admission import Admission

pytestmark = [pytest.mark.cpu, pytest.mark.long]

LIMITS = settings(
    max_examples=10,
    stateful_step_count=40,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
FEW = settings(LIMITS, max_examples=6)
# The first round lives other lives in every run (`seed` of conftest.py). What a variant is
# for may be rare: up to `ROUNDS` rounds follow, of known lives, until it has been seen.
ROUNDS = 14
OVERRIDES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"kv_policy": "full"},
    {"kv_budget": 9},
    {"kv_budget": "60%"},
    {"other": 1},
)
# Spans that stay, where the policy can keep them; they end with the prompt at the latest.
SPANS: tuple[Spans, ...] = (
    *((),) * 5,
    *(((0, 4),), ((0, 30),), ((0, 96),), ((0, 9), (12, 40)), ((17, 18),)),
)
PROMPT_LENS = st.one_of(st.integers(1, 64), st.integers(1, 8), st.sampled_from([9, 10, 32, 64]))
# Where a prompt leaves the trunk of a tree of prompts, and along which branch; or whose answer it
# goes on from.
ORIGINS = st.one_of(
    st.tuples(st.sampled_from([0, 5, 16, 40, 96]), st.integers(0, 2)), st.integers(0, 63)
)
HASH_BYTES = 32  # of SHA-256; what stands behind names a kind of layer
SALTS = (None, None, None, "a", "b")
INTERFERENCES = ("stop", "stop", "abort", "preempt all")


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler, a worker, and up to `depth` steps whose output has not been processed."""

    setup: ClassVar[Setup]
    depth: ClassVar[int] = 1
    seen: ClassVar[Counter[str]]  # so that a quiet machine cannot pass for a good one

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0
        # Of requests that belong to a conversation: its turns' ends, their own settings, salt.
        self.talks: dict[str, tuple[list[int], Any, str | None]] = {}
        self.requests: dict[str, Request] = {}
        self.plans: dict[str, Plan] = {}
        self.resumed_from_host = 0
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        # Rows by identity: where the cells are, what they hold, the name of the row before.
        self.looked_at: dict[int, tuple[Any, tuple[np.ndarray, np.ndarray], np.ndarray, Any]] = {}

    @initialize(
        spare=st.integers(0, 60), seed=st.integers(0, 2**16), events=st.sampled_from([True, False])
    )
    def start(self, spare: int, seed: int, events: bool) -> None:
        self.events = events and bool(self.setup.prefix_caching)
        self.folder = TemporaryDirectory() if self.setup.host_folder else None
        self.begin(self.setup.blocks_of_longest + spare, seed)

    def begin(self, num_blocks: int, seed: int) -> None:
        """Start an engine."""
        self.scheduler = make_scheduler(self.setup, num_blocks, self.events)
        self.coordinator = self.scheduler.coordinator
        self.router = Router.of(self.scheduler) if self.events else None
        self.sampled = [h for h in self.scheduler.pyramid.hooks if isinstance(h, SampledShares)]
        self.worker = PlainWorker(self.scheduler.pyramid.policy, self.setup, num_blocks, seed)
        if self.scheduler.pyramid.pressure is not None and seed % 2:
            self.scheduler.pyramid.pressure._most_marked //= 3  # so that many get no levels
        if self.folder is not None:
            host, page = host_of(self.coordinator), FILE_WORDS * np.dtype(np.int64).itemsize
            assert host is not None
            most = self.setup.host_slots * self.setup.num_layers * page
            host.files = HostFiles(self.folder.name, "one", page, 2 * most, most, patience=0)
        if self.scheduler.pyramid.chunks.admission is not None:
            self.watch(self.scheduler.pyramid.chunks.admission)
        if self.setup.beside and self.setup.prefix_caching:
            self.watch_windows()
        if self.setup.host_slots:
            self.watch_states()

    def watch_states(self) -> None:
        """Count the states of which something comes from the host."""
        enter = self.coordinator.sessions.enter

        def entered(request_id: str, record: Any, hit: Any) -> None:
            self.resumed_from_host += bool(hit.in_host)
            enter(request_id, record, hit)

        self.coordinator.sessions.enter = entered  # type: ignore[method-assign]

    def watch_windows(self) -> None:
        """Whether windows are found that somebody still looks at."""
        stock_groups, rows = self.coordinator.stock_groups, self.coordinator.block_pool.bundles
        enter = stock_groups.enter

        def entered(request_id: str, hashes: Any, suffix: Any) -> Any:
            names = [name for names in stock_groups.sources(hashes, suffix) for name in names]
            self.seen["windows in use found"] += any(rows[name].refs for name in names)
            return enter(request_id, hashes, suffix)

        stock_groups.enter = entered  # type: ignore[method-assign]

    def watch(self, admission: Admission) -> None:
        """Requests are made to wait only while others run."""
        admits = admission.admits

        def watched(
            request: Request, plan: Plan, computed: int, running: Sequence[Request]
        ) -> bool:
            answer = admits(request, plan, computed, running)
            assert answer or running
            self.seen["made to wait"] += not answer
            return answer

        admission.admits = watched  # type: ignore[method-assign]
        shared = admission.shared_bundles

        def counted(request_id: str) -> Any:
            found = shared(request_id)
            self.seen["counted once"] += any(counts for _, counts in found)
            return found

        admission.shared_bundles = counted  # type: ignore[method-assign]

    # Rules ------------------------------------------------------------------------------------

    @rule(
        prompts=st.lists(
            st.tuples(
                PROMPT_LENS,
                st.integers(1, 32),
                st.sampled_from(OVERRIDES),
                ORIGINS,
                st.sampled_from(SALTS),
                st.sampled_from(SPANS),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def add(self, prompts: list[Any]) -> None:
        for prompt_len, max_tokens, override, origin, salt, spans in prompts:
            if self.scheduler.pyramid.policy.schedule.keeps_prompts and override == {
                "kv_budget": "60%"
            }:
                override = {"kv_budget": 14}  # of the answer, so no share
            request_id = f"r{self.num_requests}"
            self.num_requests += 1
            if not self.setup.turns:  # where a conversation grows by itself
                prompt_len *= self.setup.max_model_len // 96
            if self.setup.prefix_caching:
                prompt = self.prompt_from(origin, prompt_len)
                prompt_len = len(prompt)
                override = self.with_spans(override, spans, prompt_len)
                if self.setup.turns and not (override and override.get("kv_policy")):
                    before: list[int] = []
                    if isinstance(origin, int) and (name := self.named(origin)) in self.talks:
                        before, override, salt = self.talks[name]
                    before = [end for end in before if end < prompt_len]
                    self.talks[request_id] = [*before, prompt_len], override, salt
                    override = {**(override or {}), "kv_turns": before}
                request = make_request(
                    request_id,
                    prompt,
                    max_tokens,
                    override,
                    hash_block_size=self.setup.block_size,
                    cache_salt=salt,
                    priority=self.num_requests % 3 if self.setup.priorities else 0,
                )
                if salt is not None:
                    self.worker.salts[request_id] = salt
            else:
                override = self.with_spans(override, spans, prompt_len)
                request = make_request(request_id, prompt_len, max_tokens, override)
            self.requests[request_id] = request
            self.plans[request_id] = plan_for(
                self.scheduler.pyramid.policy,
                RequestKeys.parse(override),
                prompt_len,
                self.setup.num_layers,
                self.setup.largest_block,
            )
            self.scheduler.add_request(request)
            solver = self.scheduler.pyramid.policy.allocator
            samples = isinstance(solver, SolvingAllocator) and solver.samples
            assert samples == bool(self.sampled), "the hooks are those of the policy"
            if self.refused(request_id, prompt_len, max_tokens, override):
                self.plans[request_id] = self.coordinator.plans.of(request_id)
            for sampled in self.sampled:  # the scheduler alone can know
                self.plans[request_id] = self.coordinator.plans.of(request_id)
                self.seen["averaged"] += request_id in sampled._averaged
            assert self.coordinator.plans.of(request_id) is self.plans[request_id]

    def follow_ways(self) -> None:
        """Plan later turns by the turns of which the scheduler tells the workers."""
        for name, ways in self.scheduler.pyramid.ways._ways.items():
            request, turns = self.requests[name], self.talks[name][0][:-1]
            params = request.sampling_params
            assert params is not None and params.extra_args is not None
            told = params.extra_args["kv_turns"]
            assert told == turns[len(turns) - len(told) :] and len(ways) in (2, 3)
            self.seen["exact turns"] += not told
            self.seen["restarted turns"] += 0 < len(told) < len(turns)
            self.plans[name] = plan_for(
                self.scheduler.pyramid.policy,
                RequestKeys.parse(params.extra_args),
                request.num_prompt_tokens,
                self.setup.num_layers,
                self.setup.largest_block,
            )

    def with_spans(
        self, override: dict[str, Any] | None, spans: Spans, prompt_len: int
    ) -> dict[str, Any] | None:
        """Return a request's settings with those spans that its policy can keep."""
        policy = self.scheduler.pyramid.policy
        inside = tuple((start, min(end, prompt_len)) for start, end in spans if start < prompt_len)
        if self.setup.turns or policy.why_not(Feature.INNER_SPANS) is not None:
            inside = only_leading(inside)
        if not inside or policy.why_not(Feature.KV_KEEP) is not None:
            return override
        self.seen["spans"] += 1
        return {**(override or {}), "kv_keep": flat(inside)}

    def refused(
        self, request_id: str, prompt_len: int, max_tokens: int, override: dict[str, Any] | None
    ) -> bool:
        """Whether a prompt alone would need more than the pool: then it ends with an error."""
        policy = self.scheduler.pyramid.policy
        served = resolve(policy, RequestKeys.parse(override))
        plan = self.plans[request_id]
        sizes = np.array(self.setup.block_sizes)
        blocks = peak_blocks(plan, prompt_len, sizes, stages=self.setup.stages)
        needed = (
            self.setup.of_fullest_stage(blocks) + self.scheduler.pyramid.planner._pool.other_blocks
        )
        refused = policy.inner_policy is not None and needed > self.worker.num_blocks
        assert refused == (request_id in self.scheduler.grammar_compile_error_reqs), served
        self.seen["refused"] += refused
        return refused

    def prompt_from(self, origin: tuple[int, int] | int, length: int) -> list[int]:
        if isinstance(origin, int):  # the next turn of somebody's conversation
            name, most = self.named(origin), 2 * self.setup.max_model_len // 3
            said = list(self.requests[name].all_token_ids) if name else []
            if name and origin >= 48:  # its client does not repeat the answer
                del said[self.requests[name].num_prompt_tokens :]
            return [*said, *range(50, 50 + length)][:most]
        leaves, branch = origin
        return [1000 + i if i < leaves else 2000 + 100 * branch + i for i in range(length)]

    def named(self, origin: int) -> str:
        """One of all requests so far; where there are conversations, of those that ended last."""
        names = list(self.requests)
        if self.setup.turns:
            names = [name for name in names if self.requests[name].is_finished()][-4:]
        return names[origin % len(names)] if names else ""

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @precondition(lambda self: self.scheduler.requests)
    @rule(which=st.integers(0, 63), how=st.sampled_from(INTERFERENCES))
    def interfere(self, which: int, how: str) -> None:
        names = sorted(self.scheduler.requests)
        request_id = names[which % len(names)]
        if how == "stop":
            self.worker.stop.add(request_id)
        elif how == "abort":
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        else:  # as a pause of the engine for new weights does; they resume in the same step
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.seen[how] += 1

    @precondition(lambda self: self.folder is not None)
    @rule(damaged=st.integers(0, 3), seed=st.integers(0, 2**16))
    def kill(self, damaged: int, seed: int) -> None:
        """Start again: running requests and both tiers are lost, files are not, save some."""
        assert self.folder is not None
        host = host_of(self.coordinator)
        assert host is not None and host.files is not None
        host.files.close()
        files = sorted(Path(self.folder.name).rglob("*.kv"))
        for path in files[seed % 7 :: 7][:damaged]:
            path.write_bytes(path.read_bytes()[: seed % 1000])
        self.seen["filled"] += self.worker.num_filled
        for name in list(self.scheduler.requests):
            self.requests[name].status = RequestStatus.FINISHED_ABORTED
        self.in_flight.clear()
        before = self.worker
        self.begin(before.num_blocks, seed)
        self.worker.writers, self.worker.serial = before.writers, before.serial
        self.worker.ended, self.worker.salts = before.ended, before.salts
        self.looked_at = {}
        self.seen["killed"] += bool(files)

    @precondition(lambda self: self.in_flight)
    @rule()
    def process(self) -> None:
        output, result = self.in_flight.popleft()
        self.scheduler.update_from_output(output, result)
        if self.setup.drafts and not self.setup.asynchronous:  # else vLLM keeps places for them
            names = [name for name in result.req_ids if name in self.scheduler.requests]
            count = self.worker.random.randint
            drafts = [[ORDINARY_TOKEN] * count(0, self.setup.drafts) for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    # One step ---------------------------------------------------------------------------------

    def step(self) -> None:
        while len(self.in_flight) >= self.depth:
            self.process()
        before = {name: request.num_computed_tokens for name, request in self.requests.items()}
        preemptions = {name: request.num_preemptions for name, request in self.requests.items()}
        output = self.scheduler.schedule()
        self.follow_ways()
        began = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        began |= {
            name: computed
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if name in cached.resumed_req_ids
        }
        self.seen["hits"] += sum(computed > 0 for computed in began.values())
        for name, scheduled in output.num_scheduled_tokens.items():
            request = self.requests[name]
            if (
                request.num_computed_tokens - request.num_in_flight_tokens
                >= request.num_prompt_tokens
            ):
                evicts = self.plans[name].evicts and not self.plans[name].waits_for_orders
                has_evicted = self.coordinator.plans.has_evicted(name)
                assert has_evicted == evicts or self.plans[name].waits_for_orders, "freed late"
                self.check_freed(name, request.num_computed_tokens - request.num_in_flight_tokens)
            self.check_chunk(name, began.get(name, before[name]), scheduled)
        for name, count in preemptions.items():
            self.seen["preempted"] += self.requests[name].num_preemptions - count
            assert self.requests[name].num_preemptions - count <= 1
        self.in_flight.append((output, self.worker.execute(output)))
        for name, eviction in read_report(self.in_flight[-1][1]).evictions.items():
            self.seen["evicted"] += 1
            end = self.plans[name].end_number
            self.seen["evicted later"] += eviction.number > end
            self.seen["evicted inside"] += eviction.number < end
            assert (eviction.keep is not None) == isinstance(self.plans[name], DeferredPlan)
            self.seen["solved"] += eviction.keep is not None
            self.seen["evicted again"] += self.requests[name].num_preemptions > 0
            again = self.requests[name].num_preemptions > 0
            self.seen["evicted later again"] += again and eviction.number > end
            self.seen["evicted inside again"] += again and eviction.number < end
        self.seen["mixed steps"] += len({*self.phases(output)}) > 1
        self.seen["ordered"] += self.worker.num_ordered > 0
        self.seen["without levels"] += self.worker.num_without > 0
        self.seen["copied"] += self.worker.num_copied > 0
        self.seen["left behind"] += self.worker.num_left > 0
        self.seen["resumed"] += self.worker.num_resumed > 0
        self.seen["resumed from the host"] += self.resumed_from_host > 0
        self.seen["windows found"] += self.worker.num_adopted_beside > 0
        self.seen["windows resumed"] += self.worker.num_resumed_beside > 0
        self.seen["rejected"] += self.worker.num_rejected > 0
        self.seen["accepted"] += self.worker.num_accepted > 0
        self.check_tables()
        self.check_rows()
        self.check_host_rows()

    def check_rows(self) -> None:
        """Every row holds what the whole cache holds of its tokens, and so does the one before.

        A row is looked at when it appears; from then on nothing may write into it.
        """
        pool = self.coordinator.block_pool
        self.seen["duplicates"] += len(pool.duplicates)
        looked_at, owners = {}, None
        for row in [
            *pool.bundles.values(),
            *(row for rows in pool.duplicates.values() for row in rows),
        ]:
            if row.hash[HASH_BYTES:].startswith(b"@"):  # of a state: looked at by whoever adopts it
                assert not row.refs
                self.seen["rows of states"] += 1
                continue
            known = self.looked_at.get(id(row))
            if known is None or known[0] is not row:
                owners = owners or self.owners()
                places, before = self.check_row(row, owners)
                known = row, places, self.worker.memory_PN[places], before
            _, places, tags, before = looked_at[id(row)] = known
            assert (self.worker.memory_PN[places] == tags).all(), "a row was written into"
            # An order may take the row before, which its request had alone.
            is_taken = self.worker.num_ordered > 0
            assert before is None or before in pool.bundles or is_taken
            beside = row.hash[HASH_BYTES:]
            if len(self.coordinator.prefixes.kinds) > 1 and beside:
                self.seen["to the end"] += 1
            elif beside:
                self.seen["rows beside evicted" if b"@" in beside else "rows beside"] += 1
        self.looked_at = looked_at

    def check_host_rows(self) -> None:
        """Check that every slot holds what the whole cache holds of its tokens.

        Slots of states hold what was evicted; the request that loads a state checks its survivors.
        """
        host = host_of(self.coordinator)
        if host is None:
            return
        counters = host.counters
        for name in ("hits", "evictions", "loaded"):
            self.seen[f"host {name}"] += getattr(counters, name) > 0
        owners, turns = self.owners(), self.turn_names()
        for name, entry in host._entries.items():
            slots = [host._table._manager._policy.chunks[key].chunk_id for key in host._keys(entry)]
            tags = self.worker.host_SLN[slots].reshape(-1, self.worker.host_SLN.shape[-1])
            tags = tags[: entry.num_blocks, : self.setup.block_size]
            if name[:HASH_BYTES] in turns:  # what is behind the turn's end is nobody's
                self.seen["host turns"] += 1
                continue
            assert (tags >= 0).all(), "a slot that was never written"
            index, request = owners[name[:HASH_BYTES]]
            end = (index + 1) * self.setup.block_size
            for serial in np.unique(tags >> SERIAL).tolist():
                assert self.worker.writers[serial].salt == request.cache_salt, "another's"
            if name[HASH_BYTES:]:
                self.seen["host states"] += 1
                continue
            prompt = list(request.all_token_ids)
            expected = WorkerRow(0, prompt, request.cache_salt, [], [], np.zeros(0), np.zeros(0))
            positions = np.arange(end - self.setup.block_size, end)
            for layer in range(self.setup.num_layers):
                self.worker.check_shared(layer, positions, tags[layer], expected)

    def turn_names(self) -> set[bytes]:
        """What names the tokens of the turns that end inside a block."""
        cache, found = self.coordinator.prefixes.cache, set()
        for name, (ends, *_) in self.talks.items():
            request = self.requests[name]
            for end in ends:
                turn = turn_name(request, cache.hashes(request), cache.tokens, end, b"")
                found.add(b"" if turn is None else turn[:HASH_BYTES])
        return found

    def owners(self) -> dict[Any, tuple[int, Request]]:
        """By the name of a row, one whose tokens it holds, and which of its rows it is."""
        found: dict[Any, tuple[int, Request]] = {}
        for request in self.requests.values():
            for index, block_hash in enumerate(self.coordinator.prefixes.cache.hashes(request)):
                found.setdefault(block_hash, (index, request))
        return found

    def check_row(
        self, row: Any, owners: dict[Any, tuple[int, Request]]
    ) -> tuple[tuple[np.ndarray, np.ndarray], Any]:
        """Compare each cell with its owner's tokens.

        Returns:
            Where they are, `[cells]` each; and the name of the row before, which must be there.
        """
        prefixes, *to_end = self.coordinator.prefixes.kinds
        name, beside = row.hash[:HASH_BYTES], row.hash[HASH_BYTES:]
        if to_end and beside:
            (prefixes,), beside = to_end, b""
        index, request = owners[name]
        layers = list(enumerate(zip(prefixes.blocks.tolist(), self.setup.block_sizes, strict=True)))
        number, _, behind = beside[1:].partition(b"@")
        if beside:
            kind = self.coordinator.stock_groups.groups[int(number)]
            count = prefixes.tokens // kind.block_size
            numbers = [max(group - self.setup.num_layers, 0) for group in kind.groups]
            layers = [(FIRST_LAYER + number, (count, kind.block_size)) for number in numbers]
        before = None
        if index and not beside:
            before = prefixes.named(prefixes.hashes(request)[index - 1 : index])[0]
        prompt, salt = list(request.all_token_ids), request.cache_salt
        expected = WorkerRow(0, prompt, salt, [], [], np.zeros(0), np.zeros(0))
        positions = index * prefixes.tokens + np.arange(prefixes.tokens)
        blocks, ids, offsets = iter(row.blocks), [], []
        pool_size = self.worker.num_blocks + 1
        for layer, (count, size) in layers:
            if not count:  # a lane of the other kind
                continue
            own = [next(blocks).block_id for _ in range(count)]
            stage = 0 if beside else self.setup.stage_of[layer]
            ids.append(np.repeat(own, size) + stage * pool_size)
            offsets.append(np.tile(np.arange(size), count))
            tags = self.worker.memory_PN[ids[-1], offsets[-1]]
            history = self.worker.writers[int(tags[-1]) >> SERIAL].history if behind else ()
            self.worker.check_shared(layer, positions, tags, expected, history)
        assert next(blocks, None) is None
        return (np.concatenate(ids), np.concatenate(offsets)), before

    def phases(self, output: SchedulerOutput) -> list[bool]:
        """Whether each request of the step is past its prompt."""
        return [
            self.worker.rows[name].computed > self.plans[name].prompt_len
            for name in output.num_scheduled_tokens
        ]

    def check_freed(self, name: str, processed: int) -> None:
        """By the blocks that it has given back, a request keeps to its later evictions too."""
        plan = self.plans[name]
        record = self.coordinator.plans.records[name]
        if plan.waits_for_orders:
            assert record.released == record.confirmed, "freed late"
            self.seen["ordered again"] += record.released > 1
            self.seen["kept whole"] += not record.released
        if isinstance(plan, RetentionPlan) and (plan.every or plan.inner):
            number = plan.evictions_by(processed)
            released = self.coordinator.plans.records[name].released
            assert 0 < released <= number
            given = plan.skip_after(released)
            assert (given == plan.skip_after(number)).all(), "freed late"

    def check_chunk(self, name: str, computed: int, scheduled: int) -> None:
        """No chunk crosses an eviction; those in the prompt leave the observation window."""
        plan = self.plans[name]
        on_host = isinstance(self.scheduler.pyramid.policy.values, HostValues)
        if on_host and computed < plan.prompt_len:
            assert computed + scheduled <= plan.prompt_len, f"{name}: a chunk crosses"
        stop = plan.next_eviction(computed)
        if not plan.evicts or stop is None:
            return
        if self.setup.turns and plan.evictions_by(stop) not in plan.giving:
            return
        assert computed + scheduled <= stop, f"{name}: a chunk crosses an eviction"
        if computed >= plan.prompt_len:
            return
        assert stop <= plan.prompt_len, f"{name}: a chunk crosses the end of the prompt"
        left = stop - computed - scheduled
        policy = self.scheduler.pyramid.policy
        window = min(policy.min_last_chunk, stop)
        if policy.inner_policy is not None and stop < plan.prompt_len:
            window = policy.inner_policy.min_last_chunk
        assert left >= window or (left == 0 and scheduled >= window), (name, computed, scheduled)

    def check_tables(self) -> None:
        """The worker's tables, from the first live block on, are the scheduler's."""
        for request in self.scheduler.running:
            row = self.worker.rows.get(request.request_id)
            if row is None or request.num_computed_tokens == 0:
                continue  # preempted and not yet scheduled again
            own = self.setup.own_groups
            for group, manager in enumerate(self.coordinator.single_type_managers):
                blocks = manager.req_to_blocks[request.request_id]
                if group not in own:
                    self.check_beside(blocks, row.groups[group])
                    continue
                for lane in range(self.setup.lanes):
                    layer = (group - own.start) * self.setup.lanes + lane
                    self.check_table(request, row, layer, blocks[lane :: self.setup.lanes])

    def check_table(
        self, request: Request, row: WorkerRow, layer: int, blocks: Sequence[Any]
    ) -> None:
        skip = 0 if row.skip is None else int(row.skip[layer])
        block_size = self.setup.block_sizes[layer]
        first = skip // block_size
        found = [block.block_id for block in blocks]
        record = self.coordinator.plans.records[request.request_id]
        plan = record.resolved or record.plan
        count = 0 if plan is None else plan.in_place // block_size
        if count:  # they are moved when the head is given back
            self.seen["in place"] += first > 0
            old = int(plan.skip_after(record.released)[layer]) // block_size
            found[first : first + count] = found[old : old + count]
        live = found[first:]
        assert row.tables[layer][first:] == live and 0 not in live
        assert len(blocks) == len(row.tables[layer])
        used = cdiv(request.num_computed_tokens, block_size)
        assert used <= len(blocks) <= used + cdiv(self.drafts_in_flight, block_size)

    def check_beside(self, blocks: list[Any], table: list[int]) -> None:
        """What a layer that does not evict still holds is where the worker thinks it is."""
        assert len(blocks) == len(table)
        gone = [block.is_null for block in blocks]
        assert gone == sorted(gone, reverse=True), "a hole"
        self.seen["slid"] += any(gone)
        assert all(b.is_null or b.block_id == i for b, i in zip(blocks, table, strict=True))
        in_flight = self.depth * self.setup.max_num_batched_tokens
        longest = max(layer.most_blocks(1 << 30, in_flight) for layer in self.setup.beside)
        assert gone.count(False) <= longest

    # What always holds ------------------------------------------------------------------------

    @invariant()
    def routers_know_what_is_found(self) -> None:
        if self.router is None:
            assert not self.coordinator.block_pool.kv_event_queue
            return
        self.router.catch_up(self.scheduler)
        self.router.check(self.coordinator, self.requests)
        running = {request.request_id for request in self.scheduler.running}
        assert set(self.coordinator.stores._seen) <= running
        for name, count in self.router.seen.items():
            self.seen[name] += count
        self.router.seen.clear()

    @invariant()
    def accounts_balance(self) -> None:
        check_pool(self.coordinator)
        running = {request.request_id for request in self.scheduler.running}
        records = self.coordinator.plans.records
        assert set(records) == set(self.scheduler.requests)
        assert {name for name, record in records.items() if record.num_blocks} == running
        for name, record in records.items():
            assert record.num_blocks or not (record.resolved or record.confirmed or record.released)
            assert bool(record.resolved) == bool(record.confirmed), "a number without a plan"
            assert record.terms.plan is self.plans[name] and record.terms.served
            assert (
                record.resolved is not None
                or not record.released
                or not self.plans[name].skip_after(record.released).any()
            ), "given back without the worker's word"
        stats = self.scheduler.pyramid.reports.policy_stats()
        assert min(stats["tokens_held"]) >= 0 and min(stats["blocks_held"]) >= 0
        assert len(stats["blocks_held"]) == len(self.coordinator.layers)
        assert sum(stats["blocks_held"]) == self.coordinator.counters.held_blocks.sum()

    @invariant()
    def every_layer_holds_its_share(self) -> None:
        block_sizes = np.array(self.setup.block_sizes)
        for request in self.scheduler.running:
            name = request.request_id
            plan = self.plans[name]
            processed = request.num_computed_tokens - request.num_in_flight_tokens
            expected = -(-request.num_computed_tokens // block_sizes)
            resolved = self.coordinator.plans.confirmed(name)
            if self.coordinator.plans.has_evicted(name):
                number = self.coordinator.plans.records[name].released
                is_open = isinstance(plan, DeferredPlan) or plan.waits_for_orders
                kept = resolved if is_open else plan
                assert isinstance(kept, RetentionPlan)
                expected -= kept.skip_after(number) // block_sizes
            self.check_held(name, request, expected)
            if resolved is not None:
                if isinstance(plan, DeferredPlan):
                    self.check_promise(plan, resolved)
                elif isinstance(plan, LevelPlan):
                    for before, point in pairwise(resolved.points):
                        assert (
                            before.skip <= point.skip
                        ).all() and before.skip.sum() < point.skip.sum()
                        assert before.computed <= point.computed
                    self.check_levels(plan, resolved)
                else:
                    assert resolved is plan
                assert plan.evicts and processed >= plan.exact_tokens
            if self.coordinator.plans.has_evicted(name):
                assert processed >= plan.exact_tokens
            if plan.inner:
                self.check_peak(name, request)
            if self.scheduler.pyramid.chunks.admission is not None:
                self.check_forecast(name, request, self.scheduler.pyramid.chunks.admission)

    def check_levels(self, plan: LevelPlan, resolved: RetentionPlan) -> None:
        """What it was ordered to are levels of a prompt of as many tokens, or less."""
        assert len({id(point) for point in resolved.points}) == len(resolved.points)
        for point in resolved.points:
            past = point.computed - plan.prompt_len
            self.seen["answers evicted"] += past > 0
            assert past % (plan.answers or 1 << 30) == 0
            levels = plan.levels_at(point.computed)
            assert any((level.skip <= point.skip).all() for level in levels)
            if past == 0:
                assert any(level is point for level in levels)

    @property
    def drafts_in_flight(self) -> int:
        """Tokens of a request that may have had blocks and been rejected since."""
        return self.depth * self.setup.drafts

    def check_held(self, name: str, request: Request, expected: np.ndarray) -> None:
        """Blocks for what is computed; more only for drafts, which may have been rejected since."""
        held = np.array(self.coordinator.blocks_held(name))
        spare = -(-self.drafts_in_flight // np.array(self.setup.block_sizes))
        assert (expected <= held).all() and (held <= expected + spare).all()

    def check_peak(self, name: str, request: Request) -> None:
        """A request that evicts inside its prompt never holds more than its plan says."""
        plan, late = self.plans[name], (self.depth - 1) * self.setup.max_num_batched_tokens
        tokens = max(request.num_computed_tokens, plan.prompt_len) + self.drafts_in_flight
        peak = peak_blocks(plan, tokens, np.array(self.setup.block_sizes), late, self.setup.stages)
        sums = self.coordinator.layer_blocks.stages.sums
        assert (sums(np.array(self.coordinator.blocks_held(name))) <= sums(peak)).all()

    def check_forecast(self, name: str, request: Request, admission: Admission) -> None:
        """Until its tokens are processed it holds no more than admission counts, by its phase."""
        table, released = admission.table, self.released(name)
        slot, plan = table._slots[name], self.plans[name]
        target = table._of_request[3, slot]
        if not (plan.inner or plan.every) or request.num_computed_tokens > target:
            return
        held = self.coordinator.layer_blocks.stages.sums(
            np.array(self.coordinator.blocks_held(name))
        )
        peak = table._of_stages[:, 3 if released else 2, slot]
        assert (held <= peak).all(), (held, peak)
        self.seen["behind an eviction"] += released > 0 and request.num_computed_tokens < target

    def released(self, name: str) -> int:
        """The latest eviction whose head a request has given back."""
        return self.coordinator.plans.records[name].released

    def check_promise(self, plan: DeferredPlan, resolved: RetentionPlan) -> None:
        """The solved lengths conserve the budget, and the blocks are those of the lengths."""
        keep, skip = resolved.end.keep, resolved.end.skip
        initial = plan.budget_tokens * plan.num_layers
        assert keep.sum() == initial if plan.exact else keep.sum() <= initial
        assert keep.min() >= plan.least and keep.max() <= plan.most
        if self.setup.lanes > 1:
            of_layers = keep.reshape(-1, self.setup.lanes).sum(axis=1)
            assert (of_layers == plan.budget_tokens * self.setup.lanes).all()
        sizes = self.coordinator.layer_blocks.block_sizes
        assert (skip // sizes).sum() >= least_given_back(plan, sizes)
        unit = plan.block_size if plan.fill_blocks else 1
        assert (skip == (plan.prompt_len - keep) // unit * unit).all()

    def teardown(self) -> None:
        for _ in range(100 * (len(self.scheduler.requests) + 1)):
            if not self.scheduler.requests:
                break
            self.step()
        assert not self.scheduler.requests, f"no progress: {self.scheduler.requests}"
        while self.in_flight:
            self.process()
        check_pool(self.coordinator)
        self.worker.execute(self.scheduler.schedule())  # tells the worker who finished
        coordinator, scheduler = self.coordinator, self.scheduler
        assert coordinator.block_pool.get_num_free_blocks() == self.worker.num_blocks
        assert not coordinator.plans.records and not coordinator.prefixes._published_from
        assert not coordinator.block_pool.duplicates
        assert scheduler.reset_prefix_cache()
        assert not coordinator.block_pool.bundles and not coordinator.block_pool.idle
        host = host_of(coordinator)
        assert host is None or not (host._entries or host.used_slots)
        assert not any(manager.req_to_blocks for manager in coordinator.single_type_managers)
        assert not any(manager.num_cached_block for manager in coordinator.single_type_managers)
        assert (
            not coordinator.counters.held_blocks.any()
            and not coordinator.counters.skipped_tokens.any()
        )
        assert not coordinator.stock_groups.held_blocks and not any(
            g.tables for g in coordinator.stock_groups.groups
        )
        assert not scheduler.running and not scheduler.waiting
        assert not any(s._of_request or s._averaged for s in self.sampled)
        pressure = scheduler.pyramid.pressure
        assert pressure is None or not (pressure._requests or pressure.is_pending)
        assert scheduler.pyramid.chunks.admission is None or not len(
            scheduler.pyramid.chunks.admission.table
        )
        assert not self.worker.rows and not self.worker.tracker._requests
        assert self.worker.tracker._num_open == 0
        if self.folder is not None:
            assert host is not None and host.files is not None
            host.files.close()
            self.folder.cleanup()


def machine_of(setup: Setup) -> type[SchedulerMachine]:
    class Machine(SchedulerMachine):
        depth = 2 if setup.asynchronous or setup.stages else 1
        seen: ClassVar[Counter[str]] = Counter()

    Machine.setup = setup
    return Machine


@pytest.mark.parametrize(
    "variant", covering({name: features(setup) for name, setup in VARIANTS.items()})
)
def test_machine(variant: str, seed: int) -> None:
    """Variants with every pair of settings, each with a few lives that are new in every run."""
    machine = machine_of(VARIANTS[variant])
    run_state_machine_as_test(seeded(f"{seed}/{variant}")(machine), settings=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_machine_sees_what_it_is_for(variant: str, seed: int) -> None:
    setup = VARIANTS[variant]
    machine = machine_of(setup)
    happenings = ["evicted", "mixed steps"]
    if setup.prefix_caching:
        rare = "inside" in variant or (setup.lanes > 1 and "all" in variant)
        happenings += ["hits"] if rare else ["hits", "duplicates"]
        happenings += [] if rare else ["BlockStored", "BlockRemoved"]
        copies = "swapped" not in variant and (setup.lanes == 1 or "all" in variant)
        copies = copies and "kept" not in variant
        happenings += ["copied"] if copies and "whole" not in variant else []
        happenings += ["left behind"] if copies else []
        happenings += ["to the end"] if setup.lanes > 1 and "all" not in variant else []
    # Who was made to wait is seldom preempted: the other variants are for that.
    forecast = "forecast" in variant
    happenings += ["made to wait"] if forecast else ["evicted again"]
    happenings += ["counted once"] if forecast and "shared" in variant else []
    happenings += ["behind an eviction"] if forecast and "inside" in variant else []
    # Conversations are short beside their pool: these are preempted by a pause of the engine.
    happenings += [] if forecast or setup.turns else ["preempted"]
    if "solved" in variant:
        happenings.append("solved")
    if "inside" in variant:
        happenings += ["refused", "evicted inside"] + ([] if forecast else ["evicted inside again"])
    if setup.turns:
        happenings += ["resumed", "rows of states", "evicted inside"]
    if setup.host_slots:
        happenings += ["host loaded", "host hits", "host evictions"]
        happenings += ["host states", "resumed from the host"] if setup.turns else []
    happenings += ["killed", "filled"] if setup.host_folder else []
    if setup.beside:
        slides = any(layer.kind != "draft" for layer in setup.beside)
        happenings += ["slid"] if slides else []
        found = ["rows beside", "windows found", "windows in use found"]
        happenings += found if setup.prefix_caching else []
        happenings += ["windows resumed", "rows beside evicted"] if setup.turns else []
    if setup.drafts:
        happenings += ["accepted", "rejected"]
    if "later" in variant:
        happenings += ["evicted later"] if forecast else ["evicted later", "evicted later again"]
    if "pressure" in variant:
        happenings = ["ordered", "ordered again", "kept whole", "mixed steps"]
        happenings += ["answers evicted"] if "answers" in variant else []
        happenings += ["hits"] if setup.prefix_caching else []
        happenings += ["host loaded"] if setup.host_slots else []
        happenings += [] if setup.beside else ["without levels"]
    if "sampled" in variant:
        happenings.append("averaged")
    index = list(VARIANTS).index(variant)
    for number in range(ROUNDS):
        drawn = index + 1000 * (number - 1) if number else f"{seed}/{variant}"
        numbered = seeded(drawn)(machine)
        run_state_machine_as_test(numbered, settings=LIMITS)
        if all(machine.seen[happening] >= 5 for happening in happenings):
            return
    raise AssertionError({happening: machine.seen[happening] for happening in happenings})
