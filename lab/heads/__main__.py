# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.heads`: probe a model's KV heads or take a published mask, and try what it costs.

It needs Transformers and the model alone, no engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pyramid.methods.streaming_heads import RECENT, SINKS
from vllm_pyramid.tools.calibrate import read_prompts
from vllm_pyramid.tools.command_parts import Progress, check_writable

if TYPE_CHECKING:
    import torch

    from lab.heads.model import HeadModel
    from lab.heads.scores import HeadScores
    from lab.heads.trial import Trial

# What a mask can be made by, and what `config.json` says of it.
PROBES = {
    "echo": "echo and induction, the larger of both",
    "mean": "mean attention over texts",
}
SHARE = 0.5
_TOKENS = (8192, 32768)  # of requests whose memory is told


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m lab.heads", description=__doc__)
    parser.add_argument("--model", required=True, help="folder, or a Hugging Face name")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="texts to try the mask on")
    parser.add_argument("-o", "--output", metavar="FOLDER", help="for the probe's scores")
    parser.add_argument(
        "--mask",
        metavar="PATH",
        help="try these scores instead of probing: a folder with full_attention_heads.tsv and "
        "config.json, as DuoAttention publishes them, or HeadKV's .json file",
    )
    parser.add_argument(
        "--probe",
        choices=list(PROBES),
        help="echo: attention to earlier copies of random tokens, and to what followed them "
        "(default); mean: how far back the mean query of --prompts looks, as kvpress has it",
    )
    parser.add_argument(
        "--share",
        type=float,
        metavar="S",
        help=f"of the KV heads that keep everything, from 0 to 1 (default {SHARE:g})",
    )
    parser.add_argument(
        "--sinks", type=int, metavar="N", help=f"of a streaming head (default {SINKS})"
    )
    parser.add_argument(
        "--recent", type=int, metavar="N", help=f"tokens of a streaming head (default {RECENT})"
    )
    return parser.parse_args(argv)


def check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that would have no effect, and values that mean nothing.

    Raises:
        ValueError: naming them.
    """
    if args.mask is not None:
        of_folder = () if args.mask.endswith(".json") else ("sinks", "recent")
        unused = ("probe", "output", *of_folder)
        if given := [f"--{name}" for name in unused if getattr(args, name) is not None]:
            raise ValueError(f"{', '.join(given)} does not go with --mask: leave it out")
    elif args.output is None:
        raise ValueError("a probe needs --output, a mask that is tried --mask")
    if args.probe == "mean" and args.prompts is None:
        raise ValueError("--probe mean looks at texts: add --prompts, or leave --probe out")
    for name, least, most in (("share", 0, 1), ("sinks", 0, None), ("recent", 1, None)):
        value = getattr(args, name)
        if value is not None and not (least <= value and (most is None or value <= most)):
            raise ValueError(
                f"--{name} {value:g} must be at least {least}"
                + (f" and at most {most}" if most is not None else "")
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, 2 on wrong input, which one line explains."""
    args = parse_args(argv)
    try:
        check_flags(args)
        return run(args, read_prompts(Path(args.prompts)) if args.prompts else [])
    except ValueError as error:
        print(f"lab.heads: error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace, prompts: Sequence[Mapping[str, Any]]) -> int:
    """Run the command with checked flags; returns 0.

    Args:
        prompts: with `prompt` or `prompt_token_ids` each; may be empty.

    Raises:
        ValueError: the model, the mask or a prompt does not fit.
    """
    import torch
    from rich.console import Console

    from lab.heads.model import HeadModel
    from lab.heads.probe import Repeated
    from lab.heads.scores import CONFIG, SCORES, HeadScores
    from lab.heads.trial import check_texts, copies, random_masks, try_masks
    from vllm_pyramid.methods.streaming_heads.score_files import check_heads, read_scores

    published = None if args.mask is None else read_scores(Path(args.mask).expanduser())
    share = SHARE if args.share is None else args.share
    sizes = {
        "sinks": SINKS if args.sinks is None else args.sinks,
        "recent": RECENT if args.recent is None else args.recent,
    }
    model = HeadModel(args.model)
    texts = token_ids(args.model, prompts)
    if published is None:
        if args.probe != "mean":
            model.check_room(Repeated())
        limits = HeadScores(torch.zeros(model.layers, model.kv_heads), **sizes)
        check_texts(texts, limits, model)
        scores = replace(limits, scores=_probed(args.probe, model, texts))
    else:
        shape = model.layers, model.kv_heads, model.heads
        check_heads(args.mask, published.scores, *shape)
        scores = HeadScores.of(published, model.kv_heads, **sizes)
        check_texts(texts, scores, model)
    model.check_room(copies(scores))
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
            "probe": PROBES[args.probe or "echo"],
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
    from lab.heads.trial import LAST

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


def _probed(probe: str | None, model: HeadModel, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the scores of the model's own heads, `[L, G]`, by one of `PROBES`."""
    from lab.heads.probe import Repeated

    return model.mean_attention(texts) if probe == "mean" else model.probe(Repeated())


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


if __name__ == "__main__":
    sys.exit(main())
