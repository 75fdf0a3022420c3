# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid show` without an engine: traces, pieces of the text, the file, wrong words."""

from __future__ import annotations

import pytest

from tests.tools.show.pages import read_page
from vllm_pyramid.tools.cli import main
from vllm_pyramid.tools.show.engine import Shown
from vllm_pyramid.tools.show.page import page
from vllm_pyramid.tools.show.pieces import pieces

pytestmark = pytest.mark.cpu

# Of two layers, for six tokens.
COUNTS = [[2, 1, 1, 0, 0, 2], [1, 0, 0, 0, 1, 2]]


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


def test_heads_with_lengths_of_their_own_show_their_mean() -> None:
    one = shown()
    one.report.update(kept_tokens=[3, 6, 2, 2], kv_heads=2)
    (policy,) = read_page(page([one], "m"))["policies"]
    assert policy["kept"] == [4.5, 2.0]


def test_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="other tokens"):
        page([shown(), shown(text="other")], "m")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["show"], "either the prompt's text or --prompt-file"),
        (["show", " "], "the prompt is empty"),
        (["show", "a", "--max-tokens", "0"], "--max-tokens 0"),
        (["show", "a", "-o", "/proc/nothing/kept.html"], "cannot write"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert reason in capsys.readouterr().err
