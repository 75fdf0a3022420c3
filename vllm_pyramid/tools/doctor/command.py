# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-pyramid doctor`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from vllm_pyramid.frontend.setting_values import parse_policy_args
from vllm_pyramid.policy import load_policy
from vllm_pyramid.tools.doctor import checks


def _show(findings: list[checks.Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console, section = Console(highlight=False, soft_wrap=True), ""
    marks = {
        checks.OK: ("  ", ""),
        checks.NOTE: ("! ", "yellow"),
        checks.MISSING: ("✗ ", "bold red"),
    }
    for finding in findings:
        if finding.section != section:
            section = finding.section
            console.print(Text(section, style="bold"))
        mark, style = marks[finding.status]
        line = Text.assemble(f"  {mark}{finding.name}: ", (finding.value, style))
        console.print(line)
        if finding.advice:
            console.print(Text(f"      {finding.advice}", style="dim"))
    lacking = [finding for finding in findings if finding.status == checks.MISSING]
    if lacking:
        names = ", ".join(f"{finding.section} ({finding.name})" for finding in lacking)
        console.print(Text(f"An engine with a policy will not start here: {names}", "bold red"))
    else:
        console.print(Text("An engine with a policy can start here.", style="bold green"))


def of_policy(name: str, args: dict[str, Any]) -> list[checks.Finding]:
    """Find what does not work with a policy, anywhere; ValueError: there is no such policy."""
    rows = load_policy(name, None, args).refusals
    if not rows:
        return [checks.Finding(f"policy {name}", "works with", "all that any policy works with")]
    return [
        checks.Finding(
            f"policy {name}",
            f"does not work {row.what()}",
            f"{row.reason} ({row.part})",
            checks.NOTE,
            row.fix,
        )
        for row in rows
    ]


def add_command(commands: Any) -> None:
    """Add `vllm-pyramid doctor` to the commands."""
    parser = commands.add_parser(
        "doctor",
        help="say what is installed, what will be used and what is missing",
        description="Looks at vLLM, the processor, the compiled kernels, GPUs, memory and extras, "
        "without starting an engine. Exit status: 0 if an engine with a policy can start here, 1 "
        "if not. Paste its output into a report of a fault.",
    )
    parser.add_argument(
        "--kv-policy", help="name or .yaml file: say what does not work with this policy, too"
    )
    parser.add_argument("--kv-policy-args", help="JSON, as of a server")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.kv_policy is None and args.kv_policy_args is not None:
        raise ValueError("--kv-policy-args without --kv-policy would have no effect: leave it out")
    findings = checks.examine()
    if args.kv_policy is not None:
        findings += of_policy(args.kv_policy, parse_policy_args(args.kv_policy_args))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    return int(any(finding.status == checks.MISSING for finding in findings))
