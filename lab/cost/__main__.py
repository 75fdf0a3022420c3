# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.cost`: the table of the cost model for a model and its devices, as Markdown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from lab.cost.model import H200, as_markdown, cost_rows
from vllm_pyramid.tools.bench.shapes import SHAPES, shape_of_config
from vllm_pyramid.tools.command_parts import names, numbers


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, 2 on wrong input, which one line explains."""
    parser = argparse.ArgumentParser(prog="python -m lab.cost", description=__doc__)
    shapes = ", ".join(SHAPES)
    parser.add_argument("--model", default="llama-3-8b", help=f"{shapes}, a folder or a hub's name")
    parser.add_argument("--devices", type=int, default=1, help="H200s that share the model")
    parser.add_argument("--prompt-lens", default="8192,32768,131072", help="tokens (%(default)s)")
    parser.add_argument("--budgets", default="12%,2048", help="tokens or %% (12%%,2048)")
    parser.add_argument("--output-len", type=int, default=256, help="tokens (%(default)s)")
    args = parser.parse_args(argv)
    try:
        shape = SHAPES[args.model] if args.model in SHAPES else shape_of_config(args.model)
        machine = replace(H200, devices=args.devices)
        lens = numbers(args.prompt_lens, "--prompt-lens", 16)
        budgets = names(args.budgets, "--budgets")
        print(as_markdown(cost_rows(shape, machine, lens, budgets, args.output_len)))
    except ValueError as error:
        print(f"lab.cost: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
