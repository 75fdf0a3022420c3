# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid budgets`: the command, and its table of layers."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import numpy.typing as npt

from vllm_pyramid.frontend.cache_shape import CACHE_BYTES, CacheShape
from vllm_pyramid.frontend.model_shape import shape_of_model, with_drafts
from vllm_pyramid.frontend.setting_values import parse_policy_args
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.plan import peak_blocks
from vllm_pyramid.policy import Policy, RetentionPlan
from vllm_pyramid.policy.capabilities import Feature, refuse
from vllm_pyramid.policy.kept_spans import Spans
from vllm_pyramid.tools.budgets.open_lengths import floor_sentence, show_open_budgets
from vllm_pyramid.tools.budgets.other_layers import (
    BlockSize,
    choose_blocks,
    report_of_other_layers,
    sentences_of_other_layers,
)

_MIB = 1024 * 1024
_SIZES = ("num_layers", "num_kv_heads", "head_size", "dtype")


def add_command(commands: Any) -> None:
    """Add the sub-command to the parser of `vllm-pyramid`."""
    parser = commands.add_parser(
        "budgets", help="show what a policy keeps of a prompt, layer by layer"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder with a config.json, or a Hugging Face name")
    source.add_argument("--num-layers", type=_positive, help="layers, where there is no model")
    parser.add_argument("--num-kv-heads", type=_positive, help="with --num-layers (default 8)")
    parser.add_argument("--head-size", type=_positive, help="with --num-layers (default 128)")
    parser.add_argument(
        "--dtype", choices=sorted(CACHE_BYTES), help="of the cache (default: the model's)"
    )
    parser.add_argument("--prompt-len", type=_positive, default=8192, help="tokens (default 8192)")
    parser.add_argument(
        "--keep-first",
        type=_positive,
        default=0,
        metavar="N",
        help="tokens at the prompt's beginning that stay beside the budget, such as a system "
        "prompt's (kv_keep, --kv-keep)",
    )
    parser.add_argument(
        "--kv-policy", default="pyramidkv", help="name or .yaml file (default pyramidkv)"
    )
    parser.add_argument("--kv-budget", help="N tokens or P%% (default: the policy's)")
    parser.add_argument("--kv-min-tokens", help="the least that a share comes to (default: 256)")
    parser.add_argument("--kv-policy-args", help="JSON, for example '{\"beta\": 14}'")
    parser.add_argument(
        "--block-size",
        type=_positive,
        help="tokens (default 16; of a model that keeps states what vLLM chooses)",
    )
    parser.add_argument(
        "--speculative-config",
        type=_json_object,
        help="JSON, as vllm serve takes it: the draft model's cache counts too",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def _run(args: argparse.Namespace) -> int:
    policy = KVSettings(
        args.kv_policy, args.kv_budget, args.kv_min_tokens, parse_policy_args(args.kv_policy_args)
    ).policy()
    if policy is None:
        raise ValueError("--kv-policy none keeps everything, as vLLM does: name a policy")
    shape, source = _cache_shape(args)
    if args.speculative_config is not None:
        shape = with_drafts(shape, args.model, args.speculative_config)
    blocks = choose_blocks(args.model, shape, args.block_size)
    block_size = shape.tokens_of_block(blocks.tokens)
    lanes = policy.heads.lanes(shape.num_kv_heads)
    policy.heads.check_shape(shape.num_layers, shape.num_kv_heads)
    sizes = policy.block_sizes(shape.num_layers * lanes, block_size * lanes)
    plan = policy.plan(
        args.prompt_len,
        shape.num_layers * lanes,
        int(sizes.max()),
        spans=_spans(policy, args.keep_first, args.prompt_len),
    )
    if plan.is_deferred:
        show_open_budgets(policy, plan, source, shape, blocks, as_json=args.json)
        return 0
    report = _budget_report(policy, plan, shape, blocks, source, sizes)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_budgets(policy, report)
    return 0


def _spans(policy: Policy, first: int, prompt_len: int) -> Spans:
    """Return the span of the first tokens; none for no tokens."""
    if not first:
        return ()
    refuse(policy, {Feature.KV_KEEP: "--keep-first"})
    if first > prompt_len:
        raise ValueError(f"--keep-first {first} is more than the prompt's {prompt_len} tokens")
    return ((0, first),)


def _cache_shape(args: argparse.Namespace) -> tuple[CacheShape, str]:
    """Return the cache's sizes, and in words where they are from."""
    if args.model is not None:
        if args.num_kv_heads or args.head_size:
            raise ValueError(
                "--num-kv-heads and --head-size come from the model: leave them out, or give "
                "--num-layers instead of --model"
            )
        return shape_of_model(args.model, args.dtype)
    defaults = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
    sizes: dict[str, Any] = {name: getattr(args, name) or value for name, value in defaults.items()}
    assumed = ", ".join(
        f"--{name.replace('_', '-')} {value}"
        for name, value in defaults.items()
        if getattr(args, name) is None
    )
    note = f"a model of {args.num_layers} layers"
    shape = CacheShape(num_layers=args.num_layers, **sizes)
    return shape, f"{note} (assumed: {assumed})" if assumed else note


def _budget_report(
    policy: Policy,
    plan: RetentionPlan,
    shape: CacheShape,
    blocks_of: BlockSize,
    source: str,
    sizes: npt.NDArray[Any],
) -> dict[str, Any]:
    """Return what the command prints.

    `sizes` are tokens of a block in each layer, or in each KV head where these have tables: then a
    layer's tokens are the mean of its heads, and its blocks their sum.
    """
    block_size = shape.tokens_of_block(blocks_of.tokens)
    block_bytes = shape.page_bytes(blocks_of.tokens)
    full_blocks = -(-plan.prompt_len // block_size) * shape.num_layers
    end, of_layers = plan.end, (shape.num_layers, -1)
    keep, held = ((n.reshape(of_layers).mean(axis=1)).round() for n in (end.keep, end.held))
    by_layer = end.blocks_in(sizes).reshape(of_layers).sum(axis=1).tolist()
    blocks, peak = sum(by_layer), int(peak_blocks(plan, plan.prompt_len, sizes).sum())
    swapped = [n for layer, n in enumerate(by_layer) if not policy.values.on_device(layer)]
    return {
        "source": source,
        "policy": policy.name,
        "budget": policy.budget.value,
        "min_tokens": policy.min_tokens,
        "budget_tokens": plan.budget_tokens,
        "protected_tokens": plan.end.protected,
        "prompt_len": plan.prompt_len,
        "block_size": block_size,
        **{name: asdict(shape)[name] for name in _SIZES},
        **report_of_other_layers(shape, plan.prompt_len, blocks_of, blocks, full_blocks),
        "layers": [
            {
                "layer": shape.layers[layer] if shape.layers else layer,
                "keep": int(keep[layer]),
                "held": int(held[layer]),
                "blocks": by_layer[layer],
                "mib": by_layer[layer] * block_bytes / _MIB,
            }
            for layer in range(shape.num_layers)
        ],
        "total": {
            "keep": int(keep.sum()),
            "held": int(held.sum()),
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
            "evictions": [inner.computed for inner in plan.inner],
        },
        "host_mib": sum(swapped) * block_bytes / _MIB,
        **_reads_report(policy, plan, by_layer, block_size),
    }


def _reads_report(
    policy: Policy, plan: RetentionPlan, blocks: list[int], block_size: int
) -> dict[str, Any]:
    """Return the pages that the first token behind the prompt reads, where pages are selected."""
    if not policy.attend.selects:
        return {}
    most = policy.attend.pages(plan.prompt_len, plan.num_layers, block_size).tolist()
    # It stands in the last page of the prompt, or begins a page of its own.
    visible = [held + (plan.prompt_len % block_size == 0) for held in blocks]
    read = [min(pair) for pair in zip(most, visible, strict=True)]
    return {"pages_read": read, "pages_visible": visible}


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
    read = report.get("pages_read")
    if read is not None:
        table.add_column("pages read", str(sum(read)), justify="right")
    for number, row in enumerate(report["layers"]):
        bar = Bar(size=widest, begin=0, end=row["held"], color="cyan")
        cells = [str(row[key]) for key in ("layer", "keep", "held", "blocks")]
        reads = [] if read is None else [str(read[number])]
        table.add_row(*cells, f"{row['mib']:.2f}", bar, *reads)
    their = "their" if "other_layers" in report else "the"
    said = [
        f"For {report['source']}.",
        f"{report['num_layers']} layers x {report['num_kv_heads']} KV heads x "
        f"{report['head_size']} ({report['dtype']}): {total['blocks']} of {full['blocks']} blocks, "
        f"{total['mib']:.2f} of {full['mib']:.2f} MiB, {100 * report['blocks_share']:.1f} % of "
        f"{their} full cache.",
        *sentences_of_other_layers(report),
    ]
    peak = report["peak"]
    holder = "the layers that evict hold" if "other_layers" in report else "it holds"
    points, inside = peak["evictions"], ""
    if points:
        more = f", {points[1]}, ..., {points[-1]}" if len(points) > 2 else ""
        inside = f", evicting at {points[0]}{more} tokens too ({len(points)} times)"
    said.append(
        f"While the prompt is processed {holder} up to {peak['blocks']} blocks, "
        f"{peak['mib']:.2f} MiB{inside}."
    )
    if report["host_mib"]:
        said.append(
            f"V in host memory: {report['host_mib']:.2f} MiB; a block of a layer whose V is there "
            "holds K of twice the tokens."
        )
    if read is not None:
        visible = sum(report["pages_visible"])
        said.append(
            f"The first token behind the prompt reads {sum(read)} of {visible} pages (blocks), "
            f"{100 * sum(read) / visible:.1f} %; of layers that select, later tokens read no more "
            "than the attention budget."
        )
    if policy.heads.splits:
        said.append(
            "Each KV head has a length of its own: kept and held are the mean of a layer's heads, "
            f"and a block holds {report['block_size'] * report['num_kv_heads']} tokens of one head."
        )
    protected = report["protected_tokens"]
    beside = f" beside {protected} tokens that stay in any case" if protected else ""
    said.append(
        f"kept: what the policy asks for per KV head, {report['budget_tokens']} on average"
        f"{beside}; held: with whole blocks filled up." + floor_sentence(policy)
    )
    console = Console()
    console.print(table)
    for sentence in said:
        console.print(sentence, highlight=False)
