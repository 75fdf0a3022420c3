# SPDX-License-Identifier: Apache-2.0
"""Tasks from files of public benchmarks that the user has: LongBench and RULER.

No data, prompt or template of theirs comes with this package. A file of JSON lines becomes one
task, scored by the benchmark's own metric (`longbench.py`, `ruler.py`, `metrics.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_pyramid.eval.file_task import FileTask
from vllm_pyramid.eval.longbench import LENGTHS, TEMPLATES, longbench_tasks
from vllm_pyramid.eval.ruler import ruler_tasks
from vllm_pyramid.eval.task import Task
from vllm_pyramid.model_shape import longest_of_model

__all__ = ["add_arguments", "load_file_tasks", "words_of"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `load_file_tasks` reads."""
    group = parser.add_argument_group("tasks from files of public benchmarks")
    listed = group.add_argument
    listed(
        "--longbench",
        nargs="+",
        default=[],
        metavar="PATH",
        help="LongBench's .jsonl files, or a folder of them",
    )
    listed(
        "--longbench-config",
        type=Path,
        metavar="FOLDER",
        help=f"with LongBench's {TEMPLATES} and {LENGTHS} (default: beside the data)",
    )
    listed(
        "--ruler",
        nargs="+",
        default=[],
        metavar="PATH",
        help="RULER's generated .jsonl files, or a folder of them",
    )
    listed(
        "--max-prompt",
        type=int,
        metavar="TOKENS",
        help="longer prompts of LongBench lose their middle (default: what the model can take)",
    )
    listed(
        "--chat",
        action="store_true",
        help="put LongBench's prompts into the model's chat template (not few-shot and code)",
    )


def words_of(args: argparse.Namespace) -> list[str]:
    """The words of a command line that give these arguments."""
    words: list[str] = []
    for name in ("longbench", "ruler"):
        if getattr(args, name):
            words += [f"--{name}", *getattr(args, name)]
    if args.longbench_config is not None:
        words += ["--longbench-config", str(args.longbench_config)]
    if args.max_prompt is not None:
        words += ["--max-prompt", str(args.max_prompt)]
    return words + ["--chat"] * args.chat


def load_file_tasks(args: argparse.Namespace, model: str) -> tuple[Task, ...]:
    """The tasks of the files that were asked for, in alphabetical order; none if none was.

    Args:
        args: with what `add_arguments` added. model: its configuration says how long prompts may
            be, unless `--max-prompt` does.

    Raises:
        ValueError: a file, template or package is missing, a data set cannot be scored.
    """
    if args.max_prompt is not None and args.max_prompt < 64:
        raise ValueError(f"--max-prompt must be at least 64 tokens, not {args.max_prompt}")
    if not args.longbench and not args.ruler:
        return ()
    limit = _limit_of(model, args.max_prompt)
    tasks: list[FileTask] = []
    if args.longbench:
        tasks += longbench_tasks(args.longbench, args.longbench_config, limit, chat=args.chat)
    tasks += ruler_tasks(args.ruler, limit)
    seen: dict[tuple[str, Sequence[int]], Path] = {}
    for task in tasks:
        other = seen.setdefault((task.name, tuple(task.lengths(()))), task.path)
        if other != task.path:
            raise ValueError(f"{other} and {task.path} are both {task.name!r}: give one of them")
    return tuple(tasks)


def _limit_of(model: str, asked: int | None) -> Callable[[int], int]:
    if asked is not None:
        return lambda max_tokens: asked
    longest = longest_of_model(model)
    if longest is None:
        raise ValueError(f"{model!r} does not say its maximum length: give --max-prompt TOKENS")
    # The bench starts engines with room for one token more than a prompt and its answer.
    return lambda max_tokens: longest - max_tokens - 1
