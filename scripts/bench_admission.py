#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the admission rule does to a job: the real scheduler over a pool, and no model at all.

Every rule gets the same requests, all at once. Counts are exact and the same on any machine: steps
until all have ended, preemptions, prompt tokens processed (each prompt once, and again
after a preemption), requests that decode in a step. The scheduler's time is the machine's.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # no model computes anything

BLOCK_SIZE = 16
END, ORDINARY = 7, 8


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="pyramidkv")
    parser.add_argument("--budget", default="12%")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="asked for, and answers end by themselves after half to one and a half --output-len; "
        "default: exactly --output-len, known beforehand",
    )
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--pool-prompts", type=float, default=4)
    parser.add_argument("--step-tokens", type=int, default=2112)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_scheduler(args: argparse.Namespace, admission: str) -> Any:
    """Our scheduler with a pool for `--pool-prompts` whole requests."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_pyramid.kv_cache.spec import LayerKVCacheSpec
    from vllm_pyramid.scheduler.scheduler import PyramidScheduler
    from vllm_pyramid.tools.demo import model_path

    longest = args.prompt_len + max(args.output_len, args.max_tokens or 0)
    config = EngineArgs(
        model=str(model_path()),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=longest,
        max_num_batched_tokens=args.step_tokens,
        max_num_seqs=args.num_prompts,
        async_scheduling=False,
        additional_config={
            "kv_policy": args.policy,
            "kv_budget": args.budget,
            "kv_min_tokens": 0,
            "kv_admission": admission,
        },
    ).create_engine_config()
    whole = -(-(args.prompt_len + args.output_len) // BLOCK_SIZE)
    blocks = int(args.pool_prompts * whole) * args.layers
    config.cache_config.num_gpu_blocks = blocks + 1
    groups = [
        KVCacheGroupSpec(
            [f"layer.{layer}"],
            LayerKVCacheSpec(
                block_size=BLOCK_SIZE,
                num_kv_heads=8,
                head_size=128,
                dtype=torch.bfloat16,
                layer_idx=layer,
                num_layers=args.layers,
                model_layer=layer,
            ),
        )
        for layer in range(args.layers)
    ]
    return PyramidScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks + 1, [], groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def send(args: argparse.Namespace, scheduler: Any) -> dict[str, int]:
    """All requests; the length of each one's answer."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    draw = random.Random(args.seed)
    lengths = {}
    for index in range(args.num_prompts):
        name = f"request-{index}"
        if args.max_tokens is None:
            lengths[name] = args.output_len
            params = SamplingParams(max_tokens=args.output_len, ignore_eos=True)
        else:
            lengths[name] = draw.randint(args.output_len // 2, 3 * args.output_len // 2)
            params = SamplingParams(max_tokens=args.max_tokens, stop_token_ids=[END])
        scheduler.add_request(Request(name, [1] * args.prompt_len, params, None))
    return lengths


def run(args: argparse.Namespace, admission: str) -> dict[str, Any]:
    """The whole job under one rule."""
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_pyramid.compat.side_channel import StepReport, attach_report
    from vllm_pyramid.plan import Eviction

    scheduler = make_scheduler(args, admission)
    lengths = send(args, scheduler)
    preempt, preempted = scheduler._preempt_request, 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counting
    coordinator = scheduler.coordinator
    steps = prompt_tokens = 0
    batches: list[int] = []
    seconds: list[float] = []
    while scheduler.requests:
        start = time.perf_counter()
        output = scheduler.schedule()
        if scheduler.waiting:
            seconds.append(time.perf_counter() - start)
        steps += 1
        names = list(output.num_scheduled_tokens)
        decoding = 0
        evictions, sampled = {}, []
        for name in names:
            request, tokens = scheduler.requests[name], output.num_scheduled_tokens[name]
            if request.num_computed_tokens - tokens < request.num_prompt_tokens:
                prompt_tokens += tokens
            else:
                decoding += 1
            plan = coordinator.plans.of(name)
            if plan.evicts and request.num_computed_tokens >= plan.prompt_len:
                number = plan.evictions_by(request.num_computed_tokens)
                known = coordinator.plans.confirmed_number(name)
                gone = int((plan.skip_after(number) - plan.skip_after(known)).sum())
                if number > known and gone:
                    evictions[name] = Eviction(gone, number=number)
            is_last = request.num_output_tokens + 1 >= lengths[name]
            sampled.append([] if request.is_prefill_chunk else [END if is_last else ORDINARY])
        batches.append(decoding)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        scheduler.update_from_output(output, attach_report(result, StepReport(evictions, {})))
    return {
        "rule": admission,
        "steps": steps,
        "preempted": preempted,
        "prompt tokens": prompt_tokens,
        "decode at once, mean": round(statistics.mean(batches), 1),
        "most": max(batches),
        "schedule() while some wait, ms": round(1000 * statistics.median(seconds), 3)
        if seconds
        else None,
    }


def main() -> None:
    """Both rules, one after the other."""
    args = parse_args()
    from vllm_pyramid.plugin import register

    register()
    for admission in ("prompt", "forecast"):
        print(run(args, admission), flush=True)


if __name__ == "__main__":
    main()
