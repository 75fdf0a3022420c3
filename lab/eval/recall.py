# SPDX-License-Identifier: Apache-2.0
"""The attention recall of prompts, which the engine writes into its traces (`kv_trace`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vllm_pyramid.step.trace_files import rows_per_layer
from vllm_pyramid.tools.eval.result import Result


class Measured(Result):
    """What the engine returned for a prompt.

    Attributes:
        recall: `[layers][KV heads]`, the share of the window's attention that the kept tokens
            hold (`kernels.recall.kept_mass`), where the task needs it, else None.
        seconds: since the result before it: the first of a batch has the time of the batch. None
            where a batch has several tasks, lengths or budgets.
    """

    recall: list[list[float]] | None = None
    seconds: float | None = None


class Recalls:
    """Read the traces that an engine writes into a folder, and remove them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, list[list[float]]] = {}

    def of(self, result: Result) -> Measured:
        """Return a result with its recall.

        Raises:
            RuntimeError: it has no trace, or its recall could not be measured.
        """
        if result.request_id not in self._found:
            self._found |= take_recalls(self._folder)
        recall = self._found.pop(result.request_id, None)
        if recall is None:
            raise RuntimeError("the engine wrote no trace of a prompt")
        if not np.isfinite(np.concatenate(recall)).all():
            raise RuntimeError(
                "a prompt's last chunk was too short to measure its attention recall"
            )
        return Measured(**result.model_dump(), recall=recall)


def take_recalls(folder: Path) -> dict[str, list[list[float]]]:
    """Return the recall of every traced request `[layers][KV heads]`, by its external name.

    Ranks that share the KV heads write a file each; their heads are put side by side. Files of
    evictions after the prompt's end have no recall. All files are removed.
    """
    found: dict[str, list[list[float]]] = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as trace:
            if "prompt_len" in trace:
                # vLLM adds a dash and a random end to the name that it gave the request.
                name = str(trace["request_id"]).rsplit("-", 1)[0]
                rows = sum(key.startswith("recall_") for key in trace.files)
                of_rows, lanes = (
                    [trace[f"recall_{row}"] for row in range(rows)],
                    rows_per_layer(trace),
                )
                firsts = range(0, rows, lanes)
                heads = [np.concatenate(of_rows[at : at + lanes]).tolist() for at in firsts]
                layers = len(heads)
                before = found.get(name, [[]] * layers)
                found[name] = [left + right for left, right in zip(before, heads, strict=True)]
        path.unlink()
    return found
