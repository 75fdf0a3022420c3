# SPDX-License-Identifier: Apache-2.0
"""What `make demo` runs: one prompt of real text through the engine with three policies.

For each policy: the answer, how many tokens every layer keeps, how many blocks the request holds
before and after the eviction, and the speed. All numbers are the engine's own; where the engine
does not report them, the demonstration fails. The built-in model is UNTRAINED, so that the answers
are noise: what can be seen is that memory really comes back, not quality.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_pyramid.demo import model_path
from vllm_pyramid.demo.text import prompt_text
from vllm_pyramid.demo.worker import MARK, Answer, Task

POLICIES = ("full", "streaming-llm", "pyramidkv")
FULL = "full"
QUESTION = "\n\nQuestion: what does the text above say about exceptions?\nAnswer:"
BAR_WIDTH = 40
# The end of a failed process's log that is shown; the reason stands in the last lines.
LOG_TAIL_LINES = 25


class DemoError(RuntimeError):
    """A run of the demonstration failed; the message is for the user."""


def build_prompt(model: Path, tokens: int) -> str:
    """Real text of about `tokens` tokens of this model's tokenizer, with a question at its end.

    Raises:
        ValueError: `tokens` is too small for the question, or larger than the text.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    question = len(tokenizer.encode(QUESTION, add_special_tokens=False).ids)
    document = tokenizer.encode(prompt_text(), add_special_tokens=False)
    room = tokens - question - 1  # one token is <|begin|>
    if not 0 < room <= len(document.ids):
        raise ValueError(
            f"the prompt can have {question + 2} to {question + 1 + len(document.ids)} tokens, "
            f"not {tokens}"
        )
    # Cut the text, not the tokens: the offsets say where token number `room` ends.
    return prompt_text()[: document.offsets[room - 1][1]] + QUESTION


def run_policy(task: Task, on_stage: Callable[[str], None]) -> Answer:
    """Run one task in a process of its own; `on_stage` hears what it is doing.

    Raises:
        DemoError: the process failed (with the end of its log) or gave no answer.
    """
    environment = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **os.environ,
    }
    answer: Answer | None = None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_pyramid.demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,  # a process group of its own, with the engine's processes
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            # A process that dies before it reads must be reported with its log, not as a broken
            # pipe.
            with suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(json.dumps(asdict(task)))
            for line in process.stdout:
                if line.startswith(MARK):
                    message = json.loads(line.removeprefix(MARK))
                    if "stage" in message:
                        on_stage(f"{task.kv_policy}: {message['stage']}")
                    else:
                        answer = Answer(**message["answer"])
            status = process.wait()
        finally:
            _end_group(process)
        log.seek(0)
        tail = "".join(log.readlines()[-LOG_TAIL_LINES:])
    if status != 0 or answer is None:
        raise DemoError(
            f"the run with {task.kv_policy!r} failed with exit status {status}; its log ends:\n\n"
            f"{tail}"
        )
    return answer


def _end_group(process: subprocess.Popen[str]) -> None:
    """End the worker and every process it started, also after an interruption."""
    for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        if process.poll() is not None and sign == signal.SIGTERM:
            continue  # it has ended: only what it left behind is to be killed
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)


def show(console: Console, answer: Answer, kv_budget: str | None) -> None:
    """Print one policy's answer, bars, blocks and speed."""
    title = answer.kv_policy if kv_budget is None else f"{answer.kv_policy}, budget {kv_budget}"
    console.rule(f"[bold]{escape(title)}")
    console.print(
        Panel(escape(_printable(answer.text)), title="answer (untrained model: noise)", width=80)
    )
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
    """Noise may hold control characters, which would disturb the terminal."""
    return "".join(char if char.isprintable() else " " for char in text).strip() or "(nothing)"


@contextmanager
def _orderly_termination() -> Iterator[None]:
    """Let SIGTERM unwind the stack: otherwise it would leave the engine's processes behind."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


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
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder with a model (default: the built-in)")
    parser.add_argument("--kv-budget", default="12%", help="tokens or per cent (default: 12%%)")
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--max-tokens", type=int, default=48)
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
        prompt = build_prompt(model, args.prompt_tokens)
    except (OSError, RuntimeError, ValueError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        return 1
    console.print(
        f"One prompt of about {args.prompt_tokens:,} tokens of Python's documentation, "
        f"{len(POLICIES)} policies, each in an engine of its own.\n"
        "[yellow]The built-in model is untrained: its words are noise.[/yellow] Look at the tokens "
        "and blocks that each layer holds.\n"
        if args.model is None
        else f"Model: {escape(str(model))}\n"
    )
    answers: list[Answer] = []
    with _orderly_termination(), _progress(console, len(POLICIES)) as (progress, say):
        for policy in POLICIES:
            kv_budget = None if policy == FULL else args.kv_budget
            task = Task(
                model=str(model),
                prompt=prompt,
                max_tokens=args.max_tokens,
                max_model_len=args.prompt_tokens + args.max_tokens + 64,
                kv_policy=policy,
                kv_budget=kv_budget,
            )
            try:
                answer = run_policy(task, say)
            except DemoError as error:
                progress.stop()
                console.print(f"[red]error:[/red] {escape(str(error))}")
                return 1
            answers.append(answer)
            show(console, answer, kv_budget)
            progress.advance(progress.task_ids[0])
    _summary(console, answers)
    return 0


def _summary(console: Console, answers: Sequence[Answer]) -> None:
    table = Table(title="In short")
    table.add_column("policy")
    for heading in ("tokens per layer, first to last", "blocks", "tokens/s"):
        table.add_column(heading, justify="right")
    for answer in answers:
        kept = answer.kept_tokens
        table.add_row(
            answer.kv_policy,
            f"{kept[0]:,} … {kept[-1]:,}",
            f"{answer.blocks_before:,} → {answer.blocks_after:,}",
            f"{answer.decode_tokens_per_second:,.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
