# SPDX-License-Identifier: Apache-2.0
"""Times over HTTP: a `vllm serve` for each policy under the load of `vllm bench serve`.

All servers are alive at once and the load alternates between them. Requests carry their budget
(`vllm_xargs`), so variants of one policy share a server. Idle servers sleep.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from threading import Event, Thread
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_pyramid.tools.bench.job import Job, Variant
from vllm_pyramid.tools.bench.prepare import Prepared
from vllm_pyramid.tools.bench.processes import gpu_share
from vllm_pyramid.tools.bench.report import Samples
from vllm_pyramid.tools.bench.samples import PERCENTILES, Sample, percentiles_of
from vllm_pyramid.tools.bench.shapes import BLOCK_SIZE
from vllm_pyramid.tools.child_process import ChildError, LoggedProcess
from vllm_pyramid.tools.command_parts import Progress

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
START_SECONDS = 900
TEXT_SLACK = 64  # tokens by which a text may be longer than configured
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 60  # within which a busy server answers
_LOG_TAIL = 4000
_GAUGES = {"resident_max": "vllm:num_requests_running", "peak_blocks": "vllm_pyramid:blocks_held"}
# The servers are on this machine, whatever proxy the environment names.
_CLIENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def metrics(url: str, timeout: float) -> dict[str, float]:
    """Return a server's counters and gauges, each summed over its labels (engines, layers)."""
    with _DIRECT.open(f"{url}/metrics", timeout=timeout) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    totals: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def evictions(url: str) -> int:
    """Return the evictions that a server with a policy has counted since its start.

    Raises:
        ChildError: it does not answer.
    """
    try:
        return int(metrics(url, ANSWER_SECONDS).get("vllm_pyramid:evictions_total", 0))
    except OSError as error:
        raise ChildError(f"the server does not say what it has evicted: {error}") from error


class Gauges:
    """Reads a server's gauges twice a second in a `with` statement, and keeps the largest values.

    What a server allocates between two readings is not seen, so the values are lower bounds.

    Attributes:
        largest: `resident_max`, the most requests that ran at once (prefill included), and
            `peak_blocks`, the most blocks of one layer allocated at once, summed over the layers.
            Values that were always 0 are left out: stock vLLM has no gauge for blocks.
        looks: readings that the server has answered.
    """

    def __init__(self, url: str, interval: float = LOOK_SECONDS) -> None:
        self.largest: dict[str, int] = {}
        self.looks = 0
        self._url, self._interval, self._end = url, interval, Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Gauges:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._interval):
            # A server that has ended is noticed by those who send requests to it.
            with contextlib.suppress(OSError):
                totals = metrics(self._url, ANSWER_SECONDS)
                for name, metric in _GAUGES.items():
                    if value := int(totals.get(metric, 0)):
                        self.largest[name] = max(self.largest.get(name, 0), value)
                self.looks += 1


def flags_of(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments of `LLM` as flags of `vllm serve`."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return flags


class Server(LoggedProcess):
    """`vllm serve` on a free port of this machine."""

    def __init__(
        self, model: str, flags: Sequence[str], policy: str, environment: Mapping[str, str]
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [*VLLM, "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
        what, offline = f"the server with {policy!r}", Path(model).is_dir()
        super().__init__(command, what, offline=offline, environment=environment)
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_ready(self) -> None:
        """Return when it answers.

        Raises:
            ChildError: it ended, or was not ready in time.
        """
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.has_ended:
                raise self.error()
            with contextlib.suppress(OSError):
                _DIRECT.open(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.25)
        raise ChildError(f"{self.what} was not ready after {START_SECONDS} seconds")


def load(
    server: Server, prepared: Prepared, variant: Variant, job: Job, rate: float, seed: int
) -> Sample:
    """Run `vllm bench serve` once.

    Args:
        rate: requests/s, `inf` for all at once.

    Raises:
        ChildError: it failed, a request failed, or the server ended or counts fewer evictions than
            requests.
    """
    evicts = variant.budget is not None
    before = evictions(server.url) if evicts else 0
    try:
        with Gauges(server.url) as gauges:
            result = _vllm_bench_serve(server.url, prepared.model, variant, job, rate, seed)
        done, evicted = result["completed"], evictions(server.url) - before if evicts else None
    except ChildError as error:
        if server.has_ended:  # what the client says is not the cause
            raise ChildError(f"{error}\n\n{server.error()}") from None
        raise
    if done != job.num_prompts or (evicted is not None and evicted < job.num_prompts):
        raise ChildError(
            f"{done} of {job.num_prompts} requests to {variant.label} came back, and the server "
            f"counts {evicted} evictions"
        )
    times = {
        f"{metric}_p{percent}_ms": result[f"p{percent}_{metric}_ms"]
        for metric in ("ttft", "tpot")
        for percent in percentiles_of(job.num_prompts)
    }
    return {
        "pool_prompts": job.pool_prompts,
        "request_rate": None if rate == inf else rate,
        "output_tokens_per_s": result["output_throughput"],
        **times,
        **gauges.largest,
    }


def _vllm_bench_serve(
    url: str, model: str, variant: Variant, job: Job, rate: float, seed: int
) -> dict[str, Any]:
    """Return its result file."""
    arguments = {
        "backend": "openai",
        "base_url": url,
        "endpoint": "/v1/completions",
        "model": model,
        "dataset_name": "random",
        "random_range_ratio": "0",
        "seed": seed,
        "random_input_len": job.prompt_len,
        "random_output_len": job.output_len,
        "num_prompts": job.num_prompts,
        "num_warmups": 0,
        "temperature": 0,
        "request_rate": str(rate),
        "extra_body": {"vllm_xargs": {"kv_budget": variant.budget}} if variant.budget else {},
        "percentile_metrics": "ttft,tpot",
        "metric_percentiles": ",".join(map(str, PERCENTILES)),
        "result_filename": "result.json",
    }
    with tempfile.TemporaryDirectory(prefix="vllm-pyramid-") as folder:
        switches = ["--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", folder]
        done = subprocess.run(
            [*VLLM, "bench", "serve", *flags_of(arguments), *switches],
            capture_output=True,
            text=True,
            env={**os.environ, **_CLIENT},
        )
        path = Path(folder, "result.json")
        if done.returncode or not path.is_file():
            log = (done.stdout + done.stderr)[-_LOG_TAIL:]
            raise ChildError(f"`vllm bench serve` failed; its output ends:\n\n{log}")
        result: dict[str, Any] = json.loads(path.read_text())
        return result


def with_slack(job: Job, variants: Sequence[Variant]) -> dict[str, Any]:
    """Return arguments of servers that take texts a little longer than configured.

    The KV cache of every server has room for one such text and for what a policy accumulates next
    to it, which may be a few blocks more than `--pool-prompts 1` says.
    """
    longest = min(job.prompt_len + job.output_len + TEXT_SLACK, job.shape.positions)
    blocks = (ceil(longest / BLOCK_SIZE) + 1) * job.shape.layers  # vLLM keeps one of a layer back
    block_bytes = job.shape.block_bytes + max(map(job.beside_block_bytes, variants))
    made = {
        "max_model_len": longest,
        "kv_cache_memory_bytes": max(job.pool_bytes, blocks * block_bytes),
    }
    return made | {name: job.engine_args[name] for name in made if name in job.engine_args}


def _start(prepared: Prepared, variant: Variant, servers: int) -> Server:
    """Start a server with a variant's policy."""
    environment = dict(variant.environment)
    arguments: dict[str, Any] = {"load_format": "dummy"} if prepared.random else {}
    if prepared.threads is None:
        arguments["gpu_memory_utilization"] = gpu_share(servers)
    else:
        # Without "nobind" vLLM binds the workers of all servers to the same cores.
        environment["OMP_NUM_THREADS"] = str(prepared.threads)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        arguments["enforce_eager"] = True
    own = prepared.job.engine_arguments(variant)
    del own["skip_tokenizer_init"]
    slack = with_slack(prepared.job, prepared.variants)
    cache = "kv_cache_memory_bytes"
    arguments |= own | slack | {cache: max(own[cache], slack[cache])}
    policy = [] if variant.is_stock else ["--kv-policy", variant.policy]
    return Server(prepared.model, [*flags_of(arguments), *policy], variant.name, environment)


def latencies_over_http(
    prepared: Prepared,
    rates: Sequence[float],
    repetitions: int,
    progress: Progress,
) -> Samples:
    """Measure every rate with all variants in turn, repetition by repetition."""
    job = prepared.job
    samples: Samples = []
    policies = {variant.name: variant for variant in prepared.variants}
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for policy, variant in policies.items():
            progress.stage(f"starting a server with {policy}")
            servers[policy] = stack.enter_context(_start(prepared, variant, len(policies)))
            servers[policy].wait_until_ready()
        for variant in prepared.variants:
            progress.stage(f"{variant.label}, warm-up")
            seed = repetitions * len(rates)  # no measurement's
            load(servers[variant.name], prepared, variant, replace(job, num_prompts=1), inf, seed)
        turns = [(rate, number) for rate in rates for number in range(repetitions)]
        for seed, (rate, number) in enumerate(turns):  # new prompts, unknown to a prefix cache
            for variant in prepared.variants:
                progress.stage(f"{variant.label}, {rate:g}/s, {number + 1} of {repetitions}")
                server = servers[variant.name]
                sample = load(server, prepared, variant, job, rate, seed)
                samples.append((variant, sample))
                progress.advance(job.num_prompts)
    return samples
