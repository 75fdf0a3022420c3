# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid eval`: its arguments, its progress display and its output."""

from __future__ import annotations

import argparse
import shlex
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import vllm_pyramid
from vllm_pyramid.command_parts import (
    check_writable,
    has_matplotlib,
    names,
    numbers,
    progress_bar,
)
from vllm_pyramid.config import parse_engine_args
from vllm_pyramid.eval.files import add_arguments, load_file_tasks, words_of
from vllm_pyramid.eval.tasks import GENERATED, load_task

__all__ = ["add_command"]

DEFAULT_POLICIES = "full,streaming-llm,snapkv,pyramidkv"
DEFAULT_BUDGETS = "3%,12%"
DEFAULT_LENGTHS = "1024"
DEFAULT_SAMPLES = 10

_ABOUT_DIGITS = (
    "Exact match counts whole numbers, the other tables their digits one by one. Where every digit "
    "is a token, a policy that pools scores over few positions finds a number and loses its end; "
    "pyramidkv-wide pools over more."
)


def add_command(commands: Any) -> None:
    """Add the sub-command to the parser of `vllm-pyramid`."""
    parser = commands.add_parser(
        "eval",
        help="measure what eviction costs in quality",
        description="Runs generated tasks through the engine with several policies and budgets, "
        "and shows what each costs. Needs no download: the built-in model and the texts come with "
        "the package and with Python.",
    )
    listed = parser.add_argument
    listed("--model", help="folder or Hugging Face name (default: the built-in model)")
    listed(
        "--policies",
        default=DEFAULT_POLICIES,
        help="names or .yaml files, each with arguments if need be, as in "
        "'full,snapkv:{\"kernel_size\":11}' (%(default)s)",
    )
    listed(
        "--budgets",
        default=DEFAULT_BUDGETS,
        help="tokens or per cent, for the policies that evict (%(default)s)",
    )
    listed("--tasks", help="names, or `all` generated ones (all; none where files are given)")
    listed("--lengths", default=DEFAULT_LENGTHS, help="of the prompts, in tokens (%(default)s)")
    listed(
        "--samples",
        type=int,
        default=DEFAULT_SAMPLES,
        help="of each task, length and seed (%(default)s)",
    )
    listed("--seeds", default="0", help="each makes samples of its own (%(default)s)")
    listed(
        "--out",
        type=Path,
        default=Path("eval-results"),
        help="folder for all results, kept for the next run too (%(default)s)",
    )
    listed("--json", type=Path, metavar="FILE", help="write the rows there too")
    listed(
        "--merge-into",
        type=Path,
        metavar="FILE",
        help="put the rows into this JSON file beside those of other runs, in place of equal ones",
    )
    listed("--csv", type=Path, metavar="FILE", help="write the rows there too")
    listed("--markdown", type=Path, metavar="FILE", help="write the tables there")
    listed("--no-pictures", action="store_true", help="draw nothing (needs no matplotlib)")
    listed("--fresh", action="store_true", help="forget earlier results in the folder")
    listed("--engine-args", help="JSON, further arguments of vllm_pyramid.LLM")
    listed("--list", action="store_true", help="show the tasks and stop")
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Entry point of the sub-command; 0 on success.

    Raises:
        ValueError: something that was asked for cannot be.
    """
    from rich.console import Console

    console = Console()
    if args.list:
        return _list(console)
    if args.samples < 1:
        raise ValueError(f"--samples must be at least 1, not {args.samples}")

    from vllm_pyramid.child_process import ChildError, orderly_termination
    from vllm_pyramid.demo import model_path
    from vllm_pyramid.eval import pictures
    from vllm_pyramid.eval.haystack import load_tokens
    from vllm_pyramid.eval.report import as_markdown, tables
    from vllm_pyramid.eval.results import as_csv, as_json, check_mergeable, merged_json, rows_of
    from vllm_pyramid.eval.run import Run, Settings, Store
    from vllm_pyramid.eval.variants import parse_variants

    draws = not args.no_pictures
    if draws and not has_matplotlib():
        console.print("No pictures: they need matplotlib (pip install 'vllm-pyramid\\[eval]').")
        draws = False
    shared: Path | None = args.merge_into
    check_writable(
        args.out, (args.out / "samples.jsonl", args.json, shared, args.csv, args.markdown)
    )
    if shared is not None:
        check_mergeable(shared.read_text(encoding="utf-8"), str(shared))
    model = args.model or str(model_path())
    files = load_file_tasks(args, model)
    asked = args.tasks or ("" if files else "all")
    wanted = tuple(GENERATED) if asked == "all" else names(asked, "--tasks") if asked else ()
    settings = Settings(
        model=model,
        policies=parse_variants(args.policies, "--policies"),
        budgets=names(args.budgets, "--budgets"),
        tasks=(*map(load_task, wanted), *files),
        lengths=numbers(args.lengths, "--lengths", 64),
        samples=args.samples,
        seeds=numbers(args.seeds, "--seeds", 0),
        engine_args=parse_engine_args(args.engine_args),
    )
    try:
        evaluation = Run(settings, load_tokens(settings.model))
    except RuntimeError as error:  # a Python without the texts
        raise ValueError(str(error)) from error
    with closing(Store(args.out / "samples.jsonl", fresh=args.fresh)) as store:
        missing = sum(map(len, evaluation.missing(store).values()))
        total = len(evaluation.jobs)
        console.print(
            f"{total:,} prompts for {settings.model}: {missing:,} to run, the others are in "
            f"{args.out}.",
            highlight=False,
            soft_wrap=True,
        )
        try:
            with orderly_termination():
                _execute(console, evaluation, store, missing)
        except ChildError as error:
            raise ValueError(str(error)) from error
        except KeyboardInterrupt:
            console.print(f"Interrupted. The same command goes on from {args.out}.")
            return 130
        answers = list(evaluation.answers(store))
    rows = rows_of(answers)
    about = {
        "version": vllm_pyramid.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": "built-in" if args.model is None else args.model,
        "command": _command(args),
    }
    for path in (args.out / "results.json", args.json):
        if path is not None:
            path.write_text(as_json(rows, about), encoding="utf-8")
    if shared is not None:
        known = shared.read_text(encoding="utf-8")
        shared.write_text(merged_json(known, rows, about, str(shared)), encoding="utf-8")
    for path in (args.out / "results.csv", args.csv):
        if path is not None:
            path.write_text(as_csv(rows), encoding="utf-8")
    if args.markdown is not None:
        args.markdown.write_text(as_markdown(rows), encoding="utf-8")
    for table in tables(rows):
        console.print(table)
    if any(row.digits is not None for row in rows):
        console.print(_ABOUT_DIGITS, highlight=False)
    drawn = pictures.draw(answers, rows, args.out) if draws else []
    written = ["results.json", "results.csv", *(path.name for path in drawn)]
    console.print(f"In {args.out}: {', '.join(written)}.", highlight=False, soft_wrap=True)
    return 0


def _command(args: argparse.Namespace) -> str:
    """The command that makes the same rows."""
    words = ["vllm-pyramid", "eval"]
    for name in ("model", "policies", "budgets", "tasks", "lengths", "samples", "seeds"):
        value = getattr(args, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    if args.engine_args:
        words += ["--engine-args", args.engine_args]
    words += words_of(args)
    return shlex.join(words)


def _execute(console: Any, evaluation: Any, store: Any, missing: int) -> None:
    if not missing:
        return
    with progress_bar(console) as progress:
        bar = progress.add_task("starting", total=missing)
        evaluation.execute(
            store,
            lambda text: progress.update(bar, description=text),
            lambda: progress.advance(bar),
        )


def _list(console: Any) -> int:
    from rich.table import Table

    table = Table(title="Tasks of vllm-pyramid eval")
    for heading in ("name", "what it asks", "score"):
        table.add_column(heading)
    for name in GENERATED:
        task = load_task(name)
        table.add_row(name, task.summary, task.metric)
    console.print(table)
    return 0
