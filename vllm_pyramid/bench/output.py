# SPDX-License-Identifier: Apache-2.0
"""What a bench writes: tables on the console, JSON, CSV and pictures in its folder."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm_pyramid
from vllm_pyramid.bench import pictures
from vllm_pyramid.bench.history import now
from vllm_pyramid.bench.report import tables
from vllm_pyramid.bench.rows import as_csv, as_json
from vllm_pyramid.command_parts import has_matplotlib

__all__ = ["processor", "write"]


def write(
    args: argparse.Namespace, console: Any, rows: Sequence[Any], about: dict[str, Any]
) -> None:
    """Tables on the console, JSON, CSV and pictures in files.

    Args:
        about: what was run beside the rows; its `measured` says when and where, repetition by
            repetition, where that is known.
    """
    about = {
        "version": vllm_pyramid.__version__,
        "date": now(),
        "command": shlex.join(["vllm-pyramid", *sys.argv[1:]]),
        "processor": processor(),
        **about,
    }
    for path in (args.out / f"{args.measure}.json", args.json):
        if path is not None:
            path.write_text(as_json(rows, about), encoding="utf-8")
    for path in (args.out / f"{args.measure}.csv", args.csv):
        if path is not None:
            path.write_text(as_csv(rows), encoding="utf-8")
    for table in tables(args.measure, rows):
        console.print(table)
    console.print(_when_and_where(about), highlight=False, soft_wrap=True)
    drawn: list[Path] = []
    if not args.no_pictures:
        if has_matplotlib():
            drawn = pictures.draw(args.measure, rows, args.out)
        else:
            console.print(
                "No pictures: they need matplotlib (pip install 'vllm-pyramid\\[bench]')."
            )
    written = [f"{args.measure}.json", f"{args.measure}.csv", *(path.name for path in drawn)]
    console.print(f"In {args.out}: {', '.join(written)}.", highlight=False, soft_wrap=True)


def _when_and_where(about: Mapping[str, Any]) -> str:
    """In words, of all repetitions."""
    measured = about.get("measured") or [about]
    first, last = (measured[index]["date"][:16].replace("T", " ") for index in (0, -1))
    places = ", ".join(dict.fromkeys(place["processor"] for place in measured))
    return f"Measured {first if first == last else f'{first} to {last}'} UTC on {places}."


def processor() -> str:
    """The names of the processor and of the GPU, if there is one; the system says them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    cores = f"{name}, {len(os.sched_getaffinity(0))} cores"
    import torch

    return f"{torch.cuda.get_device_name()}; {cores}" if torch.cuda.is_available() else cores
