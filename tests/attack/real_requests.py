# SPDX-License-Identifier: Apache-2.0
"""Real requests through an engine whose pool is too small, aborted in every phase."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.support import Engine, count_preemptions
from tests.engine.test_speculation import SPECULATION
from tests.scheduler.checks import check_pool
from vllm_pyramid.policy.capabilities import Feature
from vllm_pyramid.policy.served_settings import ServedSettings

LAYERS, BLOCK, MAX_LEN = 4, 16, 384
BLOCKS = 2 * LAYERS * MAX_LEN // BLOCK + 1  # two of the longest requests
STEPS_OF_CHECKS = 7
SETTINGS: dict[str, dict[str, Any]] = {
    "conversations with drafts": {
        "kv_policy": "pyramidkv",
        "kv_budget": "30%",
        "enable_prefix_caching": True,
        "speculative_config": SPECULATION,
    },
    "solved lengths": {"kv_policy": "xkv", "kv_budget": "40%", "enable_prefix_caching": True},
    "evictions while generating": {
        "kv_policy": "h2o",
        "kv_budget": 40,
        "kv_policy_args": {"interval": 32},
        "enable_prefix_caching": False,
    },
    "evictions inside prompts": {
        "kv_policy": "snapkv-chunked",
        "kv_budget": 48,
        "kv_policy_args": {"chunk.tokens": 64, "chunk.keep": 48, "window": 16},
        "enable_prefix_caching": True,
    },
}
COMMON: dict[str, Any] = {
    "kv_admission": "prompt",  # start whatever fits, so that many are preempted
    "dtype": "float32",
    "max_model_len": MAX_LEN,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 24,
    "num_gpu_blocks_override": BLOCKS,
}
# Where a request is aborted, if at all.
PHASES = ("waiting", "inside the prompt", "after the prompt", "generating", "preempted")


@dataclass
class Talk:
    """A conversation as its client knows it: tokens so far, and where its prompts ended."""

    tokens: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)


@dataclass
class Running:
    """A request that has not ended, and the phase in which its client leaves."""

    prompt: list[int]
    leaves: str | None
    talk: Talk | None
    output: Any = None


class Clients:
    """Many clients of one engine, drawn from a seed."""

    def __init__(self, engine: Engine, seed: str) -> None:
        self.engine, self.source = engine, random.Random(seed)
        self.running: dict[str, Running] = {}
        self.talks: list[Talk] = []
        self.seen: Counter[str] = Counter()
        self.sent = self.steps = 0
        served = ServedSettings.of(engine.core.vllm_config)
        assert served is not None
        reasons = served.why_no_turns, served.policy.why_not(Feature.KV_TURNS)
        self.has_turns = reasons == (None, None)
        self.has_spans = served.policy.why_not(Feature.KV_KEEP) is None

    def run(self, requests: int, seconds: float) -> None:
        """Send `requests` requests, or fewer where the time is over; then wait for the last."""
        end = time.monotonic() + seconds
        with count_preemptions(self.engine) as preemptions:
            while self.running or (self.sent < requests and time.monotonic() < end):
                if self.sent < requests and time.monotonic() < end:
                    for _ in range(self.source.choice([0, 1, 1, 4])):
                        self.send()
                self.step()
        self.seen["preempted"] += preemptions["all"]
        self.seen["preempted after evicting"] += preemptions["evicted"]

    def send(self) -> None:
        """One request: a prompt of its own, one that others share, or a conversation's turn."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        source, name = self.source, f"soak{self.sent}"
        self.sent += 1
        talk = None
        budgets = source.randrange(24, 120), f"{source.randrange(15, 100)}%"
        settings = [*[{}] * 3, *({"kv_budget": one} for one in budgets), {"kv_policy": "full"}]
        own: dict[str, Any] = source.choice(settings)
        length = source.choice([1, 16, 33, source.randrange(1, 200), source.randrange(40, 300)])
        prompt = self.prompt(length)
        most = source.choice([1, 20, source.randrange(40, 200)])
        if self.has_turns and source.random() < 0.5:
            talk = (
                source.choice(self.talks[-8:]) if self.talks and source.random() < 0.8 else Talk()
            )
            if talk in self.talks:
                self.talks.remove(talk)
            prompt = [*talk.tokens, *self.prompt(source.randrange(1, 90))]
            if len(prompt) > MAX_LEN - 60:
                talk, prompt = Talk(), prompt[-80:]
            own = {"kv_turns": talk.turns, "kv_turn_mode": "resume"}
            most = source.choice([4, 16, 32])
            self.seen["turns"] += bool(talk.turns)
        if self.has_spans and source.random() < 0.3:
            inner = [source.randrange(1, 200), source.randrange(200, 210)]
            own = {**own, "kv_keep": source.choice([[0, source.randrange(1, 9)], [0, 4, *inner]])}
            if not talk or source.random() < 0.2:
                start = source.randrange(max(len(prompt) - 6, 1))
                own["kv_keep"] = [start, min(start + source.randrange(1, 6), len(prompt))]
        params = SamplingParams(
            temperature=source.choice([0.0, 0.0, 1.0]),
            max_tokens=max(min(most, MAX_LEN - len(prompt)), 1),
            ignore_eos=source.random() < 0.8,
            detokenize=False,
            seed=source.choice([None, 7]),
            logprobs=source.choice([None, None, 2]),
            extra_args=own or None,
        )
        try:
            self.engine.client.add_request(name, {"prompt_token_ids": prompt}, params)
        except VLLMValidationError:  # spans behind the prompt, or not beside turns
            if "kv_keep" not in own:
                raise
            self.seen["spans refused"] += 1
            if talk is not None and talk.tokens:
                self.talks.append(talk)
            return
        self.seen["spans"] += "kv_keep" in own
        leaves = source.choice(PHASES) if source.random() < 0.4 else None
        self.running[name] = Running(prompt, leaves, talk)

    def prompt(self, length: int) -> list[int]:
        """Random tokens, those that others send too, or a few that repeat (drafts are right)."""
        source = self.source
        fresh = [source.randrange(8, 512) for _ in range(length)]
        shared = [8 + index % 300 for index in range(length)]
        half = shared[: length // 2] + fresh[length // 2 :]
        return source.choice([fresh, shared, half, (fresh[:5] * length)[:length]])

    def step(self) -> None:
        """One step of the engine, behind which some clients leave."""
        for output in self.engine.client.step():
            request = self.running[output.request_id]
            request.output = output
            if output.finished:
                self.end(output.request_id)
        self.steps += 1
        for name in [name for name, request in self.running.items() if self.leaves(name, request)]:
            self.seen[f"aborted {self.running.pop(name).leaves}"] += 1
            self.engine.client.abort_request([name])
        if self.steps % STEPS_OF_CHECKS == 0:
            check_pool(self.engine.coordinator)

    def end(self, name: str) -> None:
        """An answer is whole; a conversation goes on with it."""
        request = self.running.pop(name)
        answer = request.output.outputs[0]
        self.seen[f"ended by {answer.finish_reason}"] += 1
        report = request.output.kv_transfer_params or {}
        self.seen["evicted"] += report.get("evicted_tokens", 0) > 0
        self.seen["hits"] += bool(request.output.num_cached_tokens)
        self.seen["resumed"] += report.get("resumed_tokens", 0) > 0
        if (talk := request.talk) is not None and answer.finish_reason != "error":
            talk.tokens = [*request.prompt, *answer.token_ids]
            talk.turns = [*talk.turns, len(request.prompt)]
            self.talks.append(talk)

    def leaves(self, name: str, request: Running) -> bool:
        """Whether a request has come to the phase in which its client leaves."""
        if request.leaves is None:
            return False
        found = [
            r
            for key, r in self.engine.scheduler.requests.items()
            if key.startswith(name + "-") or key == name
        ]
        if not found:
            return False
        (known,) = found
        computed, prompt = known.num_computed_tokens, known.num_prompt_tokens
        return {
            "waiting": not computed,
            "inside the prompt": 0 < computed < prompt,
            "after the prompt": computed >= prompt,
            "generating": computed > prompt + self.source.randrange(1, 30),
            "preempted": known.num_preemptions > 0,
        }[request.leaves]

    def check_nothing_left(self) -> None:
        """No request, block, plan or table of any part of the engine is left."""
        self.engine.check_nothing_left()
        pool = self.engine.coordinator.block_pool
        assert self.engine.scheduler.reset_prefix_cache()
        assert not pool.bundles and not pool.idle


def settings_of(name: str) -> dict[str, Any]:
    return {**COMMON, **SETTINGS[name]}


def model_of(folder: Path) -> Path:
    """A model whose first layer says most, so that drafts are right now and then."""
    from tests.engine.drafts import write_target

    return write_target(folder)
