# SPDX-License-Identifier: Apache-2.0
"""Two servers side by side over HTTP: the stage `http` of scripts/gpu_check.py.

    python scripts/gpu_http.py --shape llama-3-8b --jobs 8192:256:64,1024:128:128 --out FILE
    python scripts/gpu_http.py --model FOLDER --jobs 8192:256:16 --out FILE

A job is PROMPT:OUTPUT:REQUESTS, in tokens: all requests come at once, first with answers that are
streamed, then with whole ones, to one server and then to the other, which is idle meanwhile. The
servers have vLLM's defaults but for their share of the memory; prompts are random tokens, each in
one request only. FILE gets a row for each server, job and kind of answer, after each: seconds to
the first token, between tokens, to the end, tokens a second, and their ratio to the first server's.
With `--profile` PyTorch's profiler records one more job of each server at the end, kernels of the
device included: FILE's name has folders beside it, with tables and traces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

# The folder of this file is where Python looks first.
from gpu_processes import exit_when_asked

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests`

from tests.plumbing.server import Server

LEAST_TOKEN, MOST_TOKEN = 8, 500  # what every tokeniser here has, special tokens left out
START_SECONDS = 300
PROFILED = "1024:24:16"  # a job: some 20 steps of decoding behind a few of prompts
NO_PLUGINS = {"VLLM_PLUGINS": ""}


@dataclass(frozen=True)
class Job:
    """Requests that come at once."""

    prompt: int
    output: int
    requests: int

    @classmethod
    def parse(cls, text: str) -> Job:
        """Return the job of PROMPT:OUTPUT:REQUESTS; raise ValueError for anything else."""
        prompt, output, requests = map(int, text.split(":"))
        if min(prompt, requests) < 1 or output < 2:
            raise ValueError(f"{text}: numbers of at least 1, and 2 tokens of output")
        return cls(prompt, output, requests)

    def prompts(self, seed: int) -> list[list[int]]:
        """Return as many different prompts."""
        source = random.Random(seed)
        return [
            [source.randint(LEAST_TOKEN, MOST_TOKEN) for _ in range(self.prompt)]
            for _ in range(self.requests)
        ]


@dataclass
class Answer:
    """When a request's answer came, in seconds since it was sent.

    Attributes:
        tokens: that were generated. report: what the policy's server says of it.
    """

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    report: dict[str, Any] | None = None

    def note(self, data: dict[str, Any]) -> None:
        """Take what a message says beside its text."""
        if (usage := data.get("usage")) is not None:
            self.tokens = usage["completion_tokens"]
        self.report = data.get("kv_transfer_params") or self.report


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """Send one request, and wait for its answer.

    Raises:
        RuntimeError: the server refuses it, or the answer has another length.
    """
    stream, tokens = body["stream"], body["max_tokens"]
    if stream:  # tokens of random weights have no text, and would be sent late without their ids
        body = body | {"stream_options": {"include_usage": True}, "return_token_ids": True}
    answer, begin = Answer(), time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as got:
        if got.status != 200:
            raise RuntimeError(f"status {got.status}: {(await got.text())[:500]}")
        if not stream:
            answer.note(await got.json())
            answer.times.append(time.monotonic() - begin)
        else:
            async for line in got.content:
                if line.startswith(b"data: {"):
                    data = json.loads(line[6:])
                    answer.note(data)
                    if data["choices"]:
                        answer.times.append(time.monotonic() - begin)
    if answer.tokens != tokens:
        raise RuntimeError(f"an answer has {answer.tokens} tokens, not {tokens}")
    return answer


def summary(answers: list[Answer], seconds: float) -> dict[str, Any]:
    """Return the numbers of a job.

    Times between tokens are means of each request: messages may have several tokens.
    """
    ends = sorted(answer.times[-1] for answer in answers)
    row: dict[str, Any] = {
        "seconds": seconds,
        "output_tokens_per_s": sum(answer.tokens for answer in answers) / seconds,
        "end_s_median": statistics.median(ends),
        "end_s_largest": ends[-1],
    }
    if any(len(answer.times) > 1 for answer in answers):
        firsts = sorted(answer.times[0] for answer in answers)
        between = [(a.times[-1] - a.times[0]) / (a.tokens - 1) for a in answers]
        row |= {
            "first_s_least": firsts[0],
            "first_s_median": statistics.median(firsts),
            "first_s_p90": firsts[math.ceil(0.9 * len(firsts)) - 1],
            "between_s_median": statistics.median(between),
        }
    if (report := answers[0].report) is not None:
        row["evicted_tokens"] = report.get("evicted_tokens")
    return row


async def measure(url: str, model: str, job: Job, seed: int, stream: bool) -> dict[str, Any]:
    """Send all requests of a job at once."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        common = {"model": model, "max_tokens": job.output, "stream": stream}
        common |= {"ignore_eos": True, "temperature": 0}
        bodies = [common | {"prompt": prompt} for prompt in job.prompts(seed)]
        begin = time.monotonic()
        answers = await asyncio.gather(*(ask(session, url, body) for body in bodies))
        return summary(list(answers), time.monotonic() - begin)


def flags_of(variant: str, budget: str) -> list[str]:
    """Return the flags of a server: none of ours for `stock`."""
    if variant == "stock":
        return []
    return ["--kv-policy", variant, *([] if variant == "full" else ["--kv-budget", budget])]


def profile_flags(folder: Path) -> list[str]:
    """Return the flags of a server that can be told to record a profile."""
    config = {"profiler": "torch", "torch_profiler_dir": str(folder.resolve())}
    return ["--profiler-config", json.dumps(config | {"torch_profiler_with_stack": False})]


def order(server: Server, path: str) -> None:
    """Send an empty order; raise OSError unless the server obeys."""
    request = urllib.request.Request(f"{server.url}{path}", method="POST")
    urllib.request.urlopen(request, timeout=START_SECONDS).close()


def run(options: argparse.Namespace, model: Path, flags: list[str]) -> dict[str, Any]:
    """Start the servers and give them all jobs in turn; write the rows after each."""
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"variants": options.variants, "flags": flags, "starts": {}}
    result["rows"] = rows
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for variant in options.variants:  # one after the other: vLLM measures free memory
            begin = time.monotonic()
            servers[variant] = Server(
                model,
                *flags,
                *flags_of(variant, options.budget),
                *(profile_flags(options.out.with_suffix(f".{variant}")) if options.profile else ()),
                log=options.out.with_suffix(f".{variant}.log"),
                environment=NO_PLUGINS if variant == "stock" else {},
                fresh=True,
            )
            stack.callback(servers[variant].kill)
            servers[variant].wait_until_ready(START_SECONDS)
            result["starts"][variant] = time.monotonic() - begin
        seed = 0
        warm_up = Job(64, 8, 2)
        for server in servers.values():
            asyncio.run(measure(server.url, str(model), warm_up, seed, True))
        for job in options.jobs:
            for stream in (True, False):
                seed += 1  # the same prompts for all, and in no prefix cache
                seconds: dict[str, float] = {}
                for variant, server in servers.items():
                    row = asyncio.run(measure(server.url, str(model), job, seed, stream))
                    row = {"variant": variant, **vars(job), "streamed": stream, **row}
                    seconds[variant] = row["seconds"]
                    row["speed_ratio"] = seconds[options.variants[0]] / row["seconds"]
                    print(json.dumps(row), flush=True)
                    rows.append(row)
                    options.out.write_text(json.dumps(result))
        if options.profile:
            for server in servers.values():
                order(server, "/start_profile")
                profiled = Job.parse(PROFILED)
                asyncio.run(measure(server.url, str(model), profiled, seed + 1, True))
                order(server, "/stop_profile")
    return result


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the options and what is for the servers."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # others are the servers'
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", help="of `vllm-pyramid bench`, with random weights")
    what.add_argument("--model", type=Path, help="a folder with weights")
    parser.add_argument("--variants", default="stock,auto", type=lambda text: text.split(","))
    parser.add_argument("--budget", default="12%", help="of policies that evict")
    parser.add_argument(
        "--jobs", required=True, type=lambda text: [Job.parse(part) for part in text.split(",")]
    )
    parser.add_argument("--share", type=float, help="of the memory for each server")
    parser.add_argument("--profile", action="store_true", help="one more job of each server")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_known_args()


def main() -> int:
    options, flags = parse_arguments()
    share = options.share or round(0.9 / len(options.variants), 3)
    flags += ["--gpu-memory-utilization", str(share), "--no-enable-log-requests"]
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            from vllm_pyramid.tools.bench.shapes import named_shape, write_model

            model = Path(folder)
            write_model(named_shape(options.shape, None), model)
            flags += ["--load-format", "dummy"]
        run(options, model, flags)
    return 0


if __name__ == "__main__":
    exit_when_asked()  # and end the servers, which have sessions of their own
    sys.exit(main())
