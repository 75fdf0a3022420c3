# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.eval`: its arguments, its progress display and its output."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm_pyramid
from lab.models.folders import MODELS, model_folder
from vllm_pyramid.compat.versions import WrongVLLMError, check_vllm
from vllm_pyramid.tools.command_parts import (
    Progress,
    check_writable,
    names,
    numbers,
    parse_engine_args,
)

if TYPE_CHECKING:
    from lab.eval.run import Answer, Settings
    from lab.eval.task import Task

_ABOUT_DIGITS = (
    "Exact match counts whole numbers, the other tables their digits one by one. Where every digit "
    "is a token, a policy that pools scores over few positions finds a number and loses its end; "
    "pyramidkv-wide pools over more."
)
# What decides the rows, in the order in which the command is written down.
_REPEATED = (
    "model", "policies", "budgets", "tasks", "lengths", "samples", "seeds", "engine_args",
    "lm_eval", "longbench", "ruler", "max_prompt", "max_answer", "chat",
)  # fmt: skip


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.eval",
        description="Runs tasks through the engine with several policies and budgets, and shows "
        "what each costs. The built-in model and the texts of the generated tasks come with the "
        "package and with Python.",
    )
    parser.add_argument("--list", action="store_true", help="show the tasks and stop")
    for name, default, text in (
        (
            "model",
            None,
            f"folder, Hugging Face name, or {', '.join(MODELS)} (default: the built-in model)",
        ),
        (
            "policies",
            "full,streaming-llm,snapkv,pyramidkv",
            "names or .yaml files, each with arguments if need be, as in "
            "'full,snapkv:{\"kernel_size\":11}', and with another type of KV cache, as in "
            "'snapkv@fp8', or evicted where earlier turns ended too, as in 'snapkv@turns' "
            "(%(default)s)",
        ),
        ("budgets", "3%,12%", "tokens or per cent, for the policies that evict (%(default)s)"),
        (
            "tasks",
            None,
            "names, or `all` generated ones that the model can be asked (all; none if tasks of "
            "lm-eval are given)",
        ),
        ("lengths", "1024", "of the prompts, in tokens (%(default)s)"),
        ("samples", 10, "of each task, length and seed (%(default)s)"),
        ("seeds", "0", "each makes other samples (%(default)s)"),
        ("engine-args", None, "JSON, further arguments of vllm_pyramid.LLM"),
    ):
        kind = int if name == "samples" else str
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    output = parser.add_argument_group("output")
    for name, text in (
        ("out", "folder for all results, kept for the next run too (%(default)s)"),
        ("json", "write the rows there too"),
        ("csv", "write the rows there too"),
        ("markdown", "write the tables there"),
    ):
        folder = Path("eval-results") if name == "out" else None
        output.add_argument(f"--{name}", type=Path, metavar="PATH", default=folder, help=text)
    output.add_argument("--no-pictures", action="store_true", help="draw nothing")
    output.add_argument("--fresh", action="store_true", help="forget earlier results in the folder")
    group = parser.add_argument_group("tasks of lm-eval (nothing is downloaded)")
    for name, metavar, text in (
        ("lm-eval", "TASK", "its tasks or groups, .yaml files, or NAME=FILE.jsonl: NAME on FILE"),
        ("longbench", "PATH", "LongBench's .jsonl files, or a folder of them"),
        ("ruler", "PATH", "RULER's generated .jsonl files, or a folder of them"),
    ):
        group.add_argument(f"--{name}", nargs="+", default=[], metavar=metavar, help=text)
    text = "longer prompts lose their middle, except RULER's (default: what the model takes)"
    group.add_argument("--max-prompt", type=int, metavar="TOKENS", help=text)
    text = "of --lm-eval, instead of the task's own limit or lm-eval's 256"
    group.add_argument("--max-answer", type=int, metavar="TOKENS", help=text)
    text = "use the model's chat template (not for RULER and LongBench's few-shot and code)"
    group.add_argument("--chat", action="store_true", help=text)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, 2 on wrong input, which one line explains."""
    args = parse_args(argv)
    try:
        check_vllm()
        return run(args)
    except (ValueError, WrongVLLMError) as error:
        print(f"lab.eval: error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Measure, and write what was found; return 0 on success.

    Raises:
        ValueError: something that was asked for cannot be.
    """
    from rich.console import Console

    console = Console()
    if args.list:
        return _list(console)
    if args.samples < 1:
        raise ValueError(f"--samples must be at least 1, not {args.samples}")
    if find_spec("pandas") is None:
        raise ValueError("the tables need pandas: pip install -e '.[dev]'")

    from lab.eval.run import Run, Store
    from vllm_pyramid.tools.child_process import ChildError, orderly_termination
    from vllm_pyramid.tools.eval.haystack import load_tokens

    if not args.no_pictures and find_spec("matplotlib") is None:
        console.print("No pictures: they need matplotlib (pip install -e '.\\[dev]').")
        args.no_pictures = True
    check_writable(args.out, (args.out / "samples.jsonl", args.json, args.csv, args.markdown))
    tokens = load_tokens(_model(args))
    settings = _settings(args, tokens.can_chat)
    try:
        evaluation = Run(settings, tokens)
    except RuntimeError as error:  # a Python without the texts
        raise ValueError(str(error)) from error
    with closing(Store(args.out / "samples.jsonl", fresh=args.fresh)) as store:
        missing = sum(map(len, evaluation.missing(store).values()))
        console.print(
            f"{len(evaluation.jobs):,} prompts for {settings.model}: {missing:,} to run, the "
            f"others are in {args.out}.",
            highlight=False,
            soft_wrap=True,
        )
        try:
            with orderly_termination(), Progress(console, missing) as progress:
                evaluation.execute(store, progress.stage, progress.advance)
        except ChildError as error:
            raise ValueError(str(error)) from error
        except KeyboardInterrupt:
            console.print(f"Interrupted. The same command continues from {args.out}.")
            return 130
        answers = list(evaluation.answers(store))
    _write(console, args, answers)
    return 0


def _model(args: argparse.Namespace) -> str:
    """Return the folder or name of the model."""
    from vllm_pyramid.tools.demo import model_path

    if args.model is None:
        return str(model_path())
    return str(model_folder(args.model)) if args.model in MODELS else str(args.model)


def _settings(args: argparse.Namespace, can_chat: bool) -> Settings:
    from lab.eval.registry import GENERATED, load_task
    from lab.eval.run import Settings
    from lab.eval.variants import parse_variants

    if args.max_prompt is not None and args.max_prompt < 64:
        raise ValueError(f"--max-prompt must be at least 64 tokens, not {args.max_prompt}")
    if args.max_answer is not None and args.max_answer < 1:
        raise ValueError(f"--max-answer must be at least 1 token, not {args.max_answer}")
    of_lm_eval = _tasks_of_lm_eval(args)
    given = args.tasks or ("" if of_lm_eval else "all")
    possible = [name for name, task in GENERATED.items() if can_chat or not task.needs_chat]
    generated = possible if given == "all" else names(given, "--tasks") if given else ()
    return Settings(
        model=_model(args),
        policies=parse_variants(args.policies, "--policies"),
        budgets=names(args.budgets, "--budgets"),
        tasks=(*map(load_task, generated), *of_lm_eval),
        lengths=numbers(args.lengths, "--lengths", 64),
        samples=args.samples,
        seeds=numbers(args.seeds, "--seeds", 0),
        engine_args=parse_engine_args(args.engine_args),
        max_prompt=args.max_prompt,
    )


def _tasks_of_lm_eval(args: argparse.Namespace) -> Sequence[Task]:
    if not (args.lm_eval or args.longbench or args.ruler):
        return ()
    if find_spec("lm_eval") is None:
        raise ValueError("--lm-eval, --longbench and --ruler need lm-eval: pip install -e '.[dev]'")
    from lab.eval.lm_eval_tasks import load_tasks, longbench_tasks, ruler_tasks

    tasks = [
        *load_tasks(args.lm_eval, chat=args.chat, max_answer=args.max_answer),
        *longbench_tasks(args.longbench, chat=args.chat),
        *ruler_tasks(args.ruler),
    ]
    seen = [(task.name, *task.lengths(())) for task in tasks]
    if twice := [name for name, *length in seen if seen.count((name, *length)) > 1]:
        raise ValueError(f"the task {twice[0]!r} is given twice: give one of the files")
    return tasks


def _write(console: Any, args: argparse.Namespace, answers: Sequence[Answer]) -> None:
    """Write the results to all files that are wanted, and show the tables."""
    from lab.eval.tables import as_json, as_markdown, rows_of, tables
    from lab.eval.task import DIGITS_METRIC

    rows = rows_of(answers)
    about = {
        "version": vllm_pyramid.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": "built-in" if args.model is None else args.model,
        "command": _command(args),
    }
    as_csv = rows.to_csv(index=False)
    for path, text in (
        (args.out / "results.json", as_json(rows, about)),
        (args.json, as_json(rows, about)),
        (args.out / "results.csv", as_csv),
        (args.csv, as_csv),
        (args.markdown, as_markdown(rows)),
    ):
        if path is not None:
            path.write_text(text, encoding="utf-8")
    for table in tables(rows):
        console.print(table)
    if (rows["metric"] == DIGITS_METRIC).any():
        console.print(_ABOUT_DIGITS, highlight=False)
    written = ["results.json", "results.csv"]
    if not args.no_pictures:
        from lab.eval.pictures import draw

        written += [path.name for path in draw(answers, rows, args.out)]
    console.print(f"In {args.out}: {', '.join(written)}.", highlight=False, soft_wrap=True)


def _command(args: argparse.Namespace) -> str:
    """Return the command that makes the same rows."""
    words = ["python", "-m", "lab.eval"]
    for name in _REPEATED:
        value = getattr(args, name)
        if value not in (None, False, []):
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


def _list(console: Any) -> int:
    from rich.table import Table

    from lab.eval.registry import GENERATED

    table = Table("name", "what it asks", "score", title="Tasks of lab.eval")
    for task in GENERATED.values():
        table.add_row(task.name, task.summary, task.metric)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
