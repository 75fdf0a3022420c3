# SPDX-License-Identifier: Apache-2.0
"""Faults of the core that happened, or that a guard is for: each a few replaced lines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """Text of a file that stands there once, and what replaces it."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A fault: what is wrong, and the lines that make it so."""

    what: str
    edits: tuple[Edit, ...]


_COORDINATOR = "vllm_pyramid/kv_cache/coordinator.py"
_PLANS = "vllm_pyramid/kv_cache/request_plans.py"
_CHUNKS = "vllm_pyramid/scheduler/chunks.py"
_PREFIXES = "vllm_pyramid/kv_cache/prefix_store.py"
_NAMES = "vllm_pyramid/kv_cache/evicted_names.py"
_SCORES = "vllm_pyramid/step/score_check.py"

FAULTS: dict[str, Fault] = {
    "head-too-early": Fault(
        "The head of a request's tables goes back before the worker has evicted.",
        (
            Edit(
                _COORDINATOR,
                "processed_computed_tokens < record.next_release_at",
                "processed_computed_tokens + 512 < record.next_release_at",
            ),
            Edit(_PLANS, "evictions_by(processed)\n", "evictions_by(processed + 512)\n"),
            Edit(
                _PLANS,
                "if number <= confirmed or (skip == resolved.skip_after(confirmed)).all():",
                "if skip is not None:",
            ),
        ),
    ),
    "skip-of-another-layer": Fault(
        "Attention reads each layer with the skip of the layer below.",
        (
            Edit(
                "vllm_pyramid/worker/eviction_tracker.py",
                "skips = self._row_skips[:num_reqs].T.copy()",
                "skips = np.roll(self._row_skips[:num_reqs].T, 1, axis=0).copy()",
            ),
        ),
    ),
    "another-salt": Fault(
        "Prefixes are named after their tokens alone, so any salt finds them.",
        (
            Edit(
                "vllm_pyramid/kv_cache/prefix_cache.py",
                "        return request.block_hashes[self._hashes_per_bundle - 1 :: "
                "self._hashes_per_bundle]\n",
                "        tokens = request.all_token_ids\n"
                "        count = len(request.block_hashes) // self._hashes_per_bundle\n"
                "        ends = range(self.tokens, self.tokens * count + 1, self.tokens)\n"
                "        return [BlockHash(repr(tokens[:end]).encode()) for end in ends]\n",
            ),
        ),
    ),
    "no-copies": Fault(
        "What an eviction overwrites is not copied before, and found all the same.",
        (
            Edit(
                _PREFIXES,
                "return self.evicted.reserve(with_own) or None",
                "self.evicted.reserve(with_own)\n        return None",
            ),
        ),
    ),
    "chunk-across-an-eviction": Fault(
        "A chunk of a prompt goes on behind the tokens at which it is to evict.",
        (
            Edit(
                _CHUNKS,
                "        tokens = min(tokens, stop - computed)\n",
                "        tokens = min(tokens, request.num_tokens - computed)\n",
            ),
        ),
    ),
    "one-block-short": Fault(
        "Tables lose the first block that holds survivors.",
        (
            Edit(
                _COORDINATOR,
                "release_heads(request_id, heads)",
                "release_heads(request_id, heads + (skip > 0))",
            ),
        ),
    ),
    "no-check-for-nan": Fault(
        "Scores and attention that are NaN are taken as they are.",
        (
            Edit(
                _SCORES,
                "wrong = batch.call.ops.unrankable(scores, firsts, ends)",
                "wrong = batch.call.ops.unrankable(scores, firsts, ends) & False",
            ),
            Edit(
                _SCORES,
                "wrong = (sums - sums) != 0",
                "wrong = torch.zeros_like(sums, dtype=torch.bool)",
            ),
        ),
    ),
    "sessions-without-lengths": Fault(
        "A session's name says neither its budget nor what its evictions skipped.",
        (
            Edit(
                _NAMES,
                'text = f"{policy.model_dump_json()} {budget.value} {budget.min_tokens} '
                '{served.keep}"',
                'text = f"{policy.model_dump_json()} {bool(budget)} {served.keep}"',
            ),
            Edit(
                _NAMES,
                ".encode() + plan.skip_after(number).tobytes())",
                ".encode())",
            ),
        ),
    ),
    "preempted-with-old-skip": Fault(
        "A preempted request comes back with the evictions of its first life.",
        (
            Edit(
                _PLANS,
                "            self.records[request_id] = SchedulerRequest.at_start(terms)\n\n"
                "    def forget",
                "            old = self.records[request_id]\n"
                "            self.records[request_id] = SchedulerRequest.at_start(terms)\n"
                "            self.records[request_id].resolved = old.resolved\n"
                "            self.records[request_id].confirmed = old.confirmed\n\n"
                "    def forget",
            ),
        ),
    ),
    "window-too-short": Fault(
        "One query fewer than the window scores a prompt.",
        (
            Edit(
                "vllm_pyramid/methods/observation_window.py",
                "batch.last_queries(batch.policy.window)",
                "batch.last_queries(batch.policy.window - 1)",
            ),
        ),
    ),
}
