# SPDX-License-Identifier: Apache-2.0
"""RULER's tasks (https://arxiv.org/abs/2404.06654), from the files that the user has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_pyramid.eval import metrics
from vllm_pyramid.eval.entries import text_field, texts_field
from vllm_pyramid.eval.file_task import FileTask, find_files
from vllm_pyramid.eval.haystack import Tokens
from vllm_pyramid.eval.task import Result, Sample

__all__ = ["RULER", "Ruler", "ruler_tasks"]

# RULER's tasks by the beginning of their names, with the tokens it generates for each.
RULER = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


class Ruler(FileTask):
    """One task of RULER (https://arxiv.org/abs/2404.06654), in the files that its scripts generate.

    Args:
        task: RULER's name of it, such as `niah_single_1`. length: that the file was generated for,
            0 if unknown.
    """

    def __init__(self, path: Path, task: str, length: int, limit: Callable[[int], int]) -> None:
        self.kind = task.split("_")[0]
        some = self.kind == "qa"
        super().__init__(
            path, f"ruler/{task}", "any reference found" if some else "references found", limit
        )
        self.length = length
        self._match = metrics.string_match_part if some else metrics.string_match_all

    def lengths(self, asked: Sequence[int]) -> Sequence[int]:
        return (self.length,)

    def _sample(self, tokens: Tokens, entry: dict[str, Any]) -> Sample:
        prompt = text_field(entry, "input")
        if "answer_prefix" in entry:
            prompt += text_field(entry, "answer_prefix")
        max_tokens = RULER[self.kind]
        limit, length = self._limit(max_tokens), tokens.count(prompt)
        if length > limit:
            raise ValueError(
                f"the prompt has {length:,} tokens, {limit:,} are allowed (the model's maximum "
                f"length less {max_tokens} to generate, or --max-prompt). RULER's prompts are not "
                "shortened, the answer could be cut out: generate the data for a shorter length"
            )
        return Sample(prompt, texts_field(entry, "outputs"), max_tokens)

    def score(self, sample: Sample, result: Result) -> float:
        return self._match(result.text, sample.answers)


def ruler_tasks(paths: Sequence[str], limit: Callable[[int], int]) -> list[Ruler]:
    """One task a file, named after it or its folder.

    Args:
        paths: files, and folders of them. limit: see `FileTask`.

    Raises:
        ValueError: a file is missing, or its task is unknown.
    """
    files = find_files(paths, "--ruler", "**/*.jsonl")
    return [Ruler(path, *_ruler_task(path), limit) for path in files]


def _ruler_task(path: Path) -> tuple[str, int]:
    """RULER's name of the task and the length, from the path: `4096/data/vt/validation.jsonl`."""
    above = path.absolute().parents
    for name in (path.stem, above[0].name):
        if name.split("_")[0] in RULER:
            numbers = [folder.name for folder in above[:3] if folder.name.isdecimal()]
            return name, int(numbers[0]) if numbers else 0
    raise ValueError(
        f"{path}: neither the file nor its folder is named after a task of RULER; the names "
        f"begin with {', '.join(RULER)}"
    )
