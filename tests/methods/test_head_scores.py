# SPDX-License-Identifier: Apache-2.0
"""Scores of heads in DuoAttention's files, and the masks that a share of them makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.heads.scores import CONFIG, SCORES, HeadScores
from vllm_pyramid.methods.streaming_heads.score_files import of_kv_heads, read_scores

CONTENT = [[0.5, 0.25, 1.0], [0.0, 0.75, 0.125]]


def folder_of(path: Path, scores: Any = CONTENT, **config: Any) -> Path:
    """Write a folder as DuoAttention's own code does."""
    np.savetxt(path / SCORES, np.array(scores), delimiter="\t")
    sizes = {"sink_size": 128, "recent_size": 256, "model_name": "models/M"}
    (path / CONFIG).write_text(json.dumps({**sizes, **config}))
    return path


def test_published_files_are_read(tmp_path: Path) -> None:
    scores = HeadScores.read(folder_of(tmp_path, [[1.5, 0.25], [-0.5, 0.75]], sink_size=64))
    assert scores.scores.tolist() == [[1.0, 0.25], [0.0, 0.75]]
    assert (scores.sinks, scores.recent) == (64, 256)


def test_what_is_written_is_read_again_by_us_and_by_duo_attention(tmp_path: Path) -> None:
    scores = HeadScores(torch.tensor(CONTENT, dtype=torch.float64), 4, 12)
    scores.write(tmp_path / "new" / "one", {"model_name": "m"})
    again = HeadScores.read(tmp_path / "new" / "one")
    assert torch.equal(again.scores, scores.scores) and (again.sinks, again.recent) == (4, 12)
    # `load_attn_pattern` of DuoAttention's utils.py.
    theirs = np.loadtxt(tmp_path / "new" / "one" / SCORES, dtype=float, delimiter="\t")
    assert theirs.tolist() == CONTENT
    config = json.loads((tmp_path / "new" / "one" / CONFIG).read_text())
    assert config == {"sink_size": 4, "recent_size": 12, "model_name": "m"}


@pytest.mark.parametrize("share", [0.0, 1 / 3, 0.5, 2 / 3, 1.0])
def test_a_share_keeps_the_heads_that_duo_attention_keeps(share: float) -> None:
    scores = HeadScores(torch.tensor(CONTENT, dtype=torch.float64), 128, 256)
    # `sparsify_attention_heads`: those at or above the quantile, none and all at the ends.
    sparsity = 1 - share
    threshold = np.quantile(CONTENT, sparsity)
    threshold = 2 if sparsity >= 1 else -1 if sparsity <= 0 else threshold
    assert scores.mask(share).tolist() == (np.array(CONTENT) >= threshold).tolist()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (SCORES, "0.5\t0.5\n0.5\n", "equally many numbers"),
        (SCORES, "0.5\tnan\n", "not finite"),
        (CONFIG, '{"sink_size": 4, "recent_size": 0}', "recent_size .* at least 1, not 0"),
        (CONFIG, '{"sink_size": true, "recent_size": 8}', "sink_size .* not True"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = folder_of(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        HeadScores.read(folder)


def head_kv(path: Path, numbers: Any) -> Path:
    """Write a file as HeadKV's detector does: in one line."""
    path.write_text(json.dumps(numbers))
    return path


def test_query_heads_of_head_kv_are_read(tmp_path: Path) -> None:
    """In any order, each with a number for each needle; 4 query heads of 2 KV heads."""
    rows = [[[0.5, 1.5], [0.25], 3, [0.0, 0.0, 0.75]], [[2.0], [1.0], [0.5], [4.0]]]
    names = {f"{layer}-{head}": rows[layer][head] for head in range(4) for layer in (1, 0)}
    found = read_scores(head_kv(tmp_path / "heads.json", names))
    assert found == (((1.0, 0.25, 3.0, 0.25), (2.0, 1.0, 0.5, 4.0)), None, None)
    # A KV head is as good as its best query head.
    assert of_kv_heads(found.scores, 2).tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert of_kv_heads(found.scores, 4).tolist() == [list(row) for row in found.scores]
    scores = HeadScores.of(found, 2, recent=9)
    assert scores.mask(0.5).tolist() == [[False, True], [False, True]]
    assert (scores.sinks, scores.recent) == (128, 9)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([], "numbers of 0 heads"),
        ({"0-0": [1.0], "1-1": [1.0]}, "2 heads, which are not all heads of 2 layers of 2"),
        ({"0": [1.0]}, "'0' is no layer and head"),
        ({"0-0": [float("nan")]}, "head 0-0 must have finite numbers"),
    ],
)
def test_other_json_is_refused(tmp_path: Path, numbers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_scores(head_kv(tmp_path / "heads.json", numbers))
    with pytest.raises(ValueError, match=r"cannot read the scores of heads in .*none\.json"):
        read_scores(tmp_path / "none.json")
