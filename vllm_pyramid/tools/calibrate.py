# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid calibrate`: the average of solved budgets as a policy with fixed shares.

The real engine solves each prompt; a layer's share is its part of the tokens beyond window and
sinks. The mean shares over the prompts become a policy file with the allocator `shares`, whose
lengths are known beforehand (XKV's sampling, arXiv:2412.05896: budgets of one application look
alike, Fig. 10).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_pyramid.frontend.setting_values import parse_policy_args
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.policy import Policy, load_policy, load_presets
from vllm_pyramid.policy.served_settings import NO_POLICY
from vllm_pyramid.tools.command_parts import Progress, parse_engine_args

Shares = npt.NDArray[np.float64]
_KEYS = {"prompt": str, "prompt_token_ids": list}
_AT_ONCE = 8  # prompts between two moves of the progress bar


def add_parser(commands: Any) -> None:
    """Add the sub-command to the parser of `vllm-pyramid`."""
    parser = commands.add_parser(
        "calibrate",
        help="fit a policy to your prompts: average solved budgets",
    )
    parser.add_argument("--model", required=True, help="folder, or a Hugging Face name")
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE.jsonl",
        help='one JSON object a line, with "prompt" (text) or "prompt_token_ids"',
    )
    parser.add_argument("--kv-budget", help="N tokens or P%% (default: the policy's)")
    parser.add_argument(
        "--kv-policy", default="xkv", help="a policy that solves budgets (default xkv)"
    )
    parser.add_argument("--kv-policy-args", help="JSON, for example '{\"window\": 16}'")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.yaml", help="the policy")
    parser.add_argument(
        "--engine-args",
        metavar="JSON",
        help="further arguments of vllm_pyramid.LLM, for example '{\"max_model_len\": 8192}'",
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Calibration:
    """The shares that were measured.

    Attributes:
        shares: `[prompts, layers]` of the tokens beyond window and sinks; each row sums to 1.
        skipped: prompts that fit into the budget, so that nothing was solved.
    """

    shares: Shares
    skipped: int

    @property
    def mean(self) -> Shares:
        """The `[layers]` mean shares, which sum to 1."""
        mean: Shares = self.shares.mean(axis=0)
        return mean


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Return the prompts of a JSON Lines file, as vLLM takes them; ValueError names a wrong one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompts {path}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not valid JSON: {error.msg}") from None
        given = [key for key in _KEYS if isinstance(data, dict) and key in data]
        if len(given) != 1 or not isinstance(data[given[0]], _KEYS[given[0]]) or not data[given[0]]:
            raise ValueError(
                f'{path}, line {number}: one of "prompt" (a text) and "prompt_token_ids" (a list) '
                "is needed, and not empty"
            )
        prompts.append({given[0]: data[given[0]]})
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def collect(reports: Iterable[dict[str, Any]], floor: int) -> Calibration:
    """Return the shares in the responses' reports (`kv_transfer_params`), beyond `floor`.

    ValueError: every prompt fits into the budget.
    """
    rows, skipped = [], 0
    for report in reports:
        solved = report.get("solved_tokens")
        chosen = np.array(solved if solved is not None else [], np.float64) - floor
        if chosen.sum() <= 0:
            skipped += 1
            continue
        rows.append(chosen / chosen.sum())
    if not rows:
        raise ValueError(
            f"none of the {skipped} prompts is longer than the budget, so there was nothing to "
            "solve: use longer prompts, or a smaller --kv-budget"
        )
    return Calibration(np.stack(rows), skipped)


def policy_text(policy: Policy, calibration: Calibration, name: str, source: str) -> str:
    """Return a policy file like `policy`, but with fixed shares for its allocator."""
    import yaml

    number, layers = calibration.shares.shape
    data = policy.model_dump(exclude_none=True)
    data["name"] = name
    data["description"] = f"Shares of {policy.name}, averaged over {number} prompts"
    # Exact enough for any prompt, and short enough to be read and changed by hand.
    shares = [round(float(share), 6) for share in calibration.mean]
    data["allocator"] = {"kind": "shares", "shares": shares}
    head = (
        f"# Made by `vllm-pyramid calibrate` for a model of {layers} layers ({source}): the share "
        f"that\n# each layer gets of the tokens beyond window and sinks, mean over {number} "
        "prompts.\n"
    )
    return head + str(yaml.safe_dump(data, sort_keys=False, width=96, default_flow_style=None))


def _solve(
    model: str, settings: KVSettings, prompts: Sequence[dict[str, Any]], engine_args: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Run the prompts through the engine, and yield their reports."""
    from vllm import SamplingParams

    from vllm_pyramid import LLM

    llm = LLM(model, **settings.to_additional_config(), **engine_args)
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    for start in range(0, len(prompts), _AT_ONCE):
        chunk: Any = list(prompts[start : start + _AT_ONCE])
        for output in llm.generate(chunk, params, use_tqdm=False):
            report: dict[str, Any] | None = output.kv_transfer_params
            assert report is not None, "a response without a report"
            yield report


def _policy_of(settings: KVSettings) -> Policy:
    policy = settings.policy()
    if policy is not None and policy.heads.defers:
        raise ValueError(
            f"policy {settings.kv_policy!r} solves the lengths of single KV heads, which are not "
            "calibrated"
        )
    if policy is None or not policy.allocator.defers:
        solving = [preset.name for preset in load_presets() if preset.allocator.defers]
        raise ValueError(
            f"policy {settings.kv_policy!r} knows its lengths beforehand, so there is nothing to "
            f"calibrate: use one that solves them ({', '.join(solving)})"
        )
    policy.allocator.check_calibration(policy)
    return policy


def checked_output(name: str) -> Path:
    """Return the path of the policy file; ValueError for another ending, or without its folder."""
    output = Path(name)
    if output.suffix not in (".yaml", ".yml"):
        raise ValueError(f"the output {name!r} must end in .yaml, as --kv-policy asks for it")
    if not output.parent.is_dir():
        raise ValueError(f"the folder of the output {name!r} does not exist")
    return output


def run(args: argparse.Namespace) -> int:
    """Run the sub-command; returns 0 on success."""
    # Short prompts have shares too.
    settings = KVSettings(
        args.kv_policy,
        args.kv_budget,
        kv_min_tokens=None if args.kv_policy == NO_POLICY else 0,
        kv_policy_args=parse_policy_args(args.kv_policy_args),
    )
    policy = _policy_of(settings)
    output = checked_output(args.output)
    prompts = read_prompts(Path(args.prompts))
    engine_args = parse_engine_args(args.engine_args)

    from rich.console import Console

    console = Console()
    reports = []
    with Progress(console, len(prompts)) as progress:
        for report in _solve(args.model, settings, prompts, engine_args):
            reports.append(report)
            progress.advance()
    calibration = collect(reports, policy.window + policy.sinks)
    own = load_policy(args.kv_policy, None, settings.kv_policy_args).min_tokens
    made_from = policy.model_copy(update={"min_tokens": own})
    output.write_text(
        policy_text(made_from, calibration, output.stem, args.model), encoding="utf-8"
    )
    spread = calibration.shares.std(axis=0) / np.maximum(calibration.mean, 1e-12)
    console.print(
        f"{output}: shares of {calibration.shares.shape[1]} layers over "
        f"{len(calibration.shares)} prompts"
        + (f" ({calibration.skipped} fitted into the budget)" if calibration.skipped else "")
        + f"; standard deviation of a share {100 * spread.mean():.0f} % of its mean. Use it with "
        f"--kv-policy {output}",
        highlight=False,
        soft_wrap=True,
    )
    return 0
