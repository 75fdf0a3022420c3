# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid demo`, or `make demo`: one prompt of real text with three policies.

A fact is hidden in the text and asked for at its end. For each policy: the answer, how many tokens
every layer keeps, how many blocks the request holds before and after the eviction, and the speed.
All numbers are the engine's own; where the engine does not report them, the demonstration fails.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_pyramid.child_process import ChildError, orderly_termination, run_child
from vllm_pyramid.demo import model_path
from vllm_pyramid.demo.worker import Answer, Task
from vllm_pyramid.eval.haystack import load_tokens
from vllm_pyramid.eval.phrases import FACTS
from vllm_pyramid.eval.task import begins_with
from vllm_pyramid.eval.words import make_name, make_number

POLICIES = ("full", "streaming-llm", "pyramidkv")
FULL = "full"
# The number asked for has five tokens, and the prompt's last query looks at the first: the pooling
# of the scores must reach over all of them (docs/quality.md).
POLICY_ARGS = {"pyramidkv": {"kernel_size": 11}}
SEED = 0
DEPTH = 0.4  # of the hidden fact: beyond the reach of a policy that keeps what is recent
BAR_WIDTH = 40


def build_prompt(model: Path, tokens: int) -> tuple[str, str]:
    """Real text of at most `tokens` tokens with a fact in it and a question, and the right answer.

    Raises:
        ValueError: `tokens` is too small for the question, or the model has no tokenizer.
    """
    rng = random.Random(SEED)
    name, number = make_name(rng, held_out=True), make_number(rng, held_out=True)
    fact = FACTS["code"]
    question = fact.question(name).prompt
    text = load_tokens(model).hide(rng, [fact.state(name, number)], question, tokens, [DEPTH])
    return text, number


def run_policy(task: Task, on_stage: Callable[[str], None]) -> Answer:
    """Run one task in a process of its own; `on_stage` hears what it is doing.

    Raises:
        ChildError: the process failed (with the end of its log) or gave no answer.
    """
    what = f"the run with {task.kv_policy!r}"
    module, offline = "vllm_pyramid.demo.worker", Path(task.model).is_dir()
    for message in run_child(module, asdict(task), what, offline=offline):
        if "answer" in message:
            return Answer(**message["answer"])
        on_stage(f"{task.kv_policy}: {message['stage']}")
    raise ChildError(f"{what} ended without an answer")


def show(console: Console, answer: Answer, kv_budget: str | None, right: str) -> None:
    """Print one policy's answer, bars, blocks and speed."""
    title = answer.kv_policy if kv_budget is None else f"{answer.kv_policy}, budget {kv_budget}"
    console.rule(f"[bold]{escape(title)}")
    verdict = "[green]right" if begins_with(answer.text, right) else f"[red]wrong: it is {right}"
    console.print(Panel(escape(_printable(answer.text)), title=f"answer ({verdict}[/])", width=80))
    bars = Table(box=None, pad_edge=False)
    bars.add_column("layer", justify="right")
    bars.add_column("kept", justify="right")
    bars.add_column(f"of {answer.prompt_tokens:,} tokens, newest on the right", no_wrap=True)
    for layer, kept in enumerate(answer.kept_tokens):
        bars.add_row(str(layer), f"{kept:,}", bar(kept, answer.prompt_tokens))
    console.print(bars)
    layers = len(answer.kept_tokens)
    share = sum(answer.kept_tokens) / (layers * answer.prompt_tokens)
    console.print(
        f"tokens evicted  {answer.evicted_tokens:,} over {layers} layers ({share:.1%} kept)\n"
        f"blocks held     {answer.blocks_before:,} before, {answer.blocks_after:,} after "
        f"({answer.blocks_before - answer.blocks_after:,} given back)\n"
        f"speed           {answer.decode_tokens_per_second:,.1f} tokens/s, one request, after a "
        f"prefill of {answer.prefill_seconds:.2f} s\n"
    )


def bar(kept: int, total: int, width: int = BAR_WIDTH) -> str:
    """`kept` of `total` as a right-aligned bar of `width` characters; never empty if kept > 0."""
    filled = max(1, round(width * kept / total)) if kept else 0
    return f"[dim]{'·' * (width - filled)}[/dim][cyan]{'█' * filled}[/cyan]"


def _printable(text: str) -> str:
    """The first line, without control characters, which would disturb the terminal."""
    text = text.strip().split("\n")[0]
    return "".join(char if char.isprintable() else " " for char in text).strip() or "(nothing)"


@contextmanager
def _progress(console: Console, total: int) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar_id = progress.add_task("starting", total=total)
        yield progress, lambda text: progress.update(bar_id, description=text)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm-pyramid demo", description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder with a model (default: the built-in)")
    parser.add_argument("--kv-budget", default="12%", help="tokens or per cent (default: 12%%)")
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args(argv)
    if args.max_tokens < 2:
        parser.error("--max-tokens must be at least 2: the speed is that of the tokens after one")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m vllm_pyramid.demo`; returns the exit status."""
    args = parse_args(argv)
    console = Console()
    try:
        model = args.model or model_path()
        prompt, right = build_prompt(model, args.prompt_tokens)
    except (OSError, RuntimeError, ValueError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        return 1
    console.print(
        f"A fact is hidden in {args.prompt_tokens:,} tokens of Python's documentation and asked "
        f"for at the end: {len(POLICIES)} policies, each in an engine of its own.\n"
        f"Model: {'the built-in one' if args.model is None else escape(str(model))}\n"
    )
    answers: list[Answer] = []
    with orderly_termination(), _progress(console, len(POLICIES)) as (progress, say):
        for policy in POLICIES:
            kv_budget = None if policy == FULL else args.kv_budget
            task = Task(
                model=str(model),
                prompt=prompt,
                max_tokens=args.max_tokens,
                max_model_len=args.prompt_tokens + args.max_tokens + 64,
                kv_policy=policy,
                kv_budget=kv_budget,
                kv_policy_args=POLICY_ARGS.get(policy, {}),
            )
            try:
                answer = run_policy(task, say)
            except ChildError as error:
                progress.stop()
                console.print(f"[red]error:[/red] {escape(str(error))}")
                return 1
            answers.append(answer)
            show(console, answer, kv_budget, right)
            progress.advance(progress.task_ids[0])
    _summary(console, answers, right)
    return 0


def _summary(console: Console, answers: Sequence[Answer], right: str) -> None:
    table = Table(title="In short")
    table.add_column("policy")
    for heading in ("answer", "tokens per layer, first to last", "blocks", "tokens/s"):
        table.add_column(heading, justify="right")
    for answer in answers:
        kept = answer.kept_tokens
        table.add_row(
            answer.kv_policy,
            "right" if begins_with(answer.text, right) else "wrong",
            f"{kept[0]:,} … {kept[-1]:,}",
            f"{answer.blocks_before:,} → {answer.blocks_after:,}",
            f"{answer.decode_tokens_per_second:,.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
