# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.certified`: the smallest budget that hardly disagrees with the whole cache.

The engine answers each prompt with the whole cache, then decodes that answer again with every
budget. The loss of a prompt is the share of the answer's tokens behind the first that another
token would have been the likeliest one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.certified.groups import (
    Finding,
    Prompt,
    check_enough,
    find_budget,
    group_prompts,
)
from lab.certified.risk import Losses
from vllm_pyramid.compat.versions import WrongVLLMError, check_vllm
from vllm_pyramid.frontend.setting_values import parse_policy_args
from vllm_pyramid.policy import AUTO, DEFAULT_MIN_TOKENS, Budget, Policy, load_policy
from vllm_pyramid.policy.limits import MAX_NAME
from vllm_pyramid.tools.calibrate import checked_output, read_prompts
from vllm_pyramid.tools.command_parts import (
    Progress,
    names,
    numbers,
    parse_engine_args,
)

BUDGETS = "75%,50%,35%,25%,18%,12%,9%,6%"
CONFIDENCE = 0.9
ANSWER_TOKENS = 64


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab.certified",
        description="Finds the smallest budget that hardly disagrees with the whole cache: "
        "lab/certified/README.md.",
    )
    parser.add_argument("--model", required=True, help="folder, or a Hugging Face name")
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE.jsonl",
        help='one JSON object a line, with "prompt" (text) or "prompt_token_ids"',
    )
    parser.add_argument("--kv-policy", help="a policy that evicts (default auto)")
    parser.add_argument("--kv-policy-args", help="JSON, for example '{\"window\": 16}'")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.yaml", help="the policy")
    parser.add_argument(
        "--engine-args",
        metavar="JSON",
        help="further arguments of vllm_pyramid.LLM, for example '{\"max_model_len\": 8192}'",
    )
    parser.add_argument(
        "--risk",
        type=float,
        required=True,
        metavar="R",
        help="look for the smallest budget with which a share of at most R of the answer's tokens "
        "differs from the whole cache's, such as 0.02",
    )
    parser.add_argument(
        "--confidence", type=float, metavar="C", help=f"of that statement (default {CONFIDENCE:g})"
    )
    parser.add_argument(
        "--budgets",
        metavar="P%%,P%%,...",
        help=f"to be tested (default {BUDGETS})".replace("%", "%%"),
    )
    parser.add_argument(
        "--lengths", metavar="N,N,...", help="groups of prompts: up to N tokens each, and longer"
    )
    parser.add_argument(
        "--answer-tokens", type=int, metavar="N", help=f"of an answer (default {ANSWER_TOKENS})"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 on success, 2 on wrong input, which one line explains."""
    args = _parser().parse_args(argv)
    try:
        check_vllm()
        return run(args, read_prompts(Path(args.prompts)), checked_output(args.output))
    except (ValueError, WrongVLLMError) as error:
        print(f"lab.certified: error: {error}", file=sys.stderr)
        return 2


def parse_budgets(text: str) -> tuple[str, ...]:
    """Parse the budgets to be tested; return them from the largest down.

    Raises:
        ValueError: a budget cannot be read, or numbers of tokens and shares are mixed.
    """
    budgets = {Budget.parse(name) for name in names(text, "--budgets")}
    if len({budget.tokens is None for budget in budgets}) > 1:
        raise ValueError(
            f"--budgets {text!r} mixes numbers of tokens and shares of prompts, which have no order"
        )
    ordered = sorted(budgets, key=lambda budget: budget.tokens or budget.percent or 0, reverse=True)
    return tuple(str(budget) for budget in ordered)


def read_applications(path: Path) -> list[str]:
    """Return the application that each line of a file of prompts names; empty for none.

    The lines have been read as prompts.

    Raises:
        ValueError: a line names something else than a text.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            name = json.loads(line).get("application", "")
            if not isinstance(name, str) or len(name) > MAX_NAME:
                raise ValueError(
                    f'{path}, line {number}: "application" must be a text of at most {MAX_NAME} '
                    "characters"
                )
            found.append(name)
    return found


def measure(
    model: str,
    policy: Policy,
    args: Mapping[str, Any],
    prompts: Sequence[Prompt],
    budgets: Sequence[str],
    answer_tokens: int,
    engine_args: Mapping[str, Any],
    on_stage: Callable[[str], None],
    on_result: Callable[[], None],
) -> Losses:
    """Return the losses, `[budgets, prompts]`; two engines run, each in its process.

    Args:
        policy: with its floor. args: changes to its preset, the floor among them.

    Raises:
        ChildError: an engine failed.
    """
    from vllm_pyramid.tools.eval.compare import compare

    results = compare(
        model,
        str(args["kv_policy"]),
        args["kv_policy_args"],
        policy.name,
        [prompt.token_ids for prompt in prompts],
        budgets,
        answer_tokens,
        engine_args,
        on_stage,
        on_result,
    )
    agreement = np.array([[result.agreement for result in of_budget] for of_budget in results])
    losses: Losses = 1 - agreement.astype(np.float64)
    return losses


def policy_text(
    policy: Policy, findings: Sequence[Finding], name: str, risk: float, confidence: float
) -> str:
    """Return the policy with the largest of the groups' budgets, which holds for all of them."""
    import yaml

    budgets = [finding.budget for finding in findings]
    assert all(budget is not None for budget in budgets)
    largest = parse_budgets(",".join(map(str, budgets)))[0]
    data = policy.model_dump(exclude_none=True)
    data |= {"name": name, "budget": largest}
    data["description"] = f"{policy.name}, with a certified budget"
    lines = [
        f"# Made by `python -m lab.certified --risk {risk:g} --confidence {confidence:g}`: over",
        "# all prompts like those given, at most that share of the answers' tokens differs from",
        "# the whole cache's. Each group's own budget, which a request may ask for with kv_budget:",
    ]
    for finding in findings:
        loss = finding.losses[str(finding.budget)]
        lines.append(
            f"#   {finding.group}: {finding.budget} ({finding.prompts} prompts, {loss:.4f} differ)"
        )
    text = str(yaml.safe_dump(data, sort_keys=False, width=96, default_flow_style=None))
    return "\n".join(lines) + "\n" + text


def show(console: Any, findings: Sequence[Finding], risk: float, confidence: float) -> None:
    """Print what was found for each group."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"At most {risk:g} of the tokens differ, with a confidence of {confidence:g} each",
        box=box.SIMPLE_HEAD,
    )
    for column in ("prompts", "number", "budget", "differ, by budget"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        tested = ", ".join(f"{budget} {loss:.4f}" for budget, loss in finding.losses.items())
        budget = finding.budget or "none"
        table.add_row(str(finding.group), str(finding.prompts), budget, tested)
    console.print(table)


def run(args: argparse.Namespace, prompts: list[dict[str, Any]], output: Path) -> int:
    """Find and write the budgets; returns 0 on success.

    Args:
        prompts: of the file, as vLLM takes them.

    Raises:
        ValueError: a wrong flag, too few prompts, or no certified budget for some of them.
    """
    from rich.console import Console

    from vllm_pyramid.tools.child_process import ChildError, orderly_termination

    confidence = CONFIDENCE if args.confidence is None else args.confidence
    answer_tokens = ANSWER_TOKENS if args.answer_tokens is None else args.answer_tokens
    if not 0 < args.risk < 1 or not 0 < confidence < 1:
        raise ValueError(
            f"--risk {args.risk:g} and --confidence {confidence:g} must lie between 0 and 1"
        )
    if answer_tokens < 2:
        raise ValueError(
            f"--answer-tokens {answer_tokens}: the first token is the whole cache's, so answers "
            "need at least two"
        )
    budgets = parse_budgets(args.budgets or BUDGETS)
    name, changes = args.kv_policy or AUTO, parse_policy_args(args.kv_policy_args)
    policy = load_policy(name, None, changes)
    if not policy.has_budget:
        raise ValueError(f"policy {name!r} has none: there is no budget to look for")
    if policy.min_tokens is None:  # what a server adds
        changes = {**changes, "min_tokens": DEFAULT_MIN_TOKENS}
    for budget in budgets:
        policy = load_policy(name, budget, changes)
    engine_args = parse_engine_args(args.engine_args)
    from vllm_pyramid.tools.eval.haystack import encoded

    applications = read_applications(Path(args.prompts))
    ids = encoded(args.model, prompts)
    given = [Prompt(*one) for one in zip(ids, applications, strict=True)]
    groups = group_prompts(given, numbers(args.lengths, "--lengths", 1) if args.lengths else ())
    check_enough(groups, args.risk, confidence)

    console = Console()
    try:
        with orderly_termination(), Progress(console, len(given) * (1 + len(budgets))) as progress:
            losses = measure(
                args.model,
                policy,
                {"kv_policy": name, "kv_policy_args": changes},
                given,
                budgets,
                answer_tokens,
                engine_args,
                progress.stage,
                progress.advance,
            )
    except ChildError as error:
        raise ValueError(str(error)) from error
    findings = [
        find_budget(group, losses[:, indices], budgets, args.risk, confidence)
        for group, indices in groups.items()
    ]
    show(console, findings, args.risk, confidence)
    failed = [f"{finding.group}: {finding.reason}" for finding in findings if finding.reason]
    if failed:
        raise ValueError(f"no policy was written; {'; '.join(failed)}")
    output.write_text(
        policy_text(policy, findings, output.stem, args.risk, confidence), encoding="utf-8"
    )
    console.print(f"{output}: use it with --kv-policy {output}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
