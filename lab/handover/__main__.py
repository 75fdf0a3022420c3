# SPDX-License-Identifier: Apache-2.0
"""Measure hand-overs between engines of one machine: `python -m lab.handover`.

    counts   each prompt alone, in one engine that hands over to itself: bytes that travel, blocks
    one      a server with the policy, and all of the cache memory
    pair     a server that prefills and one that decodes, each with half of it, and a router
    whole    the same without eviction, all blocks of a prompt over the same connector: it stands
             for vLLM's own disaggregation

Prompts are random tokens. Requests come at a fixed rate, whether or not earlier ones have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
VARIANTS = ("counts", "one", "pair", "whole")


def prompts(args: argparse.Namespace) -> list[list[int]]:
    """Return random tokens, `--requests` prompts from half of `--prompt` tokens to all of them."""
    source = random.Random(args.seed)
    lengths = [source.randint(args.prompt // 2, args.prompt) for _ in range(args.requests)]
    return [[source.randrange(20, 250) for _ in range(length)] for length in lengths]


def connector(role: str, folder: str) -> dict[str, Any]:
    """Return `--kv-transfer-config`."""
    extra = {"folder": folder}
    return {"kv_connector": "PyramidConnector", "kv_role": role, "kv_connector_extra_config": extra}


def count(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Hand each prompt over alone, and compare with what the request's plan keeps.

    Yields:
        For each policy, sums over all prompts: bytes that the plan's blocks have, and bytes sent;
        the blocks of all tails with room for the answers, and the blocks held at most.
    """
    os.environ[IN_PROCESS] = "0"
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig

    from vllm_pyramid import LLM

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            args.model,
            kv_policy=args.policy,
            kv_budget=args.budget,
            kv_min_tokens=0,
            dtype=args.dtype,
            max_model_len=args.prompt + args.answer,
            kv_cache_memory_bytes=args.memory_mib << 20,
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_transfer_config=KVTransferConfig(**connector("kv_both", folder)),
        )
        engine: Any = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        pool, groups = (
            scheduler.kv_cache_manager.block_pool,
            scheduler.kv_cache_config.kv_cache_groups,
        )
        spec = groups[0].kv_cache_spec

        def run(prompt: list[int], most: int, **extra: Any) -> tuple[dict[str, Any], int]:
            params = SamplingParams(
                temperature=0.0, max_tokens=most, ignore_eos=True, extra_args=extra
            )
            engine.add_request(str(time.monotonic()), {"prompt_token_ids": prompt}, params)
            report, peak, free = {}, 0, pool.get_num_free_blocks()
            while scheduler.has_requests() or engine.has_unfinished_requests():
                for output in engine.step():
                    report = output.kv_transfer_params or report
                peak = max(peak, free - pool.get_num_free_blocks())
            return report, peak

        for policy in (args.policy, "full"):
            own = {"kv_policy": "full"} if policy == "full" else {}
            totals = dict.fromkeys(("kept_bytes", "sent_bytes", "tail_blocks", "peak_blocks"), 0)
            for prompt in prompts(args):
                ticket, _ = run(prompt, 1, **own, kv_transfer_params={"do_remote_decode": True})
                part = Path(folder) / f"{ticket['pyramid_state']}.0"
                totals["kept_bytes"] += ticket["blocks_after"] * spec.page_size_bytes
                totals["sent_bytes"] += part.stat().st_size
                report, peak = run(prompt, args.answer, **own, kv_transfer_params=ticket)
                assert report["handed"]["tokens"] == len(prompt), report
                size = spec.block_size
                rows = -(-(len(prompt) + args.answer - 1) // size) - -(-len(prompt) // size)
                totals["tail_blocks"] += ticket["blocks_after"] + rows * len(groups)
                totals["peak_blocks"] += peak
            yield {"variant": "counts", "policy": policy, "requests": args.requests, **totals}


@contextlib.contextmanager
def serving(args: argparse.Namespace, variant: str) -> Iterator[str]:
    """Start the servers of a variant, and a router before two of them; yield the URL."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        roles = ["kv_both"] if variant == "one" else ["kv_producer", "kv_consumer"]
        policy = "full" if variant == "whole" else args.policy
        budget = [] if variant == "whole" else ["--kv-budget", args.budget, "--kv-min-tokens", "0"]
        urls = []
        for role in roles:
            flags = [
                *("--kv-policy", policy, *budget, "--dtype", args.dtype),
                *("--max-model-len", str(args.prompt + args.answer), "--enforce-eager"),
                *("--kv-cache-memory-bytes", str((args.memory_mib << 20) // len(roles))),
                *("--no-enable-prefix-caching", "--served-model-name", "model"),
            ]
            if variant != "one":
                flags += ["--kv-transfer-config", json.dumps(connector(role, folder))]
            port = _free_port()
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", args.model]
            urls.append(_started(stack, [*command, *flags, "--port", str(port)], port))
        for url in urls:
            _wait(url)
        if len(urls) == 2:
            port, router = _free_port(), str(ROOT / "examples" / "disaggregated_router.py")
            command = [sys.executable, router, "--port", str(port)]
            urls = [_started(stack, [*command, "--prefill", urls[0], "--decode", urls[1]], port)]
            _wait(urls[0])
        yield urls[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _started(stack: contextlib.ExitStack, command: list[str], port: int) -> str:
    env = {key: value for key, value in os.environ.items() if key != IN_PROCESS}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return f"http://127.0.0.1:{port}"


def _wait(url: str, seconds: float = 900) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"{url} does not come up")


async def measure(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Send all prompts at the rate; return requests a minute, and seconds to first tokens."""
    handed = 0

    async def ask(client: httpx.AsyncClient, index: int, prompt: list[int]) -> float:
        nonlocal handed
        await asyncio.sleep(index / args.rate)
        came, first = time.monotonic(), 0.0
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": args.answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.monotonic() - came
                    report = json.loads(line.removeprefix("data: ")).get("kv_transfer_params")
                    handed += bool((report or {}).get("handed", {}).get("tokens"))
        return first

    async with httpx.AsyncClient(timeout=None) as client:
        began = time.monotonic()
        asked = [ask(client, index, prompt) for index, prompt in enumerate(prompts(args))]
        first = sorted(await asyncio.gather(*asked))
        seconds = time.monotonic() - began
    return {
        "requests": args.requests,
        "handed": handed,
        "requests_per_minute": round(60 * args.requests / seconds, 1),
        "first_median_s": round(median(first), 3),
        "first_p95_s": round(first[int(0.95 * (len(first) - 1))], 3),
    }


def main() -> None:
    """Parse the command line and run the variants one after another."""
    parser = argparse.ArgumentParser(prog="python -m lab.handover", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or name of a model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--budget", default="12%")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt, at most")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--memory-mib", type=int, default=1024, help="of the cache, of all engines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with this process
    for variant in args.variants:
        if variant == "counts":
            for row in count(args):
                print(json.dumps(row), flush=True)
            continue
        with serving(args, variant) as url:
            row = asyncio.run(measure(args, url))
        rate = {"variant": variant, "rate": args.rate}
        print(json.dumps({**rate, **row}), flush=True)


if __name__ == "__main__":
    main()
