# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid demo`, or `make demo`: run one prompt of real text with three policies.

A fact is hidden in the text and asked for at its end. All numbers are the engine's own; where it
does not report them, or did not evict, the demonstration fails. An engine of any policy serves
requests that keep everything, so two engines are enough.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from vllm_pyramid.policy import RECOMMENDED
from vllm_pyramid.tools.child_process import ChildError, orderly_termination
from vllm_pyramid.tools.command_parts import Progress
from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.eval.engine import Request, Work, answer_all
from vllm_pyramid.tools.eval.haystack import load_tokens
from vllm_pyramid.tools.eval.phrases import CODE, begins_with, make_name, make_number
from vllm_pyramid.tools.eval.result import Result

FULL = "full"  # evicts nothing
# The policies of each engine's requests. An engine runs the last one, its requests one at a time.
ENGINES = ((FULL, "streaming-llm"), (RECOMMENDED,))
SEED = 0
DEPTH = 0.4  # of the hidden fact: beyond the reach of a policy that keeps what is recent
BAR_WIDTH = 40


def build_prompt(model: Path, tokens: int) -> tuple[str, str]:
    """Return text of at most `tokens` tokens with a fact and a question, and the right answer.

    ValueError: `tokens` is too small for the question, or the model has no tokenizer.
    """
    rng = random.Random(SEED)
    name, number = make_name(rng, held_out=True), make_number(rng, held_out=True)
    fact, question = CODE.state(name, number), CODE.question(name).prompt
    return load_tokens(model).hide(rng, [fact], question, tokens, [DEPTH]), number


def work_of(
    model: Path, prompt: str, max_tokens: int, policies: Sequence[str], budget: str
) -> Work:
    """Return what an engine of the last of `policies` is to do: a request for each of them."""
    ids = load_tokens(model).encode(prompt)
    served = policies[-1]
    requests = [
        Request(
            key=policy,
            prompt_token_ids=ids,
            budget=None if policy == FULL else budget,
            policy=None if policy == served else policy,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        for policy in policies
    ]
    return Work(
        label=served,
        model=str(model),
        kv_policy=served,
        kv_policy_args={},
        policy_name=served,
        engine_args={
            "max_model_len": len(ids) + max_tokens + 64,
            "max_num_seqs": 4,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 256 << 20,
            "disable_log_stats": False,  # the time stamps come with the statistics
        },
        requests=requests,
        batch=1,
        timed=True,
    )


def run_engine(work: Work, on_stage: Callable[[str], None]) -> Iterator[tuple[str, Result]]:
    """Run an engine in a process, and yield each policy and its result.

    ChildError: the process failed (with the end of its log), gave no answer, or its engine evicted
    nothing although the policy has a budget.
    """
    missing = {request.key: request.budget for request in work.requests}
    with closing(answer_all(work, on_stage)) as results:
        for policy, result in results:
            budget = missing.pop(policy)
            if budget is not None and not result.eviction.evicted_tokens:
                raise ChildError(f"the engine with {policy!r} evicted nothing at budget {budget}")
            yield policy, result
    if missing:
        raise ChildError(f"the engine with {work.label!r} ended without an answer")


def show(console: Console, policy: str, result: Result, kv_budget: str | None, right: str) -> None:
    """Print one policy's answer, bars, blocks and speed."""
    eviction = result.eviction
    title = policy if kv_budget is None else f"{policy}, budget {kv_budget}"
    console.rule(f"[bold]{escape(title)}")
    verdict = "[green]right" if begins_with(result.text, right) else f"[red]wrong: it is {right}"
    console.print(Panel(escape(_printable(result.text)), title=f"answer ({verdict}[/])", width=80))
    bars = Table(box=None, pad_edge=False)
    bars.add_column("layer", justify="right")
    bars.add_column("kept", justify="right")
    bars.add_column(f"of {eviction.prompt_tokens:,} tokens, newest on the right", no_wrap=True)
    for layer, kept in enumerate(eviction.kept_tokens):
        bars.add_row(str(layer), f"{kept:,}", bar(kept, eviction.prompt_tokens))
    console.print(bars)
    layers = len(eviction.kept_tokens)
    share = sum(eviction.kept_tokens) / (layers * eviction.prompt_tokens)
    console.print(
        f"tokens evicted  {eviction.evicted_tokens:,} over {layers} layers ({share:.1%} kept)\n"
        f"blocks held     {eviction.blocks_before:,} before, {eviction.blocks_after:,} after "
        f"({eviction.blocks_before - eviction.blocks_after:,} given back)\n"
        f"speed           {result.decode_tokens_per_second:,.1f} tokens/s, one request, after a "
        f"prefill of {result.prefill_seconds:.2f} s\n"
    )


def bar(kept: int, total: int, width: int = BAR_WIDTH) -> str:
    """Draw `kept` of `total` as a right-aligned bar of `width`; never empty if kept > 0."""
    filled = max(1, round(width * kept / total)) if kept else 0
    return f"[dim]{'·' * (width - filled)}[/dim][cyan]{'█' * filled}[/cyan]"


def _printable(text: str) -> str:
    """Return the first line, without control characters, which would disturb the terminal."""
    text = text.strip().split("\n")[0]
    return "".join(char if char.isprintable() else " " for char in text).strip() or "(nothing)"


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
    """Run `python -m vllm_pyramid.tools.demo`; return the exit status."""
    args = parse_args(argv)
    console = Console()
    results: dict[str, Result] = {}
    try:
        model = args.model or model_path()
        prompt, right = build_prompt(model, args.prompt_tokens)
        count = sum(map(len, ENGINES))
        console.print(
            f"A fact is hidden in {args.prompt_tokens:,} tokens of Python's documentation and "
            f"asked for at the end, with {count} policies, one after the other.\n"
            f"Model: {'the built-in one' if args.model is None else escape(str(model))}\n"
        )
        with orderly_termination(), Progress(console, count) as progress:
            for policies in ENGINES:
                work = work_of(model, prompt, args.max_tokens, policies, args.kv_budget)
                for policy, result in run_engine(work, progress.stage):
                    kv_budget = None if policy == FULL else args.kv_budget
                    show(console, policy, result, kv_budget, right)
                    results[policy] = result
                    progress.advance()
    except (OSError, RuntimeError, ValueError) as error:  # ChildError is a RuntimeError
        console.print(f"[red]error:[/red] {escape(str(error))}")
        return 1
    _summary(console, results, right)
    return 0


def _summary(console: Console, results: dict[str, Result], right: str) -> None:
    table = Table(title="In short")
    table.add_column("policy")
    for heading in ("answer", "tokens per layer, first to last", "blocks", "tokens/s"):
        table.add_column(heading, justify="right")
    for policy, result in results.items():
        answer = "right" if begins_with(result.text, right) else "wrong"
        kept, held = result.eviction.kept_tokens, result.eviction
        blocks = f"{held.blocks_before:,} → {held.blocks_after:,}"
        speed = f"{result.decode_tokens_per_second:,.1f}"
        table.add_row(policy, answer, f"{kept[0]:,} … {kept[-1]:,}", blocks, speed)
    console.print(table)
