# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid calibrate --heads`: probe a model's KV heads, or try a published mask.

It needs Transformers and the model alone, no engine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pyramid.tools.command_parts import Progress, check_writable

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.tools.head_probe import Repeated
    from vllm_pyramid.tools.heads.model import HeadModel
    from vllm_pyramid.tools.heads.scores import HeadScores
    from vllm_pyramid.tools.heads.trial import Trial

SHARE, SINKS, RECENT = 0.5, 128, 256
# Flags that belong to --heads alone, and those that do not go with it.
OWN_FLAGS = ("mask", "share", "sinks", "recent")
_OTHERS = (
    *("kv_policy", "kv_budget", "kv_policy_args", "picture", "engine_args", "risk"),
    *("utility", "horizon", "relative"),
)
_TOKENS = (8192, 32768)  # of requests whose memory is told


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of heads to the parser of `calibrate`."""
    group = parser.add_argument_group("heads", "docs/policies.md, heads that look far back")
    group.add_argument(
        "--heads",
        action="store_true",
        help="measure which KV heads look far back; -o is a folder, --prompts are optional texts",
    )
    group.add_argument(
        "--mask",
        metavar="FOLDER",
        help="try these scores instead of probing: full_attention_heads.tsv and config.json, as "
        "DuoAttention publishes them",
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
    """Refuse flags that would have no effect, and values that mean nothing.

    Raises:
        ValueError: naming them.
    """
    unused: tuple[str, ...] = _OTHERS if args.heads else OWN_FLAGS
    if args.heads and args.mask is not None:
        unused += ("sinks", "recent", "output")  # the folder has its own, and is the output
    given = [f"--{name.replace('_', '-')}" for name in unused if getattr(args, name) is not None]
    if given and not args.heads:
        raise ValueError(f"{', '.join(given)} without --heads would have no effect: leave it out")
    if given:
        other = "--mask" if args.mask is not None and not set(_OTHERS) & set(given) else "--heads"
        raise ValueError(f"{', '.join(given)} does not go with {other}: leave it out")
    for name, least, most in (("share", 0, 1), ("sinks", 0, None), ("recent", 1, None)):
        value = getattr(args, name)
        if value is not None and not (least <= value and (most is None or value <= most)):
            raise ValueError(
                f"--{name} {value:g} must be at least {least}"
                + (f" and at most {most}" if most is not None else "")
            )


def run(args: argparse.Namespace, prompts: Sequence[Mapping[str, Any]]) -> int:
    """Run the command with checked flags; returns 0.

    Args:
        prompts: with `prompt` or `prompt_token_ids` each; may be empty.

    Raises:
        ValueError: the model, the mask or a prompt does not fit.
    """
    from rich.console import Console

    from vllm_pyramid.tools.heads.model import HeadModel
    from vllm_pyramid.tools.heads.scores import CONFIG, SCORES, HeadScores
    from vllm_pyramid.tools.heads.trial import check_texts, copies, random_masks, try_masks

    published = None if args.mask is None else HeadScores.read(Path(args.mask))
    share = SHARE if args.share is None else args.share
    model = HeadModel(args.model)
    scores = _probed(args, model) if published is None else published
    if scores.scores.shape != (model.layers, model.kv_heads):
        layers, heads = scores.scores.shape
        raise ValueError(
            f"{args.mask} is for {layers} layers of {heads} KV heads, and {args.model} has "
            f"{model.layers} of {model.kv_heads}"
        )
    _check_room(copies(scores), model)
    texts = token_ids(args.model, prompts)
    check_texts(texts, scores, model)
    mask = scores.mask(share)
    masks = [None, mask, *random_masks(mask)]
    if published is None:
        folder = Path(args.output)
        check_writable(folder, [folder / SCORES, folder / CONFIG])
    console = Console()
    with Progress(console, len(masks) * (1 + len(texts))) as progress:
        progress.stage("masks")
        trials = try_masks(model, scores, masks, texts, progress.advance)
    if published is None:
        found = {
            "model_name": args.model,
            "probe": "echo and induction, the larger of both",
            "tried": {
                "share": share,
                "whole": asdict(trials[0]),
                "mask": asdict(trials[1]),
                "random": [asdict(trial) for trial in trials[2:]],
            },
        }
        scores.write(Path(args.output), found)
    for line in report(scores, mask, trials, args.mask or args.output, share):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def report(
    scores: HeadScores, mask: torch.Tensor, trials: Sequence[Trial], folder: str, share: float
) -> list[str]:
    """Return the lines that the command prints.

    Args:
        mask: `[L, G]` bool. trials: of whole attention, the mask, and random masks.
        folder: of the scores. share: of the heads that keep everything.
    """
    from vllm_pyramid.tools.heads.trial import LAST

    layers, heads = mask.shape
    count, streaming = int(mask.sum()), int((~mask).all(dim=1).sum())
    held = " and ".join(
        f"{scores.held(mask, tokens):.1%} at {tokens:,} tokens" for tokens in _TOKENS
    )
    lines = [
        f"{folder}: {count} of {layers * heads} KV heads keep everything, the others {scores.sinks}"
        f" sinks and {scores.recent} recent tokens. In {streaming} of {layers} layers every head "
        "streams.",
        f"Kept with a length for each head: {held}. Serve it so with --kv-policy duoattention "
        f"--kv-policy-args '{json.dumps({'mask': folder, 'share': share})}'.",
    ]
    whole, tried, chance = trials[0], trials[1], trials[2:]

    def mean(name: str) -> float:
        return float(sum(getattr(trial, name) for trial in chance) / len(chance))

    lines.append(
        f"Random tokens copied from further back than a streaming head sees: {whole.copied:.1%} "
        f"with whole attention, {tried.copied:.1%} with the mask, {mean('copied'):.1%} with random "
        f"masks (mean of {len(chance)})."
    )
    if tried.divergence is not None and tried.agreement is not None:
        lines.append(
            f"Your prompts' last {LAST} tokens: the greedy choice is that of whole attention for "
            f"{tried.agreement:.1%} of them with the mask, {mean('agreement'):.1%} with random "
            f"masks; divergence {tried.divergence:.4f} and {mean('divergence'):.4f} nats."
        )
    return lines


def _probed(args: argparse.Namespace, model: HeadModel) -> HeadScores:
    """Return the scores of the model's own heads."""
    from vllm_pyramid.tools.head_probe import Repeated
    from vllm_pyramid.tools.heads.scores import HeadScores

    probe = Repeated()
    _check_room(probe, model)
    sinks = SINKS if args.sinks is None else args.sinks
    recent = RECENT if args.recent is None else args.recent
    return HeadScores(model.probe(probe), sinks, recent)


def _check_room(probe: Repeated, model: HeadModel) -> None:
    """Raise ValueError if the model cannot read the repeated tokens."""
    tokens = probe.period * probe.copies
    if tokens > model.longest or probe.period > len(model.ordinary_ids()):
        raise ValueError(
            f"the probe's {probe.copies} copies of {probe.period} tokens do not fit into the "
            f"model's {model.longest} positions and {model.vocabulary} token ids: take fewer "
            "--sinks and --recent"
        )


def token_ids(model: str, prompts: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the prompts as token ids; the tokenizer is loaded if one is a text."""
    if all("prompt_token_ids" in prompt for prompt in prompts):
        return [list(prompt["prompt_token_ids"]) for prompt in prompts]
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{model} has no tokenizer, so prompts must be prompt_token_ids: {line}"
        ) from error
    return [
        list(prompt.get("prompt_token_ids") or tokenizer.encode(prompt["prompt"]))
        for prompt in prompts
    ]
