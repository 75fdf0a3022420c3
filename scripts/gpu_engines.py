# SPDX-License-Identifier: Apache-2.0
"""The engine stages of scripts/gpu_check.py; each call runs one, in this process.

    python scripts/gpu_engines.py engine --backend FLASH_ATTN --mode eager --runner v2 --out FILE
    python scripts/gpu_engines.py start --tensor-parallel 2 --out FILE

Writes a JSON object; what must hold and does not raises RuntimeError.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# The folder of this file is where Python looks first.
from gpu_agreement import LOGPROBS, TOLERANCE, Answer, agreement

# Where vLLM's two model runners are defined.
RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}


LLAMA = ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64})
LENGTHS = [600, 599, 512, 333, 256, 200]
POLICIES = ("none", "full", "pyramidkv", "xkv", "h2o", "pyramidinfer", "select", "duoattention")
# An engine whose cache has a given size does not start where less of the device is free.
BESIDE_OTHERS = {"gpu_memory_utilization": 0.05}
TOP_N = 16  # keys whose V is fetched from the host
# Of each token behind a prompt: 8 pages of 13 to 38.
SELECTS = {"budget": 128, "min_tokens": 0, "sinks": 16, "recent": 16, "dense_layers": 1}
# One of two KV heads in each of four layers keeps 64 tokens of a prompt, the other everything.
STREAMS = {"mask": [[1.0, 0.0]] * 4, "heads.sinks": 16, "heads.recent": 48}
# Half of the layers thin, in pieces that find room in a step beside all that decode.
THINS = {"piece_tokens": 256, "min_context": 16, "decay_ratio": 0.5}


def require(condition: bool, message: str) -> None:
    """Raise RuntimeError unless the condition holds."""
    if not condition:
        raise RuntimeError(message)


# Engines ------------------------------------------------------------------------------------------


def run_engine(backend: str | None, mode: str, runner: str, **cache: Any) -> dict[str, Any]:
    """`none`, `full` and policies of several kinds on a small random Llama, one after the other.

    Args:
        backend: of attention; None leaves the choice to vLLM. cache: more settings of all engines.
    """
    from tests.engine import models
    from tests.engine.support import Engine, EnginePool, Job, greedy, random_prompts

    models.SHAPES["llama-gpu"] = LLAMA
    budget, lengths = 64, LENGTHS
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "enforce_eager": mode == "eager",
        **BESIDE_OTHERS,
        **cache,
    }
    if backend is not None:
        settings["attention_backend"] = backend
    policies: dict[str, dict[str, Any]] = {
        "none": {"kv_policy": "none"},
        "full": {"kv_policy": "full"},
        "pyramidkv": {"kv_policy": "pyramidkv", "kv_budget": budget},
        "xkv": {"kv_policy": "xkv", "kv_budget": budget},
        "h2o": {"kv_policy": "h2o", "kv_budget": budget, "kv_policy_args": {"interval": 16}},
        "duoattention": {
            "kv_policy": "duoattention",
            "kv_min_tokens": None,
            "kv_policy_args": STREAMS,
        },
    }
    outcomes: dict[str, list[Any]] = {}
    blocks_in_decode: dict[str, int] = {}
    result: dict[str, Any] = {}
    pool = EnginePool()
    with tempfile.TemporaryDirectory() as folder:
        model = models.write_model("llama-gpu", Path(folder))
        for name, policy in policies.items():
            engine = pool.get(model, **settings, **policy)

            def record(engine: Engine, name: str = name) -> None:
                running = engine.scheduler.running
                if len(running) == len(lengths) and all(
                    request.num_computed_tokens > request.num_prompt_tokens for request in running
                ):
                    blocks_in_decode[name] = (
                        engine.usable_blocks - engine.pool.get_num_free_blocks()
                    )

            jobs = [
                Job(prompt, greedy(48, logprobs=LOGPROBS)) for prompt in random_prompts(lengths)
            ]
            outcomes[name] = engine.run(jobs, record)
            config = engine.client.vllm_config
            kinds = type(engine.core.model_executor.driver_worker.worker.model_runner).__mro__
            right = any(kind.__module__ == RUNNERS[runner] for kind in kinds)
            require(right, f"{name}: the runner is {kinds[0]}, not one of {RUNNERS[runner]}")
            layers = config.compilation_config.static_forward_context.values()
            result[name] = {
                "attention": sorted(
                    {type(getattr(layer, "impl", layer)).__name__ for layer in layers}
                ),
                "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            }
            if mode == "graphs":
                captured = not result[name]["cudagraph_mode"].endswith("NONE")
                require(captured, f"{name}: CUDA graphs are off")
            if name != "none":
                engine.check_whole()
        pool.close()
    pairs = list(zip(outcomes["none"], outcomes["full"], strict=True))
    result["full_equals_none"] = [a.token_ids == b.token_ids for a, b in pairs]
    result["logprobs_bitwise_equal"] = [a.logprobs == b.logprobs for a, b in pairs]
    answers: dict[str, list[Answer]] = {
        name: [(outcome.token_ids, outcome.logprobs) for outcome in found]
        for name, found in outcomes.items()
    }
    tolerance = TOLERANCE["bfloat16"]
    result["full_and_none"] = agreement(answers["none"], answers["full"], tolerance).as_data()
    reports = [outcome.report for outcome in outcomes["pyramidkv"]]
    result["evicted_tokens"] = [report["evicted_tokens"] for report in reports]
    result["kept_tokens_per_layer"] = [report["kept_tokens"] for report in reports]
    result["blocks_in_decode"] = blocks_in_decode
    require(min(result["evicted_tokens"]) > 0, f"a prompt was not evicted: {result}")
    require(
        blocks_in_decode["pyramidkv"] < blocks_in_decode["full"] / 2,
        f"eviction freed too few blocks: {blocks_in_decode}",
    )
    # Each prompt is attended to in full before its first token.
    for name in ("pyramidkv", "xkv", "h2o", "duoattention"):
        agreement(answers["full"], answers[name], tolerance, first=1)
    for outcome in outcomes["xkv"]:
        require("solved_tokens" in outcome.report, f"no lengths were solved: {outcome.report}")
    for outcome in outcomes["h2o"]:
        # 47 tokens are computed after the prompt: evictions at 16 and 32 of them.
        at, length = outcome.report["computed_tokens"], len(outcome.job.prompt)
        require(at == length + 32, f"h2o evicted at {at} tokens, not at {length} + 32")
        most = budget + engine.block_size - 1
        require(max(outcome.report["kept_tokens"]) <= most, f"h2o keeps {outcome.report}")
    require(
        blocks_in_decode["h2o"] < blocks_in_decode["full"] / 2,
        f"evictions during generation freed too few blocks: {blocks_in_decode}",
    )
    for outcome in outcomes["duoattention"]:
        kept, length = outcome.report["kept_tokens"], len(outcome.job.prompt)
        whole = sum(tokens == length for tokens in kept)
        require(whole == len(kept) // 2, f"of {length} tokens, heads keep {kept}")
    require(
        blocks_in_decode["duoattention"] < blocks_in_decode["full"] * 0.8,
        f"heads that stream freed too few blocks: {blocks_in_decode}",
    )
    return result


# Plain starts -------------------------------------------------------------------------------------


def run_start(
    policies: list[str], tensor_parallel: int, swap_space: float | None = None, **settings: Any
) -> dict[str, Any]:
    """Serve policies in turn, in engines that start as a user's do.

    The cache is as large as vLLM makes it, graphs are on, and a kernel that is compiled behind the
    warm-up is an error where the engine core has a process of its own.
    """
    from vllm import SamplingParams

    from tests.engine import models
    from tests.engine.support import random_prompts
    from vllm_pyramid import LLM

    models.SHAPES["llama-gpu"] = LLAMA
    # vLLM's monitor stays on: the next engine of the same process would not come through its own
    # warm-up.
    in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    made: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "gpu_memory_utilization": 0.5,
        "jit_monitor_mode": "warn" if in_process else "error",
        "skip_tokenizer_init": True,
        "seed": 0,
        "tensor_parallel_size": tensor_parallel,
        **settings,
    }
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in random_prompts(LENGTHS)]
    params = SamplingParams(
        temperature=0, max_tokens=48, ignore_eos=True, detokenize=False, logprobs=LOGPROBS
    )
    result: dict[str, Any] = {"policies": policies, "blocks": {}, "evicted_tokens": {}}
    result["v_bytes_read_per_token"] = {}
    answers: dict[str, list[Answer]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = models.write_model("llama-gpu", Path(folder))
        for policy in policies:
            name, _, where = policy.partition("+")
            keeps_all = name in ("none", "full", "kcache", "select")
            evicts, on_host = not keeps_all, where or name == "kcache"
            own: dict[str, Any] = {"kv_budget": 64, "kv_min_tokens": 0} if evicts else {}
            if policy == "pyramidinfer":
                own = {"kv_min_tokens": 0, "kv_policy_args": THINS}
            if policy == "h2o":
                own["kv_policy_args"] = {"interval": 16}
            if policy == "duoattention":
                own = {"kv_policy_args": STREAMS}
            if policy == "select":
                own = {"kv_policy_args": {"attend": SELECTS}}
            if on_host:  # fewer keys than the prompts have, and than are left of them
                values = {"values": {"kind": "host", "top_n": TOP_N}}
                own |= {"kv_policy_args": values, "kv_swap_space": swap_space}
            llm = LLM(str(model), kv_policy=name, **made, **own)
            try:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
            finally:
                llm.llm_engine.engine_core.shutdown()
            answers[policy] = [answer_of(output) for output in outputs]
            result["blocks"][policy] = blocks
            if on_host:
                read = [output.kv_transfer_params["v_bytes_read_per_token"] for output in outputs]
                result["v_bytes_read_per_token"][policy] = read[0]
                row = LLAMA[1]["head_dim"] * 2  # bytes
                heads = LLAMA[1]["num_attention_heads"]
                layers = llm.llm_engine.model_config.hf_config.num_hidden_layers - 1
                wanted = TOP_N * heads * row * layers
                require(set(read) == {wanted}, f"{policy}: V of {wanted} bytes a token, not {read}")
            if policy == "select":
                reports = [output.kv_transfer_params for output in outputs]
                shares = [one["pages_read"] / one["pages_visible"] for one in reports]
                result["share_of_pages_read"] = shares
                require(max(shares) < 1, f"a request has read all pages: {shares}")
            if evicts:
                evicted = [output.kv_transfer_params["evicted_tokens"] for output in outputs]
                result["evicted_tokens"][policy] = evicted
                require(min(evicted) > 0, f"{policy}: a prompt was not evicted: {evicted}")
    # Every prompt is attended to in full before its first token, unless it was thinned.
    one, *others = (policy for policy in policies if policy != "pyramidinfer")
    tolerance = TOLERANCE["bfloat16"]
    result["agreement"] = {
        f"{one} and {other}": agreement(
            answers[one],
            answers[other],
            tolerance,
            first=None if {one, other} == {"none", "full"} else 1,
        ).as_data()
        for other in others
    }
    return result


def answer_of(output: Any) -> Answer:
    """Tokens and log probabilities of vLLM's output."""
    (completion,) = output.outputs
    likely = [
        {token: entry.logprob for token, entry in place.items()} for place in completion.logprobs
    ]
    return list(completion.token_ids), likely


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    engine = stages.add_parser("engine")
    engine.add_argument("--backend", required=True, choices=("FLASH_ATTN", "TRITON_ATTN"))
    engine.add_argument("--mode", required=True, choices=("eager", "graphs"))
    engine.add_argument("--runner", required=True, choices=tuple(RUNNERS))
    engine.add_argument("--kv-cache-dtype", default="auto")
    engine.add_argument("--out", type=Path, required=True)
    start = stages.add_parser("start")
    start.add_argument("--policies", default=",".join(POLICIES))
    start.add_argument("--tensor-parallel", type=int, default=1)
    start.add_argument(
        "--cache-gib", type=float, help="a cache of this size, which vLLM does not find"
    )
    start.add_argument("--swap-space", type=float, help="GiB of host memory, for kcache and +host")
    start.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.stage == "start":
        policies = options.policies.split(",")
        settings: dict[str, Any] = {}
        if options.cache_gib is not None:
            settings = {"kv_cache_memory_bytes": int(options.cache_gib * 2**30), **BESIDE_OTHERS}
        result = run_start(policies, options.tensor_parallel, options.swap_space, **settings)
    else:
        cache = {"kv_cache_dtype": options.kv_cache_dtype}
        result = run_engine(options.backend, options.mode, options.runner, **cache)
    options.out.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
