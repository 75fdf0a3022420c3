# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.heads.queries`: measure where the queries of a model's heads lie on average.

The model reads your prompts, by Transformers, without an engine. The file keeps, for each layer and
query head, the mean of the queries without their rotary embedding, and the mean length of each
rotated pair of channels: what the policy `triattention` scores by (docs/methods/triattention.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from lab.heads.__main__ import token_ids
from lab.heads.model import HeadModel
from vllm_pyramid.methods.triattention import Centres
from vllm_pyramid.tools.calibrate import read_prompts
from vllm_pyramid.tools.command_parts import check_writable


def centres_of(model: HeadModel, prompts: Sequence[Sequence[int]]) -> Centres:
    """Return the centres over all tokens of the prompts."""
    means: list[torch.Tensor] = []
    lengths: list[torch.Tensor] = []
    for ids in prompts:
        if len(ids) > model.longest:
            raise ValueError(
                f"a prompt has {len(ids)} tokens, and the model {model.longest} positions: leave "
                "it out, or cut it"
            )
        queries = model.queries(ids).double()
        means.append(queries.sum(dim=1))
        lengths.append(model.rotary(1).lengths(queries).sum(dim=1))
    count = sum(map(len, prompts))
    mean, length = (torch.stack(sums).sum(dim=0) / count for sums in (means, lengths))
    return Centres(mean.float(), length.float())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, 2 on wrong input, which one line explains."""
    parser = argparse.ArgumentParser(prog="python -m lab.heads.queries", description=__doc__)
    parser.add_argument("--model", required=True, help="folder, or a Hugging Face name")
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE.jsonl",
        help='one JSON object a line, with "prompt" (text) or "prompt_token_ids"',
    )
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE.npz")
    args = parser.parse_args(argv)
    try:
        prompts = read_prompts(Path(args.prompts))
        if args.output.suffix != ".npz":
            raise ValueError(f"the output {str(args.output)!r} must end in .npz")
        model = HeadModel(args.model)
        check_writable(args.output.parent, [args.output])
        ids = token_ids(args.model, prompts)
        centres = centres_of(model, ids)
        centres.write(args.output, model=args.model)
    except ValueError as error:
        print(f"lab.heads.queries: error: {error}", file=sys.stderr)
        return 2
    layers, heads, size = centres.mean.shape
    lengths = centres.mean[..., : 2 * centres.length.shape[-1]].norm(dim=-1)
    near = lengths / centres.length.square().sum(dim=-1).sqrt()
    Console().print(
        f"{args.output}: centres of {layers} layers of {heads} query heads of {size}, over "
        f"{sum(map(len, ids)):,} tokens of {len(ids)} prompts; a centre is {near.mean():.0%} as "
        "long as its queries. Serve with --kv-policy triattention --kv-policy-args "
        f"'{json.dumps({'centres': str(args.output)})}'.",
        highlight=False,
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
