# SPDX-License-Identifier: Apache-2.0
"""The `vllm-pyramid` command. Heavy modules are imported only by the subcommands that need them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence

from vllm_pyramid.compat.versions import WrongVLLMError, check_vllm
from vllm_pyramid.policy import RECOMMENDED, load_presets
from vllm_pyramid.tools import calibrate
from vllm_pyramid.tools.bench.command import add_command as add_bench
from vllm_pyramid.tools.budgets.command import add_command as add_budgets
from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.doctor.command import add_command as add_doctor
from vllm_pyramid.tools.eval.command import add_command as add_eval
from vllm_pyramid.tools.sessions import add_command as add_sessions
from vllm_pyramid.tools.top.command import add_command as add_top

_NEED_VLLM = ("bench", "calibrate", "eval")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-pyramid",
        description="KV budgets per layer for vLLM: what policies keep, what that costs and gives.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    policies = commands.add_parser("policies", help="list the policies for --kv-policy")
    policies.add_argument("--json", action="store_true", help="print JSON instead of a table")
    policies.set_defaults(run=_run_policies)

    add_doctor(commands)
    add_top(commands)
    add_sessions(commands)
    add_budgets(commands)
    add_eval(commands)
    add_bench(commands)
    calibrate.add_parser(commands)
    # Only for the list of commands: `main` hands the demonstration its own arguments.
    commands.add_parser("demo", help="run the built-in model with three policies", add_help=False)
    model = commands.add_parser(
        "model",
        help="print the folder of the built-in model",
        description="Prints the folder of the built-in model for `vllm serve` and `--model`: 3.7 "
        "million parameters that find facts in text.",
    )
    model.add_argument("name", choices=["built-in"])
    model.set_defaults(run=_run_model)
    return parser


def _run_policies(args: argparse.Namespace) -> int:
    presets = load_presets()
    if args.json:
        print(json.dumps([policy.model_dump() for policy in presets], indent=2))
        return 0

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Policies for --kv-policy", box=box.SIMPLE_HEAD, padding=(0, 1, 1, 0))
    table.add_column("name", no_wrap=True)
    table.add_column("idea and paper", overflow="fold", ratio=1)
    table.add_column("scorer, allocator", no_wrap=True)
    table.add_column("budget", no_wrap=True, justify="right")
    for policy in presets:
        idea = Text.assemble(policy.description, "\n", (policy.paper, "dim"))
        parts = f"{policy.scorer.kind}\n{policy.allocator.kind}"
        table.add_row(policy.name, idea, parts, str(policy.budget))
    console = Console()
    console.print(table)
    console.print(
        f"`auto` is {RECOMMENDED}. The budget is the mean number of prompt tokens kept per layer "
        "and KV head; these are the defaults. A .yaml file of the same format works in place of a "
        "name; `none` switches the plugin off.",
        highlight=False,
    )
    return 0


def _run_model(args: argparse.Namespace) -> int:
    print(model_path())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 on success, 2 on wrong input, which one line explains."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if argv[:1] == ["demo"]:
            from vllm_pyramid.tools.demo.run import main as run_demo

            return run_demo(argv[1:])
        args = _build_parser().parse_args(argv)
        if args.command in _NEED_VLLM:
            check_vllm()
        run: Callable[[argparse.Namespace], int] = args.run
        status = run(args)
        sys.stdout.flush()
        return status
    except (ValueError, WrongVLLMError) as error:
        print(f"vllm-pyramid: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has gone; without this Python complains again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
