# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.heads.queries` on the built-in model: the file that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lab.heads.model import HeadModel
from lab.heads.queries import main
from vllm_pyramid.methods.triattention import Centres
from vllm_pyramid.tools.demo import model_path

pytestmark = pytest.mark.cpu

MODEL = model_path()


@pytest.fixture(scope="module")
def model() -> HeadModel:
    return HeadModel(str(MODEL))


def test_queries_are_those_of_the_projection(model: HeadModel) -> None:
    """In the lowest layer they depend on the token alone, wherever it stands."""
    ids = [40, 41, 42, 40, 43, 40]
    queries = model.queries(ids)
    layers, heads = model.layers, model.heads
    assert queries.shape[:3] == (layers, len(ids), heads)
    torch.testing.assert_close(queries[0, 0], queries[0, 3], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(queries[0, 0], queries[0, 5], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(queries[0, 0], queries[0, 1], atol=1e-2)
    first = model.attentions[0]
    embedded = model.model.get_input_embeddings()(torch.tensor(ids))
    layer = next(m for m in model.model.modules() if hasattr(m, "input_layernorm"))
    with torch.inference_mode():
        projected = first.q_proj(layer.input_layernorm(embedded)).unflatten(-1, (heads, -1))
        if hasattr(first, "q_norm"):
            projected = first.q_norm(projected)
    torch.testing.assert_close(queries[0], projected.float(), atol=1e-4, rtol=1e-4)


def test_the_command_writes_the_means_over_all_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: HeadModel
) -> None:
    prompts = [[50, 51, 52, 53], [60, 61]]
    file, out = tmp_path / "prompts.jsonl", tmp_path / "centres.npz"
    file.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts))
    argv = ["--model", str(MODEL), "--prompts", str(file)]
    assert main([*argv, "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "over 6 tokens of 2 prompts" in said and json.dumps({"centres": str(out)}) in said
    found = Centres.read(str(out))
    queries = torch.cat([model.queries(ids) for ids in prompts], dim=1)
    torch.testing.assert_close(found.mean, queries.mean(dim=1), atol=1e-5, rtol=1e-4)
    halves = queries.unflatten(-1, (2, -1))  # channel i and i + R / 2 are a pair
    lengths = torch.hypot(halves[..., 0, :], halves[..., 1, :]).mean(dim=1)
    torch.testing.assert_close(found.length, lengths, atol=1e-5, rtol=1e-4)
