# SPDX-License-Identifier: Apache-2.0
"""Heads of the built-in model are probed and made to stream; the command says what it costs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.heads import model as models
from lab.heads.__main__ import main
from lab.heads.model import HeadModel, streaming_attention, whole_attention
from lab.heads.probe import Repeated
from lab.heads.scores import CONFIG, SCORES, HeadScores
from lab.heads.trial import Trial, try_masks
from vllm_pyramid.tools.demo import model_path

pytestmark = pytest.mark.cpu

MODEL = model_path()
SINKS, RECENT = 16, 32


@pytest.fixture(scope="module")
def model() -> HeadModel:
    return HeadModel(str(MODEL))


@pytest.fixture(scope="module")
def scores(model: HeadModel) -> HeadScores:
    return HeadScores(model.probe(Repeated(128, 2)), SINKS, RECENT)


@pytest.mark.parametrize(("sinks", "recent"), [(3, 5), (0, 1), (40, 2), (3, 100)])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_a_streaming_head_sees_what_a_mask_says(
    monkeypatch: pytest.MonkeyPatch, sinks: int, recent: int, chunk: int
) -> None:
    monkeypatch.setattr(models, "_CHUNK", chunk)
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 33, 8, generator=source) for heads in (4, 2, 2))
    found = streaming_attention(q, k, v, 0.3, sinks, recent)
    at, of = torch.arange(33)[:, None], torch.arange(33)
    seen = (of <= at) & ((of < sinks) | (of > at - recent))
    logits = torch.einsum("gqtd,gsd->gqts", q[0].unflatten(0, (2, 2)), k[0]) * 0.3
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    wanted = torch.einsum("gqts,gsd->gqtd", weights, v[0]).flatten(0, 1)
    torch.testing.assert_close(found[0], wanted)
    same = torch.allclose(found, whole_attention(q, k, v, 0.3), atol=1e-5)
    assert same == (sinks + recent >= 33)


def test_a_mask_of_all_heads_is_the_model_itself(model: HeadModel, scores: HeadScores) -> None:
    from transformers import AutoModelForCausalLM

    ids = Repeated(60, 2).tokens(model.ordinary_ids())
    stock = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)
    with torch.inference_mode():
        wanted = stock(torch.tensor([ids])).logits[0, -5:]
    every = torch.ones(model.layers, model.kv_heads, dtype=torch.bool)
    for mask in (None, every):
        found = model.logits(ids, 5, mask, scores)
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    assert torch.equal(model.logits(ids, 5, None, scores), model.logits(ids, 5, every, scores))


def test_one_head_that_streams_changes_only_what_lies_behind_its_window(
    model: HeadModel, scores: HeadScores
) -> None:
    ids = Repeated(60, 2).tokens(model.ordinary_ids())
    mask = torch.ones(model.layers, model.kv_heads, dtype=torch.bool)
    mask[-1, 0] = False
    whole = model.logits(ids, 120, None, scores)
    found = model.logits(ids, 120, mask, scores)
    near = SINKS + RECENT
    torch.testing.assert_close(found[:near], whole[:near], atol=1e-3, rtol=1e-3)
    assert (found[near:] - whole[near:]).abs().max() > 0.05


def test_heads_that_the_probe_finds_copy_and_the_others_do_not(
    model: HeadModel, scores: HeadScores
) -> None:
    mask = scores.mask(0.5)
    text = Repeated(200, 2).tokens(model.ordinary_ids(), seed=5)
    whole, found, others = try_masks(model, scores, [None, mask, ~mask], [text])
    assert whole.copied > 0.7 and whole.agreement == 1.0 and whole.divergence == 0.0
    assert found.copied > 0.9 * whole.copied > 5 * others.copied
    assert found.divergence is not None and others.divergence is not None
    assert found.divergence < 0.5 * others.divergence
    assert try_masks(model, scores, [mask], []) == [Trial(found.copied, None, None)]


def test_the_command_writes_scores_that_it_can_try(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "A plain text of some words. " * 60}) + "\n")
    own = ["--sinks", str(SINKS), "--recent", str(RECENT), "-o", str(tmp_path / "out")]
    common = ["--model", str(MODEL), "--share", "0.25"]
    assert main([*common, *own, "--prompts", str(prompts)]) == 0
    first = capsys.readouterr().out
    assert "4 of 16 KV heads keep everything, the others 16 sinks and 32 recent tokens" in first
    assert "Kept with a length for each head: 25.4% at 8,192 tokens" in first
    assert re.search(r"of whole attention for \d+\.\d% of them with the mask, \d+\.\d%", first)
    assert len((tmp_path / "out" / SCORES).read_text().splitlines()) == 8
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["tried"]["whole"]["agreement"] == 1.0 and len(config["tried"]["random"]) == 3
    assert main([*common, "--mask", str(tmp_path / "out")]) == 0
    second = capsys.readouterr().out
    assert "Random tokens copied" in second and "Your prompts" not in second
    assert second.splitlines() == first.splitlines()[: len(second.splitlines())]


def test_mean_attention_is_that_of_the_projections(model: HeadModel) -> None:
    """The probe undoes the rotation; here the projections are seen before it, as by kvpress."""
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    texts = [Repeated(length, 2).tokens(model.ordinary_ids(), seed=length) for length in (20, 90)]
    stock: Any = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32).model
    size, length = stock.layers[0].self_attn.head_dim, 500
    wanted, seen = torch.zeros(model.layers, model.kv_heads), {}
    for index, layer in enumerate(stock.layers):
        for name in ("q_proj", "k_proj"):
            getattr(layer.self_attn, name).register_forward_hook(
                lambda module, given, out, key=f"{name}{index}": seen.update({key: out[0]})
            )
    for ids in texts:
        with torch.inference_mode():
            stock(torch.tensor([ids]))
            cos, sin = stock.rotary_emb(torch.zeros(1), torch.arange(length)[None])
            for layer in range(model.layers):
                query, key = (
                    seen[f"{name}{layer}"]
                    .mean(dim=0)
                    .view(1, -1, 1, size)
                    .expand(-1, -1, length, -1)
                    for name in ("q_proj", "k_proj")
                )
                q, k = apply_rotary_pos_emb(query, key, cos, sin)
                last = q[0, :, -1].unflatten(0, (model.kv_heads, -1))
                logits = torch.einsum("gqd,gtd->gqt", last, k[0]) / size**0.5
                wanted[layer] += logits.softmax(-1).cumsum(-1).mean(-1).mean(1) / len(texts)
    found = model.mean_attention(texts)
    torch.testing.assert_close(found, wanted.double(), atol=1e-4, rtol=1e-4)
    assert found.std() > 0.01


@pytest.mark.parametrize("how", ["halves", "pairs"])
def test_the_rotary_embedding_is_found_by_what_it_does(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Llama's function, and one in the manner of GLM: other channels, the same angles."""
    from transformers.models.llama import modeling_llama as module

    own = module.apply_rotary_pos_emb

    def pairs(q: torch.Tensor, k: torch.Tensor, *angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
        return tuple(
            x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in own(*both, *angles)
        )

    if how == "pairs":
        monkeypatch.setattr(module, "apply_rotary_pos_emb", pairs)
    assert HeadModel(str(MODEL)).rotary(7).halves == (how == "halves")
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q + 1, k))
    with pytest.raises(ValueError, match="take --probe echo"):
        HeadModel(str(MODEL)).rotary(7)


def test_the_command_looks_at_texts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "A plain text of some words. " * 60}) + "\n")
    out = tmp_path / "out"
    argv = ["--model", str(MODEL), "--probe", "mean", "-o", str(out)]
    assert main(argv) == 2
    assert "--probe mean looks at texts: add --prompts" in capsys.readouterr().err
    sizes = ["--sinks", str(SINKS), "--recent", str(RECENT)]
    assert main([*argv, *sizes, "--prompts", str(prompts)]) == 0
    assert "8 of 16 KV heads keep everything" in capsys.readouterr().out
    assert json.loads((out / CONFIG).read_text())["probe"] == "mean attention over texts"
    scores = HeadScores.read(out).scores
    assert scores.min() > 0 and scores.max() < 1 and scores.std() > 0.01


def test_the_command_tries_scores_of_query_heads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: HeadModel, scores: HeadScores
) -> None:
    """A file with a head too many is refused; the probe's own scores copy as the probe's mask."""
    each = scores.scores.repeat_interleave(model.heads // model.kv_heads, dim=1)
    names = {f"{x}-{y}": [float(each[x, y])] for x in range(8) for y in range(model.heads)}
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(names))
    argv = ["--model", str(MODEL), "--mask", str(path)]
    argv += ["--sinks", str(SINKS), "--recent", str(RECENT)]
    assert main(argv) == 0
    ours = capsys.readouterr().out
    assert "the others 16 sinks and 32 recent tokens" in ours and str(path) in ours
    copied = try_masks(model, scores, [scores.mask(0.5)], [])[0].copied
    assert f"{copied:.1%} with the mask" in ours
    path.write_text(json.dumps({f"{x}-{y}": [0.5] for x in range(8) for y in range(3)}))
    assert main(argv) == 2
    message = f"8 layers of 3 heads, and this model has 8 of 2 KV heads and {model.heads} query"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--share", "50"], "--share 50 must be at least 0 and at most 1"),
        (["--recent", "0"], "--recent 0 must be at least 1"),
        (["--mask", "m", "--sinks", "3"], "--output, --sinks does not go with --mask"),
        (["--mask", "m", "--probe", "mean"], "--probe, --output does not go with --mask"),
        (["--prompts", "/nowhere.jsonl"], "cannot read the prompts"),
        (["-o", "/proc/out"], "cannot write /proc/out"),
        (["--recent", "9000"], "2 copies of 18256 tokens do not fit into the model's 8192"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: list[str], message: str
) -> None:
    argv = ["--model", str(MODEL), "-o", str(tmp_path / "out"), *more]
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_masks_and_prompts_must_fit_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    HeadScores(torch.rand(4, 2), SINKS, RECENT).write(tmp_path, {})
    argv = ["--model", str(MODEL), "--mask", str(tmp_path)]
    assert main(argv) == 2
    assert (
        "is for 4 layers of 2 heads, and this model has 8 of 2 KV heads" in capsys.readouterr().err
    )
    HeadScores(torch.rand(8, 2), SINKS, RECENT).write(tmp_path, {})
    for ids in ([5] * 303, [4096] * 304):
        (tmp_path / "p.jsonl").write_text(json.dumps({"prompt_token_ids": ids}))
        assert main([*argv, "--prompts", str(tmp_path / "p.jsonl")]) == 2
        assert f"prompt 1 has {len(ids)} tokens: from 304" in capsys.readouterr().err


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
