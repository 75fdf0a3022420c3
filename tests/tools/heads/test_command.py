# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid calibrate --heads` on the built-in model: the scores that it writes, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vllm_pyramid.methods.streaming_heads.score_files import read_scores
from vllm_pyramid.tools.cli import main
from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.heads.model import HeadModel
from vllm_pyramid.tools.heads.probe import Repeated
from vllm_pyramid.tools.heads.scores import CONFIG, SCORES, HeadScores

pytestmark = pytest.mark.cpu

MODEL = model_path()


def test_the_command_writes_scores(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = ["--share", "0.25", "--sinks", "16", "--recent", "32"]
    assert main(["calibrate", "--heads", "--model", str(MODEL), "-o", str(out), *sizes]) == 0
    said = capsys.readouterr().out
    assert "4 of 16 KV heads keep everything, the others 16 sinks and 32 recent tokens" in said
    assert "Kept with a length for each head: 25.4% at 8,192 tokens" in said
    assert json.dumps({"mask": str(out), "share": 0.25}) in said
    assert len((out / SCORES).read_text().splitlines()) == 8
    assert json.loads((out / CONFIG).read_text())["probe"].startswith("echo and induction")
    found = HeadScores.of(read_scores(out), 2)
    assert (found.sinks, found.recent) == (16, 32)
    # This model copies: some heads look at earlier copies, and others do not.
    assert found.scores.max() > 0.5 and found.scores.min() < 0.1


def test_a_probe_runs_the_model_itself() -> None:
    """With whole attention in all layers the logits are those of Transformers."""
    from transformers import AutoModelForCausalLM

    from vllm_pyramid.tools.heads.model import whole_attention

    model = HeadModel(str(MODEL))
    ids = Repeated(60, 2).tokens(model.ordinary_ids())
    stock = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)
    with torch.inference_mode():
        wanted = stock(torch.tensor([ids])).logits[0, -5:]
    found = model.run(ids, lambda layer, *args: whole_attention(*args), 5)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--share", "50"], "--share 50 must be at least 0 and at most 1"),
        (["--kv-policy", "xkv", "--kv-budget", "9"], "--kv-policy, --kv-budget does not go with"),
        (["-o", "/proc/out"], "cannot write /proc/out"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: list[str], message: str
) -> None:
    argv = ["calibrate", "--heads", "--model", str(MODEL), "-o", str(tmp_path / "out"), *more]
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_probed_are_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=64)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match="layers all have full attention with KV heads"):
        HeadModel(str(tmp_path))
    with pytest.raises(ValueError, match="Transformers cannot load the model /nowhere"):
        HeadModel("/nowhere/at/all")
    with pytest.raises(ValueError, match="2 copies of 5000 tokens do not fit into the model's"):
        HeadModel(str(MODEL)).check_room(Repeated(5000, 2))
