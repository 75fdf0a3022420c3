# SPDX-License-Identifier: Apache-2.0
"""Read the traces of a folder (`--kv-trace`), print a table, and plot the kept positions.

    python examples/plot_trace.py traces [--picture kept.png]

A row of the picture is a layer and KV head, the oldest token is on the left.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np


def kept_map(trace: Any) -> tuple[np.ndarray, int]:
    """`[layers * KV heads, tokens]`, true where a position was kept; KV heads of a layer."""
    tokens = int(trace["prompt_len"] if "prompt_len" in trace else trace["computed"])
    rows = []
    for layer in range(len(trace["held"])):
        for positions in trace[f"kept_{layer}"]:
            row = np.zeros(tokens, bool)
            row[positions] = True
            rows.append(row)
    # KV heads with lengths of their own have arrays of their own.
    lanes = int(trace["kv_heads"]) if "kv_heads" in trace else 1
    return np.array(rows), len(trace["kept_0"]) * lanes


def show(path: Path, trace: Any) -> None:
    """Print tokens kept and attention recall of each layer, or of each KV head with its length."""
    print(f"{path.name}: budget {int(trace['budget'])} tokens")
    lanes = int(trace["kv_heads"]) if "kv_heads" in trace else 1
    for row, held in enumerate(trace["held"]):
        recall = float(trace[f"recall_{row}"].mean())
        head = f", KV head {row % lanes}" if lanes > 1 else ""
        print(
            f"  layer {row // lanes:3}{head}: {held:6} tokens kept, {recall:.0%} of the attention"
        )


def plot(traces: dict[str, Any], picture: Path) -> None:
    """One map a request."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3 * len(traces)), layout="constrained")
    axes = figure.subplots(len(traces), squeeze=False)[:, 0]
    for (name, trace), axis in zip(traces.items(), axes, strict=True):
        kept, heads = kept_map(trace)
        axis.imshow(kept, aspect="auto", interpolation="nearest", cmap="Blues")
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("position")
        axis.set_yticks(range(0, len(kept), heads), [str(i) for i in range(len(kept) // heads)])
        axis.set_ylabel("layer")
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path, default=Path("kept.png"))
    args = parser.parse_args()
    paths = sorted(args.folder.glob("*.npz"))
    if not paths:
        parser.error(f"no .npz file in {args.folder}: run a server or engine with a trace first")
    traces = {path.stem: np.load(path) for path in paths}
    for path in paths:
        show(path, traces[path.stem])
    plot(traces, args.picture)
    print(f"picture: {args.picture}")


if __name__ == "__main__":
    main()
