# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-pyramid top URL...`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from vllm_pyramid.tools.top.samples import Reading, metrics_url, read


def add_command(commands: Any) -> None:
    """Add `vllm-pyramid top` to the commands."""
    parser = commands.add_parser(
        "top",
        help="show live numbers of one or several servers",
        description="Reads /metrics of each server: blocks of the pool, running and waiting "
        "requests, prefix hits, evictions, freed blocks, generated tokens, failed requests, and "
        "the blocks that each layer holds. It costs a server one answer of /metrics a frame. Ends "
        "with Ctrl-C.",
    )
    parser.add_argument("urls", nargs="+", metavar="URL", help="such as http://localhost:8000")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds (default: 2)")
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one frame, with counts since the start; exit status 1 if a server fails",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if not args.interval >= 0.1:
        raise ValueError(f"--interval {args.interval}: at least 0.1 seconds")
    urls = list(dict.fromkeys(args.urls))
    for url in urls:
        metrics_url(url)
    from rich.console import Console

    from vllm_pyramid.tools.top.frame import frame

    console = Console(highlight=False)
    with ThreadPoolExecutor(len(urls)) as pool:

        def readings() -> Sequence[Reading]:
            return list(pool.map(partial(read, clock=time.monotonic), urls))

        now = readings()
        if args.once:
            console.print(frame(now))
            return int(any(reading.error for reading in now))
        from rich.live import Live

        with Live(frame(now), console=console, screen=console.is_terminal) as live:
            try:
                while True:
                    time.sleep(args.interval)
                    now, before = readings(), now
                    live.update(frame(now, before), refresh=True)
            except KeyboardInterrupt:
                return 0
