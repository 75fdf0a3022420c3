# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid show` without an engine: traces, pieces of the text, the file, wrong words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_pyramid.tools.cli import main
from vllm_pyramid.tools.show.engine import Shown
from vllm_pyramid.tools.show.kept import pieces, read_kept
from vllm_pyramid.tools.show.page import page, read_page

pytestmark = pytest.mark.cpu

TOKENS = 6
# Of two layers and two KV heads.
KEPT = {0: [[0, 1, 5], [0, 2, 5]], 1: [[0, 5], [4, 5]]}
COUNTS = [[2, 1, 1, 0, 0, 2], [1, 0, 0, 0, 1, 2]]


def write(path: Path, kept: dict[int, list[list[int]]], held: list[int], **changes: object) -> None:
    arrays: dict[str, Any] = {
        f"kept_{layer}": np.array(rows, np.int32) for layer, rows in kept.items()
    }
    common = {"request_id": "r", "prompt_len": TOKENS, "layers": [1, 3], "held": held}
    np.savez(path, **(arrays | common | changes))


def test_counts_of_one_file(tmp_path: Path) -> None:
    write(tmp_path / "r.npz", KEPT, [3, 2])
    write(tmp_path / "r@9.npz", KEPT, [3, 2], computed=9)  # has a prompt_len here: another request
    (kept, _) = read_kept(tmp_path)
    assert kept.counts.tolist() == COUNTS
    assert (kept.layers, kept.heads, kept.tokens) == ([1, 3], [2, 2], TOKENS)


def test_later_evictions_are_left_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "r@9.npz", request_id="r", computed=9)
    assert read_kept(tmp_path) == []


@pytest.mark.parametrize("by", ["rank", "stage", "both"])
def test_parts_are_put_together(by: str, tmp_path: Path) -> None:
    for layer, heads in KEPT.items():
        for head, places in enumerate(heads):
            stage, rank = f"-stage{layer}" * (by != "rank"), f"-rank{head}" * (by != "stage")
            if by == "stage" and head == 0:
                write(tmp_path / f"r{stage}.npz", {layer: heads}, [3, 2])
            elif by == "rank" and layer == 0:
                of_rank = {each: [rows[head]] for each, rows in KEPT.items()}
                write(tmp_path / f"r{rank}.npz", of_rank, [3, 2])
            elif by == "both":
                write(tmp_path / f"r{stage}{rank}.npz", {layer: [places]}, [3, 2])
    (kept,) = read_kept(tmp_path)
    assert kept.counts.tolist() == COUNTS and kept.heads == [2, 2]


def test_missing_parts_are_noticed(tmp_path: Path) -> None:
    write(tmp_path / "r-stage0.npz", {0: KEPT[0]}, [3, 2])
    with pytest.raises(ValueError, match="a stage lacks"):
        read_kept(tmp_path)
    write(tmp_path / "r-stage0.npz", KEPT, [4, 2])
    with pytest.raises(ValueError, match="not \\[8, 4\\]"):
        read_kept(tmp_path)


def test_pieces_are_the_text() -> None:
    text = "One tree: 木.\n"
    offsets = [(0, 0), (0, 3), (4, 8), (8, 9), (10, 11), (10, 11), (11, 12), (12, 13)]
    names = ["<s>", "One", "tree", ":", "a", "b", ".", "n"]
    found = pieces(text, offsets, names)
    assert found == ["⟨s⟩", "One", " tree", ":", " 木", "", ".", "\n"]
    assert "".join(found[1:]) == text


def shown(policy: str = "pyramidkv", text: str = "a</script><b>") -> Shown:
    return Shown(
        policy=policy,
        answer="<!-- 1 & 2",
        report={"kv_budget": 3, "kept_tokens": [3, 2], "blocks_before": 2, "blocks_after": 1},
        pieces=[text, *"bcdef"],
        layers=[1, 3],
        heads=[2, 2],
        counts=COUNTS,
    )


def test_the_file_holds_what_it_was_given_and_loads_nothing() -> None:
    text = page([shown(), shown("full")], "a model")
    data = read_page(text)
    assert data["pieces"] == ["a</script><b>", *"bcdef"] and data["model"] == "a model"
    assert [policy["name"] for policy in data["policies"]] == ["pyramidkv", "full"]
    for policy in data["policies"]:
        assert policy["counts"].tolist() == COUNTS and policy["answer"] == "<!-- 1 & 2"
    assert text.count("</script>") == 2 and "<b>" not in text and "<!-- 1" not in text
    assert "http" not in text and "src=" not in text and "@import" not in text


def test_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="other tokens"):
        page([shown(), shown(text="other")], "m")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["show"], "either the prompt's text or --prompt-file"),
        (["show", "a", "--prompt-file", "b"], "either the prompt's text or --prompt-file"),
        (["show", " "], "the prompt is empty"),
        (["show", "--prompt-file", "/nowhere"], "cannot read the prompt /nowhere"),
        (["show", "a", "--policies", "nonsense"], "nonsense"),
        (["show", "a", "--kv-budget", "-1"], "-1"),
        (["show", "a", "--max-tokens", "0"], "--max-tokens 0"),
        (["show", "a", "--engine-args", "{"], "not valid JSON"),
        (["show", "a", "-o", "/proc/nothing/kept.html"], "cannot write"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert reason in capsys.readouterr().err
