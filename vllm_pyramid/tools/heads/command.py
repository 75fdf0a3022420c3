# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid calibrate --heads`: measure which KV heads of a model look far back.

It needs Transformers and the model alone, no engine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm_pyramid.methods.streaming_heads import RECENT, SINKS
from vllm_pyramid.tools.command_parts import check_writable, refuse_unused

SHARE = 0.5
# Flags that belong to --heads alone, and those that do not go with it.
OWN_FLAGS = ("share", "sinks", "recent")
_OTHERS = ("kv_policy", "kv_budget", "kv_policy_args", "engine_args", "prompts")
_TOKENS = (8192, 32768)  # of requests whose memory is told
_PROBE = "echo and induction, the larger of both"  # what `config.json` says


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of heads to the parser of `calibrate`."""
    group = parser.add_argument_group("heads", "docs/methods/duoattention.md")
    group.add_argument(
        "--heads",
        action="store_true",
        help="measure which KV heads look far back, by their attention to earlier copies of random "
        "tokens and to what followed them; -o is a folder",
    )
    parser.add_argument(
        "--queries",
        action="store_true",
        help="measure where each head's queries lie on average, for the policy triattention; -o is "
        "a file FILE.npz",
    )
    group.add_argument(
        "--share",
        type=float,
        metavar="S",
        help=f"of the KV heads that keep everything, from 0 to 1 (default {SHARE:g})",
    )
    group.add_argument(
        "--sinks", type=int, metavar="N", help=f"of a streaming head (default {SINKS})"
    )
    group.add_argument(
        "--recent", type=int, metavar="N", help=f"tokens of a streaming head (default {RECENT})"
    )


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that would have no effect, and values that mean nothing."""
    if args.heads and args.queries:
        raise ValueError("--heads and --queries measure different things: give one of them")
    refuse_unused(args, "--heads", OWN_FLAGS, _OTHERS)
    refuse_unused(args, "--queries", others=_OTHERS[:-1])
    check_sizes(args)


def check_sizes(args: argparse.Namespace) -> None:
    """Raise ValueError for a share, sinks or recent tokens that cannot be."""
    for name, least, most in (("share", 0, 1), ("sinks", 0, None), ("recent", 1, None)):
        value = getattr(args, name)
        if value is not None and not (least <= value and (most is None or value <= most)):
            raise ValueError(
                f"--{name} {value:g} must be at least {least}"
                + (f" and at most {most}" if most is not None else "")
            )


def run(args: argparse.Namespace) -> int:
    """Run the command with checked flags; return 0. ValueError: no such model, or no folder."""
    from rich.console import Console

    from vllm_pyramid.tools.heads.model import HeadModel
    from vllm_pyramid.tools.heads.probe import Repeated
    from vllm_pyramid.tools.heads.scores import CONFIG, SCORES, HeadScores

    share = SHARE if args.share is None else args.share
    sinks = SINKS if args.sinks is None else args.sinks
    recent = RECENT if args.recent is None else args.recent
    folder = Path(args.output)
    model = HeadModel(args.model)
    probe = Repeated()
    model.check_room(probe)
    check_writable(folder, [folder / SCORES, folder / CONFIG])
    scores = HeadScores(model.probe(probe), sinks, recent)
    scores.write(folder, {"model_name": args.model, "probe": _PROBE})
    mask = scores.mask(share)
    count, streaming = int(mask.sum()), int((~mask).all(dim=1).sum())
    held = " and ".join(f"{scores.held(mask, n):.1%} at {n:,} tokens" for n in _TOKENS)
    Console().print(
        f"{folder}: {count} of {mask.numel()} KV heads keep everything, the others {sinks} sinks "
        f"and {recent} recent tokens. In {streaming} of {model.layers} layers every head streams.\n"
        f"Kept with a length for each head: {held}. Serve it so with --kv-policy duoattention "
        f"--kv-policy-args '{json.dumps({'mask': str(folder), 'share': share})}'.",
        highlight=False,
        soft_wrap=True,
    )
    return 0
