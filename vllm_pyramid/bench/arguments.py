# SPDX-License-Identifier: Apache-2.0
"""The arguments of `vllm-pyramid bench` and its measures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vllm_pyramid.bench.cost import MACHINES
from vllm_pyramid.bench.shapes import SHAPES

__all__ = ["add_arguments"]


def add_arguments(measures: Any) -> None:
    """Add a parser for each measure to `measures`, what `add_subparsers` returned."""
    throughput = _engine_parser(
        measures,
        "throughput",
        "tokens per second at equal cache memory",
        pool=4.0,
    )
    throughput.add_argument(
        "--decode-only",
        action="store_true",
        help="only steady decoding: prefill what finds room, then take turns in windows of steps",
    )
    throughput.add_argument(
        "--profile",
        action="store_true",
        help="with --decode-only, on the CPU: also where the time of a step goes, part by part",
    )
    _engine_parser(
        measures, "capacity", "requests that decode at once, and before one has to wait", pool=4.0
    )
    latency = _engine_parser(
        measures, "latency", "time to the first token and per token, at given request rates"
    )
    latency.add_argument(
        "--rates", default="inf", help="requests per second, `inf` for all at once (%(default)s)"
    )
    latency.add_argument("--max-concurrency", type=_positive, help="requests under way at most")
    pressure = _engine_parser(
        measures, "pressure", "the whole job with less and less cache memory", pool=None
    )
    pressure.add_argument(
        "--pools",
        default="16,8,4,2,1",
        help="whole requests that the cache has room for (%(default)s)",
    )
    scheduler = _parser(
        measures, "scheduler", "step cost of the scheduler against layers and requests"
    )
    scheduler.add_argument("--layers", default="8,32", help="attention layers (%(default)s)")
    scheduler.add_argument("--requests", default="16,64,256", help="running (%(default)s)")
    scheduler.add_argument("--steps", type=int, default=400, help="measured (%(default)s)")
    scheduler.add_argument("--prompt-len", type=int, default=512, help="tokens (%(default)s)")
    _cost(measures)


def _parser(measures: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = measures.add_parser(name, help=summary, description=summary)
    goes_on = {"throughput": " without --decode-only", "pressure": ""}.get(name)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench-results"),
        help="folder for all results"
        + ("" if goes_on is None else f"; an interrupted run{goes_on} goes on there")
        + " (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument(
        "--no-pictures", action="store_true", help="draw nothing (needs no matplotlib)"
    )
    parser.set_defaults(decode_only=False, profile=False, pool_prompts=None, pools=None)
    return parser


def _engine_parser(
    measures: Any, name: str, summary: str, *, pool: float | None = None
) -> argparse.ArgumentParser:
    parser = _parser(measures, name, summary)
    listed = parser.add_argument
    listed(
        "--model",
        default="small",
        help=f"a shape with random weights ({', '.join(SHAPES)}), `built-in`, a folder or a "
        "Hugging Face name (%(default)s)",
    )
    listed("--layers", type=_positive, help="of a shape, if not its own number")
    listed(
        "--policies",
        default="stock,pyramidkv",
        help="names, .yaml files, `stock` and `stock-prefix-caching` for vLLM without this plugin; "
        "in throughput also transformers, "
        "kvpress-snapkv, kvpress-pyramidkv, kvpress-streaming-llm; the first is what the others "
        "are compared with (%(default)s)",
    )
    listed(
        "--budget",
        "--budgets",
        dest="budgets",
        default="12%",
        help="tokens or per cent, one or several, for those that evict (12%%)",
    )
    listed("--prompt-len", type=int, default=2048, help="tokens (%(default)s)")
    listed("--output-len", type=int, default=64, help="tokens (%(default)s)")
    listed("--num-prompts", type=int, default=16, help="requests (%(default)s)")
    if name != "pressure":
        listed(
            "--pool-prompts",
            type=float,
            default=pool,
            help="whole requests, prompt and output, that the cache has room for without eviction "
            f"({'as many as requests' if pool is None else '%(default)g'})",
        )
    listed(
        "--kv-swap-space",
        type=float,
        metavar="GiB",
        help="host memory for V, of policies that keep it there (as much as the cache)",
    )
    listed("--repetitions", type=int, default=3, help="of each measurement (%(default)s)")
    listed("--threads", type=_positive, help="of each engine on the CPU (OMP_NUM_THREADS, or all)")
    listed("--engine-args", help="JSON, further arguments of vllm_pyramid.LLM")
    listed("--peer-python", metavar="PATH", help="Python of an environment with kvpress")
    if name in ("throughput", "pressure"):
        listed(
            "--fresh",
            action="store_true",
            help="begin anew, also where an interrupted run would go on",
        )
    return parser


def _cost(measures: Any) -> None:
    summary = "what memory and arithmetic allow, on paper"
    parser = measures.add_parser("cost", help=summary, description=summary)
    listed = parser.add_argument
    listed("--model", default="llama-3-8b", help="a shape, a folder or a Hugging Face name")
    listed("--machine", choices=sorted(MACHINES), default="h200")
    listed("--devices", type=_positive, default=1, help="that share the model (%(default)s)")
    listed("--prompt-lens", default="8192,32768,131072", help="tokens (%(default)s)")
    listed("--budget", "--budgets", dest="budgets", default="12%,2048", help="(12%%,2048)")
    listed("--output-len", type=_positive, default=256, help="tokens (%(default)s)")
    listed("--request-rate", type=float, default=10000.0, help="per second (%(default)g)")
    listed("--markdown", action="store_true", help="print the table as Markdown")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
