# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid calibrate --utility`: lengths of layers by what their tokens are worth later.

It needs Transformers and the model alone, no engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from vllm_pyramid.frontend.setting_values import parse_policy_args
from vllm_pyramid.methods.utility_profile import PERCENTS
from vllm_pyramid.policy import AUTO, Budget, Policy, load_policy
from vllm_pyramid.policy.allocator import Reals
from vllm_pyramid.tools.command_parts import Progress, refuse_unused
from vllm_pyramid.tools.heads.command import token_ids
from vllm_pyramid.tools.utility.profile import relative, retained, rows_of

HORIZON = 64
SHORTEST = 100  # tokens that may be dropped, of a prompt: one for each whole percent
# Flags that belong to --utility alone, and those that do not go with it.
OWN_FLAGS = ("horizon", "relative")
_OTHERS = ("picture", "engine_args")
_BLOCK = 16  # tokens of a cache block, as most engines have; lengths do not depend on it
_TOLD = (6, 12, 25)  # budgets in percent that the report compares


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of profiles to the parser of `calibrate`."""
    group = parser.add_argument_group("profiles of utility", "docs/policies.md, LU-KV")
    group.add_argument(
        "--utility",
        action="store_true",
        default=None,
        help="measure what the tokens of each layer are worth to the model's own answers, and "
        "divide budgets by that; --kv-policy is the one whose scorer evicts (auto)",
    )
    group.add_argument(
        "--horizon", type=int, metavar="N", help=f"tokens of an answer (default {HORIZON})"
    )
    group.add_argument(
        "--relative",
        action="store_true",
        default=None,
        help="count a layer's utilities as shares of their sum, so that layers with small outputs "
        "count as much as others",
    )


def check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that would have no effect, and an answer without tokens.

    Raises:
        ValueError: naming them.
    """
    refuse_unused(args, "--utility", OWN_FLAGS, _OTHERS)
    if args.horizon is not None and args.horizon < 1:
        raise ValueError(f"--horizon {args.horizon} must be at least 1")


def check_policy(policy: Policy) -> None:
    """Raise ValueError unless the tokens of a layer that stay are the best of its scorer."""
    reason = None
    if not policy.evicts:
        reason = "keeps every token"
    elif policy.allocator.thins_prompts or policy.scorer.gathers(policy):
        reason = "scores in every step, and a profile is made of scores at a prompt's end"
    elif policy.selector.kind != "top_k" or policy.selector.recent_share:
        reason = "does not take each head's best-scored tokens (selector top_k)"
    if reason is not None:
        raise ValueError(f"policy {policy.name!r} {reason}: choose another one, such as {AUTO}")


def with_profile(policy: Policy, rows: Reals, model: str) -> Policy:
    """Return the policy with a profile for its allocator.

    Args:
        rows: `[99, layers]`. model: its sizes in words.

    Raises:
        ValueError: a part of the policy does not go with the allocator.
    """
    # Exact enough for any prompt, and short enough to be read.
    keep = tuple(tuple(round(float(share), 4) for share in row) for row in rows)
    allocator = {"kind": "utility", "keep": keep, "model": model}
    try:
        return policy.model_copy(update={"allocator": allocator})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]["msg"]
        raise ValueError(first.removeprefix("Value error, ")) from None


def policy_text(
    policy: Policy, name: str, source: str, prompts: int, horizon: int, relative: bool
) -> str:
    """Return the file of a policy with a profile."""
    import yaml

    own = " --relative" if relative else ""

    data = policy.model_dump(mode="json", exclude_none=True)
    data["name"] = name
    data["description"] = f"{policy.name}, lengths of layers by utility over {prompts} prompts"
    head = (
        f"# Made by `vllm-pyramid calibrate --utility{own} --horizon {horizon}` of {source}:\n"
        f"# for budgets of 1 to {PERCENTS} %, the share of its tokens beyond window and sinks that "
        f"each layer\n# keeps, mean over {prompts} prompts.\n"
    )
    return head + str(yaml.safe_dump(data, sort_keys=False, width=96, default_flow_style=None))


def run(args: argparse.Namespace, prompts: Sequence[Mapping[str, Any]], output: Path) -> int:
    """Measure and write a profile; returns 0.

    Args:
        prompts: of the file, with `prompt` or `prompt_token_ids` each.

    Raises:
        ValueError: the policy, the model or a prompt does not fit.
    """
    from rich.console import Console

    from vllm_pyramid.tools.utility.model import UtilityModel

    horizon = HORIZON if args.horizon is None else args.horizon
    name = args.kv_policy or AUTO
    policy = load_policy(name, args.kv_budget, parse_policy_args(args.kv_policy_args))
    check_policy(policy)
    with_profile(policy, np.arange(1, PERCENTS + 1)[:, None] / 100, "any")
    texts = token_ids(args.model, prompts)
    least = policy.window + policy.sinks + SHORTEST
    if short := [i for i, ids in enumerate(texts, start=1) if len(ids) < least]:
        raise ValueError(
            f"prompt {short[0]} has {len(texts[short[0] - 1])} tokens: a profile of policy "
            f"{name!r} needs at least {least}"
        )
    model = UtilityModel(args.model)
    longest = max(map(len, texts)) + horizon
    if longest > model.longest:
        raise ValueError(
            f"a prompt and its answer of --horizon {horizon} have {longest} tokens, and the model "
            f"has {model.longest} positions: take shorter ones"
        )
    model.prepare(policy)
    console = Console()
    gains, rows = [], []
    with Progress(console, len(texts)) as progress:
        progress.stage("prompts")
        for ids in texts:
            own = model.gains(ids, policy, horizon)
            gains.append(relative(own) if args.relative else own)
            rows.append(rows_of(gains[-1]))
            progress.advance()
    made = with_profile(policy, np.mean(rows, axis=0), model.shape)
    about = args.model, len(texts), horizon, bool(args.relative)
    text = policy_text(made, output.stem, *about)
    output.write_text(text, encoding="utf-8")
    for line in report(made, gains, rows, str(output)):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def report(made: Policy, gains: Sequence[Reals], rows: Sequence[Reals], output: str) -> list[str]:
    """Return the lines that the command prints.

    Args:
        made: the policy with the profile. gains: `[layers, C]` of each prompt.
        rows: `[99, layers]`, each prompt's own.
    """
    layers, fixed = len(gains[0]), made.window + made.sinks
    lines = [
        f"{output}: a profile of {layers} layers over {len(gains)} prompts. Use it with "
        f"--kv-policy {output}"
    ]
    for percent in _TOLD:
        shares: list[list[float]] = []
        for own, prompt_rows in zip(gains, rows, strict=True):
            capacity = own.shape[1]
            mean = round(percent * capacity / 100)
            plan = made.plan(fixed + capacity, layers, _BLOCK, Budget.parse(fixed + mean))
            served = plan.estimate().end.keep - fixed
            alone = np.rint(prompt_rows[percent - 1] * capacity)
            kept = (served, np.full(layers, mean), alone)
            shares.append([retained(own, lengths) for lengths in kept])
        profile, equal, best = np.mean(shares, axis=0)
        lines.append(
            f"With {percent} % of these prompts the profile keeps {profile:.1%} of what the "
            f"answers used, equal lengths {equal:.1%}, lengths of each prompt's own {best:.1%}."
        )
    return lines
