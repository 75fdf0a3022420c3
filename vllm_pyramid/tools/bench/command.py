# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid bench`: from the command line to a measure and its results."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_pyramid.tools.bench.options import MEASURES, EngineOptions, add_flags, parse
from vllm_pyramid.tools.child_process import ChildError, orderly_termination
from vllm_pyramid.tools.command_parts import check_writable


def add_command(commands: Any) -> None:
    """Add the sub-command, with its own sub-commands, to the parser of `vllm-pyramid`."""
    parser = commands.add_parser(
        "bench",
        help="measure policies and stock vLLM side by side, at equal cache memory",
        description="Measures policies side by side: the same prompts, the same cache memory, in "
        "turns. The default model has random weights, so nothing is downloaded.",
    )
    measures = parser.add_subparsers(dest="measure", required=True, metavar="MEASURE")
    for name, model in MEASURES.items():
        one = measures.add_parser(name, help=model.__doc__, description=model.__doc__)
        add_flags(one, model)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the sub-command; return 0 on success. ValueError: a wrong option, or it failed."""
    options = parse(MEASURES[args.measure], vars(args))

    def measure(folder: Path, console: Any) -> None:
        from vllm_pyramid.tools.bench.measures import run_measure
        from vllm_pyramid.tools.bench.prepare import prepare

        run_measure(args.measure, options, prepare(options, folder), console)

    return run_with_folder(options, measure)


def run_with_folder(options: EngineOptions, measure: Callable[[Path, Any], None]) -> int:
    """Measure with a folder for a model and a console; return 0 on success. ValueError: failed."""
    from rich.console import Console

    console = Console()
    if find_spec("pandas") is None:
        raise ValueError("the bench needs pandas: pip install 'vllm-pyramid[bench]'")
    check_writable(options.out, (options.json_file,))
    with tempfile.TemporaryDirectory(prefix="vllm-pyramid-") as folder:
        try:
            with orderly_termination():
                measure(Path(folder), console)
        except ChildError as error:
            raise ValueError(str(error)) from error
        except KeyboardInterrupt:
            console.print("Interrupted: nothing of it is kept.")
            return 130
    return 0
