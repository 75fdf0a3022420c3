#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Our side: makes the prompts, runs them through the engine, writes what every head kept.

    python scripts/kvpress_parity/ours.py --out FOLDER [--model PATH]

Every policy gets an engine of its own; the kept positions are those of `--kv-trace`. Each policy
runs with `fill_blocks: false`, so that exactly the budget is kept, and with the window and pooling
that the presses are given. A second run with the same cases does only what is missing in FOLDER.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cases import CASES, FULL, POLICIES, SCORED, Cases, Prompt, counts_key, key, ours_file

import vllm_pyramid

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The engine lives in the process that each policy has to itself anyway.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

Arrays = dict[str, np.ndarray]
# Generated tasks whose prompts are used beside plain text.
TASKS = ("needle", "multi-key")


def make_prompts(model: str, lengths: list[int], samples: int, seed: int) -> list[Prompt]:
    """Real English text: as it is, with one hidden fact, and with eight; each of every length."""
    from vllm_pyramid.tools.eval.haystack import load_tokens
    from vllm_pyramid.tools.eval.registry import load_task
    from vllm_pyramid.tools.eval.task import seed_of

    tokens = load_tokens(model)
    prompts = []
    for length in lengths:
        for index in range(samples):
            rng = random.Random(seed_of("kvpress-parity", length, seed, index))
            ids = tokens.encode(" ".join(tokens.passage(rng, length - 1)))
            prompts.append(Prompt(f"text-{length}-{index}", "text", ids))
        for name in TASKS:
            made = load_task(name).samples(tokens, length, samples, seed)
            prompts += [
                Prompt(f"{name}-{length}-{index}", name, tokens.encode(sample.prompt))
                for index, sample in enumerate(made)
            ]
    return prompts


def policy_args(policy: str, window: int, kernel_size: int, sinks: int, beta: float) -> Any:
    """`kv_policy_args` that give a policy the presses' parameters, and exactly its budget."""
    args: dict[str, Any] = {"fill_blocks": False}
    if policy == "streaming-llm":
        args["sinks"] = sinks
    if policy in SCORED:
        args |= {"window": window, "pooling": "avg", "kernel_size": kernel_size}
        args["gqa_reduce"] = "mean"
    if policy == "pyramidkv":
        args["beta"] = beta
    return args


def plan_layers(cases: Cases) -> dict[str, list[int]]:
    """`Cases.layer_counts`: what pyramidkv's allocator gives each layer."""
    from vllm_pyramid.frontend.model_shape import shape_of_model
    from vllm_pyramid.policy import Budget, load_policy

    layers = shape_of_model(cases.model, cases.dtype)[0].num_layers
    args = policy_args("pyramidkv", cases.window, cases.kernel_size, cases.sinks, cases.beta)
    policy = load_policy("pyramidkv", args=args)
    counts = {}
    for percent in cases.percents:
        for prompt in cases.prompts:
            budget = Budget.parse(cases.budget(prompt, percent))
            plan = policy.plan(len(prompt.token_ids), layers, 16, budget)
            counts[counts_key(percent, prompt)] = plan.held.tolist()
    return counts


def run_policy(cases: Cases, policy: str) -> Arrays:
    """One engine: all prompts with all budgets; the first policy's runs the control, too."""
    from vllm import SamplingParams

    from vllm_pyramid import LLM
    from vllm_pyramid.frontend.model_shape import shape_of_model

    def params(extra: dict[str, Any]) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=cases.max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra,
        )

    longest = max(len(prompt.token_ids) for prompt in cases.prompts) + cases.max_tokens
    shape, _ = shape_of_model(cases.model, cases.dtype)
    batch = 4
    blocks = (longest // 16 + 2) * shape.num_layers * batch
    work = [
        (policy, prompt, percent, params({"kv_budget": cases.budget(prompt, percent)}))
        for percent in cases.percents
        for prompt in cases.prompts
    ]
    if policy == POLICIES[0]:
        control = params({"kv_policy": FULL})
        work += [(FULL, prompt, 100.0, control) for prompt in cases.prompts]
    arrays: Arrays = {}
    with tempfile.TemporaryDirectory(prefix="vllm-pyramid-") as trace:
        llm = LLM(
            cases.model,
            kv_policy=policy,
            kv_policy_args=policy_args(
                policy, cases.window, cases.kernel_size, cases.sinks, cases.beta
            ),
            kv_trace=trace,
            dtype=cases.dtype,
            max_model_len=longest,
            max_num_seqs=batch,
            max_num_batched_tokens=longest,
            kv_cache_memory_bytes=blocks * shape.block_bytes(16),
            enforce_eager=True,
            skip_tokenizer_init=True,
            seed=0,
        )
        try:
            prompts = [{"prompt_token_ids": prompt.token_ids} for _, prompt, _, _ in work]
            outputs = llm.generate(prompts, [sampling for *_, sampling in work], use_tqdm=False)
        finally:
            # A process with a running child would wait for it instead of ending.
            llm.llm_engine.engine_core.shutdown()
        traces = read_traces(Path(trace))
    for (name, prompt, percent, _), output in zip(work, outputs, strict=True):
        kept = traces.pop(output.request_id)
        check(cases, name, prompt, percent, kept)
        for layer, positions in enumerate(kept):
            arrays[key(name, percent, prompt, f"kept_{layer}")] = positions
        tokens = np.array(output.outputs[0].token_ids, dtype=np.int32)
        arrays[key(name, percent, prompt, "tokens")] = tokens
    return arrays


def read_traces(folder: Path) -> dict[str, list[np.ndarray]]:
    """Kept positions of every request, one `[KV heads, kept]` array a layer."""
    found = {}
    for path in folder.glob("*.npz"):
        with np.load(path) as trace:
            # vLLM adds a dash and a random end to the name that it gave the request.
            name = str(trace["request_id"]).rsplit("-", 1)[0]
            found[name] = [trace[f"kept_{layer}"] for layer in range(len(trace["held"]))]
    return found


def check(
    cases: Cases, policy: str, prompt: Prompt, percent: float, kept: list[np.ndarray]
) -> None:
    """Raise RuntimeError unless the engine kept as much of every layer as was asked for."""
    asked = [len(prompt.token_ids)] * len(kept)
    if policy == "pyramidkv":
        asked = cases.layer_counts[counts_key(percent, prompt)]
    elif policy != FULL:
        asked = [cases.budget(prompt, percent)] * len(kept)
    counts = [positions.shape[1] for positions in kept]
    if counts != asked:
        raise RuntimeError(f"{policy} kept {counts} tokens of {prompt.name}, not {asked}")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--model", help="local model folder; default: the built-in model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[576, 1024, 1536, 2048])
    parser.add_argument("--samples", type=int, default=1, help="of each kind and length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--percents", type=float, nargs="+", default=[6, 12, 25])
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--kernel-size", type=int, default=5)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--beta", type=float, default=20.0)
    parser.add_argument("--max-tokens", type=int, default=16)
    return parser.parse_args()


def versions(model: Path) -> str:
    """Changes with the model's files and with our code: results of others are not taken over."""
    package = Path(vllm_pyramid.__file__).parent
    sources = (path for path in package.rglob("*") if path.suffix in (".py", ".so", ".yaml"))
    files = (model / "config.json", *model.glob("*.safetensors"), *sources)
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    """Write the cases, then the result of every policy."""
    args = parse_args()
    if args.model is None:
        from vllm_pyramid.tools.demo import model_path

        args.model = str(model_path())
    cases = Cases(
        model=str(Path(args.model).resolve()),
        versions=versions(Path(args.model)),
        dtype=args.dtype,
        window=args.window,
        kernel_size=args.kernel_size,
        sinks=args.sinks,
        beta=args.beta,
        percents=args.percents,
        max_tokens=args.max_tokens,
        prompts=make_prompts(args.model, args.lengths, args.samples, args.seed),
        layer_counts={},
    )
    cases = replace(cases, layer_counts=plan_layers(cases))
    if not (args.out / CASES).is_file() or Cases.read(args.out) != cases:
        for path in args.out.glob("*.npz"):
            path.unlink()  # of other cases
        cases.write(args.out)
    # An engine leaves state behind in its process: each policy gets a process of its own.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for policy in POLICIES:
            file = args.out / ours_file(policy)
            if not file.is_file():
                start = time.perf_counter()
                np.savez_compressed(file, **pool.submit(run_policy, cases, policy).result())
                print(f"ours: {policy}, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
