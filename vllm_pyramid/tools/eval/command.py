# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid eval`: what a policy changes in the answers to your prompts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_pyramid.frontend.setting_values import parse_policy_args
from vllm_pyramid.policy import AUTO, DEFAULT_MIN_TOKENS, Policy, load_policy
from vllm_pyramid.tools.calibrate import read_prompts
from vllm_pyramid.tools.child_process import ChildError, orderly_termination
from vllm_pyramid.tools.command_parts import Progress, check_writable, names, parse_engine_args
from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.eval.compare import Row, compare, made_up_prompts, row_of
from vllm_pyramid.tools.eval.haystack import encoded, load_tokens


def add_command(commands: Any) -> None:
    """Add the sub-command to the parser of `vllm-pyramid`."""
    parser = commands.add_parser(
        "eval",
        help="measure how a policy changes the answers to your prompts",
        description="Answers prompts with the whole cache, decodes the same answers after a policy "
        "has evicted, and shows how many tokens stay the likeliest ones and how far the "
        "probabilities diverge. A budget that is cut is measured as a server cuts it.",
    )
    parser.add_argument(
        "--model", help="folder, or a Hugging Face name (default: the built-in model)"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help='one JSON object a line, with "prompt" (text) or "prompt_token_ids" (default: facts '
        "hidden in Python's documentation and asked for at the end)",
    )
    parser.add_argument("--kv-policy", default=AUTO, help="a preset or .yaml file (%(default)s)")
    parser.add_argument("--kv-policy-args", help="JSON, for example '{\"window\": 16}'")
    parser.add_argument(
        "--budgets", default="25%,12%", help="tokens or per cent, for a policy that has a budget "
        "(25%%,12%%)"
    )  # fmt: skip
    for name, default, text in (
        ("answer-tokens", 64, "most tokens of an answer"),
        ("num-prompts", 8, "without --prompts: their number"),
        ("prompt-tokens", 3000, "without --prompts: their length"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (%(default)s)")
    parser.add_argument("--engine-args", metavar="JSON", help="further arguments of LLM")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the sub-command; return 0 on success. ValueError: a wrong option, or an engine failed."""
    from rich.console import Console

    if args.answer_tokens < 2:
        raise ValueError(
            f"--answer-tokens {args.answer_tokens}: the first token comes from the prefill, so "
            "answers need at least two"
        )
    if args.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, not {args.num_prompts}")
    changes, policy, budgets = _policy(args)
    engine_args = parse_engine_args(args.engine_args)
    if args.json is not None:
        check_writable(args.json.parent, (args.json,))

    model = str(model_path()) if args.model is None else args.model
    prompts = _prompts(args, model)
    console = Console()
    total = len(prompts) * (1 + len(budgets))
    try:
        with orderly_termination(), Progress(console, total) as progress:
            results = compare(
                model,
                args.kv_policy,
                changes,
                policy.name,
                prompts,
                budgets,
                args.answer_tokens,
                engine_args,
                progress.stage,
                progress.advance,
            )
    except ChildError as error:
        raise ValueError(str(error)) from error
    rows = [row_of(budget, found) for budget, found in zip(budgets, results, strict=True)]
    _show(console, policy.name, rows, len(prompts))
    if args.json is not None:
        written = {
            "model": args.model or "built-in",
            "policy": policy.name,
            "prompts": len(prompts),
        }
        text = json.dumps({**written, "rows": list(map(asdict, rows))}, indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _policy(args: argparse.Namespace) -> tuple[dict[str, Any], Policy, Sequence[str | None]]:
    """Return the changes to the policy's preset, the policy, and its budgets.

    ValueError: see `load_policy`; or a budget does not suit the policy.
    """
    changes = parse_policy_args(args.kv_policy_args)
    policy = load_policy(args.kv_policy, None, changes)
    if not policy.has_budget:
        return changes, policy, [None]
    if policy.min_tokens is None:  # what a server adds
        changes = {**changes, "min_tokens": DEFAULT_MIN_TOKENS}
    budgets = names(args.budgets, "--budgets")
    for budget in budgets:
        policy = load_policy(args.kv_policy, budget, changes)
    return changes, policy, budgets


def _prompts(args: argparse.Namespace, model: str) -> list[list[int]]:
    """Return the prompts as tokens."""
    if args.prompts is None:
        try:
            return made_up_prompts(load_tokens(model), args.num_prompts, args.prompt_tokens)
        except RuntimeError as error:  # a Python without the texts
            raise ValueError(str(error)) from error
    return encoded(model, read_prompts(args.prompts))


def _show(console: Any, policy: str, rows: Sequence[Row], prompts: int) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{policy} against the whole cache, {prompts} prompts")
    for heading in ("budget", "tokens that agree", "worst prompt", "divergence, nats", "blocks"):
        table.add_column(heading, justify="right")
    for row in rows:
        shares = (f"{row.agreement:.1%}", f"{row.worst:.1%}", f"{row.divergence:.4f}")
        table.add_row(Text(row.budget or "none"), *shares, f"{row.memory:.1%}")
    console.print(table)
    console.print(
        "Agree: the answer's token is the likeliest one after eviction too. Divergence: mean of "
        "KL(whole cache || policy). Blocks: held after the eviction, of those before. The answers' "
        "first tokens, which come from the prefill, do not count.",
        highlight=False,
    )
