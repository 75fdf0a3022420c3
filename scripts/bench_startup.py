#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the seconds go from the command to the first token of a server, and what compiling gives.

    .venv/bin/python scripts/bench_startup.py                     # eager, the built-in model
    .venv/bin/python scripts/bench_startup.py --compiled          # and compiled, cold and warm
    .venv/bin/python scripts/bench_startup.py --imports auto      # modules that take the longest

Every start is a `vllm serve` in processes of its own, the variants in turn. "Cold" is the first
start with an empty folder for vLLM's caches (`VLLM_CACHE_ROOT`), "warm" a later one with the same
folder: what the operating system holds of files is not dropped. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import pandas as pd

from vllm_pyramid.tools.child_process import end_group
from vllm_pyramid.tools.demo import model_path

STOCK = "stock"
PATIENCE_SECONDS = 600
AT_ONCE = 8
# What a phase ends with: its name, and a text of the line that vLLM logs then.
PHASES = (
    ("front end: imports, arguments", "non-default args"),
    ("its configuration; the core's process and imports", "Initializing a V1 LLM engine"),
    ("worker, weights", "Loading weights took"),
    ("memory, cache, compilation, warm-up", "init engine (profile"),
    ("front end: routes", "Starting vLLM server on"),
)
READY, FIRST = "listening", "first token"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Variant:
    """A way to start a server: `policy` None is stock vLLM."""

    policy: str | None
    compiled: bool

    @property
    def name(self) -> str:
        return f"{self.policy or STOCK}, {'compiled' if self.compiled else 'eager'}"


@dataclass
class Start:
    """One start: the seconds of its phases, tokens a second by the number of requests at once."""

    phases: dict[str, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)


def serve(args: argparse.Namespace, variant: Variant, caches: Path) -> Start:
    """Start a server, ask it for a token and for many, and end it.

    Raises:
        RuntimeError: it ended, was not ready in time, or a line that ends a phase did not come.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-u", "-m", "vllm.entrypoints.cli.main", "serve", str(args.model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    command += ["--max-num-seqs", str(AT_ONCE), "--kv-cache-memory-bytes", str(256 << 20)]
    command += [] if variant.compiled else ["--enforce-eager"]
    command += [] if variant.policy is None else ["--kv-policy", variant.policy]
    command += ["--dtype", args.dtype] if args.dtype else []
    own = {"VLLM_CACHE_ROOT": str(caches), "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1"}
    own |= {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    own |= {"VLLM_PLUGINS": ""} if variant.policy is None else {}
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **own},
        start_new_session=True,
    )
    seen: dict[str, float] = {}
    log: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            log.append(line)
            for name, text in PHASES:
                if text in line:
                    seen.setdefault(name, time.monotonic() - begin)

    reader = Thread(target=read, daemon=True)
    reader.start()
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            with contextlib.suppress(OSError):
                _DIRECT.open(f"{url}/health", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() - begin > PATIENCE_SECONDS:
                raise RuntimeError(f"{variant.name} did not start:\n{''.join(log[-25:])}")
            time.sleep(0.05)
        seen[READY] = time.monotonic() - begin
        complete(url, str(args.model), 1)
        seen[FIRST] = time.monotonic() - begin
        rates = {count: rate(url, str(args.model), count) for count in (1, AT_ONCE)}
    finally:
        end_group(process)
        reader.join(timeout=10)
    if missing := [name for name, _ in PHASES if name not in seen]:
        raise RuntimeError(
            f"vLLM's log does not tell the end of: {', '.join(missing)}\n{''.join(log)}"
        )
    made, before = Start(rates=rates), 0.0
    for name in (*(name for name, _ in PHASES), READY, FIRST):
        made.phases[name], before = seen[name] - before, seen[name]
    made.phases["sum"] = before
    return made


def complete(url: str, model: str, tokens: int) -> None:
    """Ask for `tokens` tokens behind a short prompt."""
    body = {"model": model, "prompt": "The library has functions that return", "temperature": 0}
    body |= {"max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with _DIRECT.open(request, timeout=PATIENCE_SECONDS) as answer:
        got = json.load(answer)["usage"]["completion_tokens"]
    if got != tokens:
        raise RuntimeError(f"{got} tokens came, not {tokens}")


def rate(url: str, model: str, count: int, tokens: int = 128) -> float:
    """Return the tokens a second of `count` requests at once; the second time, warmed up."""
    for _ in range(2):
        begin = time.monotonic()
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda _: complete(url, model, tokens), range(count)))
        seconds = time.monotonic() - begin
    return count * tokens / seconds


def starts(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Start]]:
    """Yield what each start took, the variants in turn, the first of each cold."""
    policies = [None if name == STOCK else name for name in args.policies]
    kinds = (False, True) if args.compiled else (False,)
    variants = [Variant(policy, compiled) for compiled in kinds for policy in policies]
    for number in range(1 + args.warm):
        for variant in variants:
            temperature = "warm" if number else "cold"
            print(f"{variant.name}, {temperature}", file=sys.stderr, flush=True)
            caches = folder / variant.name.replace(", ", "-")
            yield f"{variant.name}, {temperature}", serve(args, variant, caches)


def table(found: Sequence[tuple[str, Start]]) -> pd.DataFrame:
    """Return medians: a row a phase, a column a variant."""
    columns: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for name, _ in found):
        its = [start for other, start in found if other == name]
        columns[name] = {
            phase: statistics.median(one.phases[phase] for one in its) for phase in its[0].phases
        }
        columns[name] |= {
            f"tokens a second, {count} at once": statistics.median(one.rates[count] for one in its)
            for count in its[0].rates
        }
    return pd.DataFrame(columns)


def imports(policy: str, shown: int = 25) -> pd.DataFrame:
    """Return the modules that a front end with the policy spends the most time in, in ms.

    Python's own count (`-X importtime`), which itself takes time.
    """
    code = "import vllm_pyramid" if policy != STOCK else "import vllm"
    code += "; from vllm import LLM; from vllm.entrypoints.cli import main"
    code += "; import vllm_pyramid.plugin as p; p.register()" if policy != STOCK else ""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **({"VLLM_PLUGINS": ""} if policy == STOCK else {})},
    )
    line = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)")
    rows = [(name, int(own) / 1e3) for own, _, name in line.findall(done.stderr)]
    made = pd.DataFrame(rows, columns=["module", "ms"])
    made["package"] = made["module"].str.split(".").str[0]
    return made.groupby("package")["ms"].agg(["sum", "count"]).nlargest(shown, "sum")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--policies", nargs="+", default=[STOCK, "full", "auto"])
    parser.add_argument("--compiled", action="store_true", help="also without --enforce-eager")
    parser.add_argument("--dtype", help="of all servers (default: each its own)")
    parser.add_argument("--warm", type=int, default=1, help="warm starts of each variant")
    parser.add_argument("--imports", metavar="POLICY", help="a policy, or stock")
    args = parser.parse_args()
    if args.imports:
        print(imports(args.imports).round(0).to_string())
        return
    with tempfile.TemporaryDirectory(prefix="vllm-pyramid-") as folder:
        found = list(starts(args, Path(folder)))
    print(table(found).round(2).T.to_string())


if __name__ == "__main__":
    main()
