# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.models NAME [FOLDER]`, or `gguf FILE [FOLDER]`: print the folder of a model.

A model is written once, from Python packages that hold it, if these are installed, or from a GGUF
file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.models.folders import MODELS, gguf_folder, model_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, 2 on wrong input, which one line explains."""
    about = "; ".join(f"`{name}` is {model.about}" for name, model in MODELS.items())
    parser = argparse.ArgumentParser(prog="python -m lab.models", description=f"{about}.")
    parser.add_argument("name", choices=[*MODELS, "gguf"])
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="[FILE] [FOLDER]",
        help="FILE, for gguf; FOLDER, where the model is written (default: in the user's cache)",
    )
    args = parser.parse_args(argv)
    least = args.name == "gguf"
    try:
        if not least <= len(args.paths) <= least + 1:
            raise ValueError(
                f"{args.name} takes {'FILE and at most one FOLDER' if least else 'one FOLDER'}, "
                f"not {len(args.paths)} paths"
            )
        print(gguf_folder(*args.paths) if least else model_folder(args.name, *args.paths))
    except (OSError, ValueError) as error:
        print(f"lab.models: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
