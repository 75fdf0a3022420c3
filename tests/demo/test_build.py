# SPDX-License-Identifier: Apache-2.0
"""The built-in model: deterministic, loadable, and with an attention worth evicting from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from vllm_pyramid.demo import build, text

pytestmark = pytest.mark.cpu

SMALL = build.Shape(
    num_layers=2,
    hidden_size=32,
    head_size=8,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
    vocab_size=320,
)


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_builds_give_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        build.write_model(folder, SMALL, text.corpus())
    first, second = map(read_all, folders)
    assert set(first) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert first == second


def test_fingerprint_follows_shape_and_text() -> None:
    corpus = ["one", "two"]
    seen = {
        build.fingerprint(build.Shape(), corpus),
        build.fingerprint(build.Shape(seed=1), corpus),
        build.fingerprint(build.Shape(), ["one", "three"]),
    }
    assert len(seen) == 3
    assert build.fingerprint(build.Shape(), corpus) in seen


def test_cache_is_built_once_and_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PYRAMID_CACHE", str(tmp_path / "cache"))
    folder = build.cached_model(SMALL)
    assert folder.parent == tmp_path / "cache"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # no scratch is left
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert build.cached_model(SMALL) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_rename_lost_to_another_process_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PYRAMID_CACHE", str(tmp_path))
    real = build.write_model

    def write_and_be_overtaken(folder: Path, shape: build.Shape, corpus: list[str]) -> None:
        monkeypatch.setattr(build, "write_model", real)
        build.cached_model(shape)  # the other process finishes first
        real(folder, shape, corpus)

    monkeypatch.setattr(build, "write_model", write_and_be_overtaken)
    folder = build.cached_model(SMALL)
    assert (folder / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PYRAMID_CACHE", str(tmp_path))
    too_large = build.Shape(hidden_size=32, num_layers=1, vocab_size=10_000_000)
    monkeypatch.setattr(build, "random_weights", lambda _: {"weight": torch.zeros(1)})
    monkeypatch.setattr(text, "corpus", lambda: ["a few words only"])
    with pytest.raises(RuntimeError, match=r"gave only \d+ tokens, not 10000000"):
        build.cached_model(too_large)
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_cache_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("VLLM_PYRAMID_CACHE", str(blocker / "cache"))
    with pytest.raises(RuntimeError, match="set VLLM_PYRAMID_CACHE"):
        build.cached_model(SMALL)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o555)
    monkeypatch.setenv("VLLM_PYRAMID_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match="set VLLM_PYRAMID_CACHE"):
        build.cached_model(SMALL)


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PYRAMID_CACHE", "/a")
    assert build.cache_root() == Path("/a")
    monkeypatch.delenv("VLLM_PYRAMID_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert build.cache_root() == Path("/b/vllm-pyramid")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_root() == Path.home() / ".cache" / "vllm-pyramid"


def test_the_built_in_model_has_the_documented_shape(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["head_dim"]) == (8, 32)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 4)
    assert config["vocab_size"] == 2048
    assert config["max_position_embeddings"] == 8192
    assert (demo_model / "model.safetensors").stat().st_size < 24 << 20
    assert "never trained" in (demo_model / "README.md").read_text()


def test_tokenizer_round_trips_any_text(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    for sample in ("A plain sentence, 42.", "naïve 漢字 😀\t\x07\n", text.prompt_text()[:5000]):
        ids = tokenizer(sample).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == sample
    english = text.prompt_text()
    assert len(english) / len(tokenizer(english).input_ids) > 3  # it did learn English


def test_chat_template(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|begin|><|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\n"
    )
    ids = tokenizer(rendered, add_special_tokens=False).input_ids
    for token in ("<|begin|>", "<|system|>", "<|user|>", "<|assistant|>"):
        assert ids.count(tokenizer.convert_tokens_to_ids(token)) == 1


def test_attention_prefers_some_tokens_and_the_answer_depends_on_them(demo_model: Path) -> None:
    """Otherwise every policy would keep equally good tokens and give one and the same answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    ids = torch.tensor([tokenizer(text.prompt_text()[:4000]).input_ids[:800]])
    model = AutoModelForCausalLM.from_pretrained(
        demo_model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
        recent = ids[:, -96:]
        short = model.generate(recent, attention_mask=torch.ones_like(recent), max_new_tokens=8)
    assert len(attentions) == 8
    for attention_BHTK in attentions:
        last = attention_BHTK[0, :, -8:].sort(dim=-1, descending=True).values
        top_share = last[..., :96].sum(-1).mean().item()
        assert top_share > 0.4, "12% of the tokens would hold 12% of a uniform attention"
    assert whole[0, 800:].tolist() != short[0, 96:].tolist()


def test_bfloat16_follows_float32(demo_model: Path) -> None:
    """A model whose rounding errors explode would make every exactness test a matter of luck."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    ids = torch.tensor([tokenizer(text.prompt_text()[:2500]).input_ids[:500]])
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=dtype).eval()
        with torch.no_grad():
            logits.append(model(ids).logits[0].float())
    error = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert error.item() < 0.08
