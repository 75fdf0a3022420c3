# SPDX-License-Identifier: Apache-2.0
"""Time to the first token and per token, over HTTP: `vllm serve` under `vllm bench serve`.

A server a policy, all alive; budgets are asked for by request (`vllm_xargs`). Idle servers sleep.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from vllm_pyramid.bench.measure import PERCENTILES
from vllm_pyramid.bench.plan import BLOCK_SIZE, Plan, Variant
from vllm_pyramid.bench.rows import Row, job_row, percentile_fields, with_ratios
from vllm_pyramid.bench.server_metrics import DIRECT, Sampler, evictions
from vllm_pyramid.bench.sessions import gpu_share
from vllm_pyramid.child_process import ChildError, end_group
from vllm_pyramid.platform import HUGE_PAGES

__all__ = ["flags_of", "latency", "serving"]

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
START_SECONDS = 900
TEXT_SLACK = 64  # tokens by which a text's length may miss the one asked for
_LOG_TAIL = 4000


def flags_of(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of `LLM` as flags of `vllm serve`."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            flags += [f"--{flag}", text]
    return flags


@contextlib.contextmanager
def serving(
    model: str, flags: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server; yields its address at once, use `wait_until_ready`.

    Raises:
        ChildError: it has ended by itself.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*VLLM, "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1", **environment},
            start_new_session=True,
        )
        try:
            yield f"http://127.0.0.1:{port}", process
            if process.poll() is not None:
                raise ChildError("a server ended by itself")
        except ChildError as error:
            if process.poll() is None:
                raise
            # The client's complaint alone would not say why.
            raise ChildError(
                f"{error}\n\nThe server has ended; its log ends:\n\n{_tail(log)}"
            ) from None
        except _NotReadyError:
            raise ChildError(f"the server did not come up; its log ends:\n\n{_tail(log)}") from None
        finally:
            end_group(process)


class _NotReadyError(Exception):
    pass


def _tail(log: Any) -> str:
    log.seek(0)
    text: str = log.read()
    return text[-_LOG_TAIL:]


def wait_until_ready(url: str, process: subprocess.Popen[str]) -> None:
    """Return when the server answers."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            DIRECT.open(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.25)
    raise _NotReadyError


def load(
    url: str,
    model: str,
    plan: Plan,
    variant: Variant,
    rate: float,
    concurrency: int | None,
    seed: int,
) -> dict[str, Any]:
    """One run of `vllm bench serve`; its result file, and what the server was seen to hold: the
    samples of its gauges under `resident_max` and `peak_blocks` (see `Sampler`).

    Raises:
        ChildError: it failed, not every request came back, or the server counts fewer evictions.
    """
    extra = {} if variant.budget is None else {"vllm_xargs": {"kv_budget": variant.budget}}
    before = 0 if variant.budget is None else evictions(url)
    with tempfile.TemporaryDirectory(prefix="vllm-pyramid-") as folder:
        command = [
            *(*VLLM, "bench", "serve", "--backend", "openai", "--base-url", url),
            *("--endpoint", "/v1/completions", "--model", model, "--dataset-name", "random"),
            *("--random-input-len", str(plan.prompt_len), "--random-range-ratio", "0"),
            *("--random-output-len", str(plan.output_len)),
            *("--num-prompts", str(plan.num_prompts), "--request-rate", str(rate)),
            *("--seed", str(seed), "--temperature", "0", "--ignore-eos", "--disable-tqdm"),
            *("--num-warmups", "0", "--percentile-metrics", "ttft,tpot"),
            *("--metric-percentiles", "50,90,99", "--extra-body", json.dumps(extra)),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
            *(() if concurrency is None else ("--max-concurrency", str(concurrency))),
        ]
        with Sampler(url) as seen:
            done = subprocess.run(command, capture_output=True, text=True, env=_quiet_environment())
        path = Path(folder, "result.json")
        if done.returncode or not path.is_file():
            log = (done.stdout + done.stderr)[-_LOG_TAIL:]
            raise ChildError(f"`vllm bench serve` failed; its output ends:\n\n{log}")
        result: dict[str, Any] = json.loads(path.read_text())
    if result["completed"] != plan.num_prompts:
        raise ChildError(
            f"{result['completed']} of {plan.num_prompts} requests to {variant.label} came back"
        )
    if variant.budget is not None and evictions(url) - before < plan.num_prompts:
        raise ChildError(
            f"{plan.num_prompts} requests to {variant.label} came back, and the server counts "
            f"{evictions(url) - before} evictions"
        )
    return result | {"resident_max": seen.running, "peak_blocks": seen.blocks}


def _quiet_environment() -> dict[str, str]:
    own = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return {**os.environ, **own, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def with_slack(plan: Plan, variants: Sequence[Variant]) -> dict[str, Any]:
    """Arguments of a server that takes texts a little longer than asked for.

    Its pool has room for one of them at least, and for what a policy gathers beside it, which may
    be some blocks more than `--pool-prompts` says if that is 1; with all policies.
    """
    longest = min(plan.prompt_len + plan.output_len + TEXT_SLACK, plan.shape.positions)
    blocks = (ceil(longest / BLOCK_SIZE) + 1) * plan.shape.layers  # vLLM keeps one of a layer back
    beside = max(plan.beside_block(variant) for variant in variants)
    made = {
        "max_model_len": longest,
        "kv_cache_memory_bytes": max(plan.pool_bytes, blocks * (plan.block_bytes + beside)),
    }
    return made | {name: plan.engine_args[name] for name in made if name in plan.engine_args}


def latency(
    plan: Plan,
    variants: Sequence[Variant],
    model: str,
    *,
    random: bool,
    rates: Sequence[float],
    concurrency: int | None,
    repetitions: int,
    threads: int | None,
    on_stage: Callable[[str], None],
    on_progress: Callable[[int], None],
) -> list[Row]:
    """Every rate, repetition by repetition, A B A B.

    Args:
        rates: requests/s, `inf` for all at once. concurrency: the most under way; None: no limit.
    """
    slack = with_slack(plan, variants)
    defaults: dict[str, Any] = {"load_format": "dummy"} if random else {}
    # Huge pages for stock vLLM too: beside a policy our platform asks for them.
    environment = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        HUGE_PAGES: os.environ.get(HUGE_PAGES, "1"),
    }
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
        # Otherwise every server's worker is bound to the same cores (but one, which vLLM reserves)
        # and gets their number of threads instead.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        defaults["enforce_eager"] = True
    else:
        share = gpu_share(len({variant.policy for variant in variants}))
        defaults["gpu_memory_utilization"] = share
    if Path(model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    with contextlib.ExitStack() as stack:
        urls: dict[str, str] = {}
        for variant in variants:
            if variant.policy in urls:
                continue
            on_stage(f"starting a server with {variant.policy}")
            policy = [] if variant.is_stock else ["--kv-policy", variant.policy]
            own = plan.arguments_of(variant)
            del own["skip_tokenizer_init"]
            most = max(own["kv_cache_memory_bytes"], slack["kv_cache_memory_bytes"])
            arguments = defaults | own | slack | {"kv_cache_memory_bytes": most}
            flags = [*flags_of(arguments), *policy]
            url, process = stack.enter_context(
                serving(model, flags, environment | variant.environment)
            )
            wait_until_ready(url, process)
            urls[variant.policy] = url
        few = replace(plan, num_prompts=1)
        for variant in variants:
            on_stage(f"{variant.label}, warm-up")
            seed = repetitions * len(rates)  # no measurement's
            load(urls[variant.policy], model, few, variant, float("inf"), None, seed)
        results: dict[tuple[float, int], list[dict[str, Any]]] = {}
        for turn, rate in enumerate(rates):
            for repetition in range(repetitions):
                seed = turn * repetitions + repetition  # new prompts: a prefix cache has none
                for index, variant in enumerate(variants):
                    on_stage(f"{variant.label}, {rate:g}/s, {repetition + 1} of {repetitions}")
                    url = urls[variant.policy]
                    result = load(url, model, plan, variant, rate, concurrency, seed)
                    results.setdefault((rate, index), []).append(result)
                    on_progress(plan.num_prompts)
    return [
        latency_row(plan, variant, rate, results[rate, index], results[rate, 0])
        for rate in rates
        for index, variant in enumerate(variants)
    ]


def latency_row(
    plan: Plan,
    variant: Variant,
    rate: float,
    results: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
) -> Row:
    """The medians of the repetitions, and their ratios to the baseline's."""

    def medians(metric: str) -> list[float]:
        names = [f"p{percent}_{metric}_ms" for percent in PERCENTILES]
        return [statistics.median(result[name] for result in results) for name in names]

    def values(results: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
        names = {"output": "output_throughput", "ttft": "p50_ttft_ms", "tpot": "p50_tpot_ms"}
        return {key: [result[name] for result in results] for key, name in names.items()}

    def most(name: str) -> int | None:
        return max((result[name] for result in results if result[name] is not None), default=None)

    outputs = [result["output_throughput"] for result in results]
    row = replace(
        job_row("latency", plan, variant, plan.pool_prompts),
        request_rate=rate if rate != float("inf") else None,
        output_tokens_per_s=statistics.median(outputs),
        output_low=min(outputs),
        output_high=max(outputs),
        repetitions=len(results),
        resident_max=most("resident_max"),
        peak_blocks=most("peak_blocks"),
        **percentile_fields(medians("ttft"), medians("tpot"), plan.num_prompts),
    )
    return with_ratios(row, values(results), values(baseline))
