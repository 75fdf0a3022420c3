# SPDX-License-Identifier: Apache-2.0
"""Both sides as engines that make steps; run by either interpreter, as a process that answers.

The interpreter of OpenVINO has neither vLLM nor this repository: nothing is imported before a side
is made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any, Protocol

BLOCK = 32  # tokens, of OpenVINO's cache and of stock vLLM's on CPUs
OWN_BLOCK = 16  # tokens of a layer
START = 32  # tokens at the beginning that OpenVINO keeps in any case
WARM = 2  # prompts, and answers of WARM_TOKENS
WARM_TOKENS = 4


class Side(Protocol):
    """An engine that takes requests and makes steps."""

    def add(self, index: int, prompt: Sequence[int], answer: int) -> None:
        """Take a request; its tokens come back under `index`."""
        ...

    def step(self) -> dict[int, list[int]] | None:
        """Make a step and return the new tokens of requests; None if all have ended."""
        ...

    def about(self) -> dict[str, Any]:
        """Return what the engine says about its memory and the requests."""
        ...


def answer_all(side: Side, prompts: Sequence[Sequence[int]], answer: int) -> dict[str, Any]:
    """Answer all prompts, which come at once; return tokens, and the seconds when each came.

    RuntimeError: an answer has not `answer` tokens.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    began = time.monotonic()
    for index, prompt in enumerate(prompts):
        side.add(index, prompt, answer)
    while (new := side.step()) is not None:
        now = time.monotonic() - began
        for index, some in new.items():
            tokens[index] += some
            times[index] += [now] * len(some)
    if any(len(own) != answer for own in tokens):
        raise RuntimeError(f"answers of {answer} tokens have {list(map(len, tokens))}")
    return {"tokens": tokens, "times": times, **side.about()}


def eviction_sizes(budget: int, recent: int, *, crush: bool) -> tuple[int, int]:
    """Return OpenVINO's `max_cache_size` in tokens and KVCrush's budget in blocks.

    What KVCrush keeps comes in addition to `max_cache_size`: a quarter of what is evictable.
    """
    blocks = max((budget - START - recent) // BLOCK // 4, 1) if crush else 0
    return budget - blocks * BLOCK, blocks


def u8_blocks(blocks: int, head_size: int) -> int:
    """Return how many blocks of 8 bits take the bytes of `blocks` of 16.

    A scale and a zero, in 32 bits each, go with each channel of a block of K and each token of V.
    """
    keys, values = (BLOCK + 8) * head_size, BLOCK * (head_size + 8)
    return blocks * 4 * BLOCK * head_size // (keys + values)


class OpenVino:
    """OpenVINO's pipeline with continuous batching."""

    def __init__(self, job: dict[str, Any]) -> None:
        import openvino
        import openvino_genai as genai

        kind = job["variant"].split()[1:]
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = job["step_tokens"]
        scheduler.max_num_seqs = len(job["prompts"])
        scheduler.num_kv_blocks = job["cache_tokens"] // BLOCK
        scheduler.enable_prefix_caching = False
        if "u8" in kind:
            scheduler.num_kv_blocks = u8_blocks(scheduler.num_kv_blocks, job["head_size"])
        if "evict" in kind or "kvcrush" in kind:
            most, crush = eviction_sizes(job["budget"], job["recent"], crush="kvcrush" in kind)
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = genai.CacheEvictionConfig(
                start_size=START,
                recent_size=job["recent"],
                max_cache_size=most,
                aggregation_mode=genai.AggregationMode.NORM_SUM,
                snapkv_window_size=job["window"],
                kvcrush_config=genai.KVCrushConfig(
                    budget=crush, anchor_point_mode=genai.KVCrushAnchorPointMode.MEAN
                ),
            )
        self._pipe = genai.ContinuousBatchingPipeline(
            job["ir"],
            scheduler,
            "CPU",
            properties={
                "INFERENCE_NUM_THREADS": job["threads"],
                "INFERENCE_PRECISION_HINT": "bf16",
                "KV_CACHE_PRECISION": "u8" if "u8" in kind else "bf16",
            },
        )
        self._genai, self._tensor = genai, openvino.Tensor
        self._handles: dict[int, Any] = {}
        self._added = 0

    def add(self, index: int, prompt: Sequence[int], answer: int) -> None:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = answer, True, False
        ids = self._tensor(np.array([prompt], np.int64))
        self._handles[index] = self._pipe.add_request(self._added, ids, config)
        self._added += 1

    def step(self) -> dict[int, list[int]] | None:
        if not self._pipe.has_non_finished_requests():
            self._handles.clear()
            return None
        self._pipe.step()
        return {
            index: [token for one in handle.read().values() for token in one.generated_ids]
            for index, handle in self._handles.items()
            if handle.can_read()
        }

    def about(self) -> dict[str, Any]:
        found = self._pipe.get_metrics()
        return {
            "cache_mib": round(found.kv_cache_size_in_bytes / 2**20, 1),
            "most_of_cache": round(found.max_cache_usage / 100, 3),
        }


class Vllm:
    """vLLM's engine, with this package or without."""

    def __init__(self, job: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from transformers import AutoConfig
        from vllm import SamplingParams

        from lab.bursts.__main__ import preemptions
        from vllm_pyramid import LLM
        from vllm_pyramid.frontend.model_shape import shape_of_model

        layers = AutoConfig.from_pretrained(job["model"]).num_hidden_layers
        _, *policy = job["variant"].split()
        settings: dict[str, Any] = {"kv_policy": "none", "block_size": BLOCK}
        blocks = job["cache_tokens"] // BLOCK
        if policy:
            blocks = job["cache_tokens"] // OWN_BLOCK * layers
            settings = {"kv_policy": policy[0], "kv_min_tokens": 0}
            if policy[0] != "full":
                settings["kv_budget"] = str(job["budget"])
        self._engine = LLM(
            job["model"],
            dtype="bfloat16",
            max_model_len=max(map(len, job["prompts"])) + job["answer"],
            max_num_batched_tokens=job["step_tokens"],
            max_num_seqs=len(job["prompts"]),
            enforce_eager=True,
            gpu_memory_utilization=0.2,
            enable_prefix_caching=False,
            num_gpu_blocks_override=blocks + 1,
            **settings,
        ).llm_engine
        shape, _ = shape_of_model(job["model"], None)
        page = shape.page_bytes(OWN_BLOCK) * job["cache_tokens"] // OWN_BLOCK * layers
        self._cache_mib = round(page / 2**20, 1)
        self._preempted = preemptions(self._engine.engine_core.engine_core.scheduler)
        self._params = SamplingParams
        self._kept: list[float] = []
        self._seen: dict[int, int] = {}
        self._round = 0

    def add(self, index: int, prompt: Sequence[int], answer: int) -> None:
        if not self._seen:
            self._preempted.clear()
            self._kept.clear()
        self._seen[index] = 0
        params = self._params(temperature=0, max_tokens=answer, ignore_eos=True)
        name = f"{self._round}-{index}"
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> dict[int, list[int]] | None:
        if not self._engine.has_unfinished_requests():
            self._seen.clear()
            self._round += 1
            return None
        new = {}
        for output in self._engine.step():
            index = int(output.request_id.partition("-")[2])
            tokens = list(output.outputs[0].token_ids)
            new[index], self._seen[index] = tokens[self._seen[index] :], len(tokens)
            if output.finished and (report := output.kv_transfer_params):
                self._kept.append(mean(report["kept_tokens"]))
        return new

    def about(self) -> dict[str, Any]:
        kept = round(mean(self._kept), 1) if self._kept else None
        return {
            "cache_mib": self._cache_mib,
            "kept_tokens": kept,
            "preemptions": len(self._preempted),
        }


def serve(reply_fd: int) -> None:
    """Read a job from stdin, and answer its prompts once for each further line."""
    job = json.loads(sys.stdin.readline())
    side: Side = OpenVino(job) if job["variant"].startswith("openvino") else Vllm(job)
    with open(reply_fd, "w", encoding="utf-8") as reply:

        def say(found: dict[str, Any]) -> None:
            reply.write(json.dumps(found) + "\n")
            reply.flush()

        say(answer_all(side, job["prompts"][:WARM], WARM_TOKENS))
        for _ in sys.stdin:
            say(answer_all(side, job["prompts"], job["answer"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reply_fd", type=int, help="where to write replies, a line of JSON each")
    serve(parser.parse_args().reply_fd)
