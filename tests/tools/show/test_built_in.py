# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid show` on the built-in model: the file holds what the engine's trace says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plumbing.browser import browser, complaints, take_picture
from tests.tools.show.pages import read_page
from vllm_pyramid.tools.cli import main
from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.demo.run import build_prompt

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.usefixtures("prepared_programs")]

POLICIES = "pyramidkv,streaming-llm"


def show(tmp_path: Path) -> tuple[str, list[str]]:
    """The prompt, and the command that shows it."""
    prompt, _ = build_prompt(model_path(), 400)
    file = tmp_path / "prompt.txt"
    file.write_text(prompt, encoding="utf-8")
    argv = ["show", "--prompt-file", str(file), "--policies", POLICIES, "--kv-budget", "20%"]
    argv += ["--max-tokens", "4", "-o", str(tmp_path / "kept.html")]
    return prompt, [*argv, "--traces", str(tmp_path / "traces")]


def test_the_file_is_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt, argv = show(tmp_path)
    assert main(argv) == 0
    assert "pyramidkv: 2" in capsys.readouterr().out
    data = read_page((tmp_path / "kept.html").read_text(encoding="utf-8"))
    assert [policy["name"] for policy in data["policies"]] == POLICIES.split(",")
    for policy in data["policies"]:
        check(policy, tmp_path / "traces" / policy["name"], len(data["pieces"]))
    pyramid, stream = data["policies"]
    assert pyramid["kept"][0] > pyramid["kept"][-1] and stream["kept"][0] == stream["kept"][-1]
    texts = [piece for piece in data["pieces"] if not piece.startswith("⟨")]
    assert "".join(texts) == prompt
    # A folder with traces is not mixed with others'.
    assert main(argv) == 2
    assert "holds traces already" in capsys.readouterr().err
    with browser() as running:
        running.get((tmp_path / "kept.html").as_uri())
        assert complaints(running) == []
        take_picture(running, "show.png", tmp_path)


def check(policy: dict[str, Any], traces: Path, tokens: int) -> None:
    """What the file says of a policy is what its trace says, counted once more with loops."""
    (path,) = traces.glob("*.npz")
    with np.load(path) as trace:
        assert int(trace["prompt_len"]) == tokens
        assert policy["kept"] == trace["held"].tolist()
        assert policy["layers"] == trace["layers"].tolist()
        for layer, counts in enumerate(policy["counts"]):
            heads = trace[f"kept_{layer}"]
            assert policy["heads"][layer] == len(heads)
            wanted = [sum(place in row for row in heads.tolist()) for place in range(tokens)]
            assert counts.tolist() == wanted
            assert 0 < sum(wanted) < tokens * len(heads)
