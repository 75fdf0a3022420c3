# SPDX-License-Identifier: Apache-2.0
"""The HTML file: the template `page.html` with the data in it; it loads nothing from elsewhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from vllm_pyramid.tools.show.engine import Shown
from vllm_pyramid.version import __version__

_PLACE = "/*DATA*/"


def page(shown: Sequence[Shown], model: str) -> str:
    """Return the file's text; ValueError if the policies were shown other tokens."""
    first = shown[0]
    if any(other.pieces != first.pieces for other in shown):
        raise ValueError("the policies were given prompts with other tokens")
    data = {
        "model": model,
        "version": __version__,
        "pieces": first.pieces,
        "policies": [_policy(one) for one in shown],
    }
    # No text of the prompt or the answer may end the script element.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    assert template.count(_PLACE) == 1
    return template.replace(_PLACE, text)


def _policy(shown: Shown) -> dict[str, Any]:
    """Return what the page needs; `counts` are `[layers * tokens]` little-endian uint16."""
    counts = np.asarray(shown.counts, "<u2")
    report = shown.report
    return {
        "name": shown.policy,
        "budget": report["kv_budget"],
        "answer": shown.answer,
        "layers": shown.layers,
        "heads": shown.heads,
        "kept": _by_layer(report["kept_tokens"], report.get("kv_heads", 1)),
        "blocks": [report["blocks_before"], report["blocks_after"]],
        "counts": base64.b64encode(counts.tobytes()).decode(),
    }


def _by_layer(kept: list[int], lanes: int) -> list[float]:
    """Return how much each layer keeps; of KV heads with lengths of their own the mean."""
    if lanes == 1:
        return list(kept)
    means: list[float] = np.reshape(kept, (-1, lanes)).mean(axis=1).round(1).tolist()
    return means
