# SPDX-License-Identifier: Apache-2.0
"""LongBench's data sets (https://arxiv.org/abs/2308.14508), from the files that the user has."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_pyramid.eval import metrics
from vllm_pyramid.eval.entries import text_field, texts_field
from vllm_pyramid.eval.file_task import FileTask, find_files
from vllm_pyramid.eval.haystack import Tokens
from vllm_pyramid.eval.task import Result, Sample
from vllm_pyramid.policy.component import did_you_mean

__all__ = ["CHINESE", "LENGTHS", "LONGBENCH", "TEMPLATES", "LongBench", "longbench_tasks"]

# Score of one answer against one reference, by data set.
_SCORES: dict[str, tuple[str, Callable[[str, str], float]]] = {
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"),
        ("F1", metrics.token_f1),
    ),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), ("ROUGE-L", metrics.rouge_l)),
    "passage_count": ("share of numbers", metrics.count),
    "passage_retrieval_en": ("share of numbers", metrics.retrieval),
    **dict.fromkeys(("lcc", "repobench-p"), ("edit similarity", metrics.code_similarity)),
}
_CLASSIFIED = ("trec",)  # scored against a list of classes
LONGBENCH = (*_SCORES, *_CLASSIFIED)
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
# The answer is the first line; what follows is the model inventing further examples.
_FIRST_LINE = ("trec", "triviaqa", "samsum")
# LongBench gives these to chat models as plain text too: examples and code to be continued.
_PLAIN = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")

# Its prompts and output lengths.
TEMPLATES, LENGTHS = "dataset2prompt.json", "dataset2maxlen.json"


class LongBench(FileTask):
    """One data set of LongBench (https://arxiv.org/abs/2308.14508).

    A prompt over the limit loses its middle, as in the benchmark: what is asked stands at the
    beginning or at the end.

    Args:
        dataset: which one. template, max_tokens: the benchmark's prompt and output length for it.
        chat: put prompts into the model's chat template, but not those that are to be continued.
    """

    def __init__(
        self,
        path: Path,
        dataset: str,
        template: str,
        max_tokens: int,
        limit: Callable[[int], int],
        *,
        chat: bool = False,
    ) -> None:
        metric = _SCORES[dataset][0] if dataset in _SCORES else "accuracy"
        super().__init__(path, f"longbench/{path.stem}", metric, limit)
        self.dataset = dataset
        self._template = template
        self._max_tokens = max_tokens
        self._chat = chat and dataset not in _PLAIN

    def _sample(self, tokens: Tokens, entry: dict[str, Any]) -> Sample:
        said = text_field(entry, "dataset").removesuffix("_e")
        if said != self.dataset:
            raise ValueError(f"an entry of {said!r} in a file named after {self.dataset!r}")
        for name in ("input", "context"):
            text_field(entry, name)
        answers = texts_field(entry, "answers")
        facts = (
            {"classes": texts_field(entry, "all_classes")} if self.dataset in _CLASSIFIED else {}
        )
        sample = Sample("", answers, self._max_tokens, facts)
        # A reference that cannot be scored is found now, not when the engines have run.
        self._score(sample, "")
        try:
            prompt = self._template.format_map(entry)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"cannot fill in the template of {TEMPLATES}: {error!r}") from error
        prompt = _cut(tokens, prompt, self._limit(self._max_tokens), chat=self._chat)
        return replace(sample, prompt=prompt)

    def score(self, sample: Sample, result: Result) -> float:
        """The best score over the references."""
        return self._score(sample, result.text)

    def _score(self, sample: Sample, text: str) -> float:
        if self.dataset in _FIRST_LINE:
            text = text.lstrip("\n").split("\n")[0]
        if self.dataset in _CLASSIFIED:
            classes = sample.facts["classes"]
            return max(metrics.classification(text, answer, classes) for answer in sample.answers)
        score = _SCORES[self.dataset][1]
        return max(score(text, answer) for answer in sample.answers)


def _cut(tokens: Tokens, prompt: str, limit: int, *, chat: bool) -> str:
    """The prompt, in the chat template if asked for, with at most `limit` tokens in all.

    What is over is taken from the middle: half of the tokens come from the front and half from the
    end. Decoded and encoded again they can be a few more, so it is counted again.
    """

    def finish(text: str) -> str:
        return tokens.chat(text) if chat else text

    text = finish(prompt)
    excess = tokens.count(text) - limit
    ids = tokens.encode(prompt)
    room = min(limit, len(ids)) if excess > 0 else 0
    while excess > 0:
        half = room // 2
        if half < 1:
            raise ValueError(f"a limit of {limit:,} prompt tokens leaves no room for the text")
        text = finish(tokens.decode(ids[:half]) + tokens.decode(ids[-half:]))
        excess = tokens.count(text) - limit
        room -= max(excess, 0)
    return text


def longbench_tasks(
    paths: Sequence[str], config: Path | None, limit: Callable[[int], int], *, chat: bool
) -> list[LongBench]:
    """One task a file, named after its data set.

    Args:
        paths: files, and folders of them. config: folder of the templates; None: beside the data.
        limit, chat: see `LongBench`.

    Raises:
        ValueError: a file, a template or a package is missing, or a data set cannot be scored.
    """
    metrics.check_packages()
    return [_longbench(path, config, limit, chat=chat) for path in _longbench_files(paths)]


def _longbench_files(paths: Sequence[str]) -> list[Path]:
    """The files. The Chinese ones of a folder are left out with a word; a named one is an error."""
    chinese = [path for path in map(Path, paths) if _dataset(path) in CHINESE]
    if chinese:
        raise ValueError(
            f"{', '.join(map(str, chinese))}: the metrics of LongBench's Chinese data sets need a "
            f"word segmenter; the bench scores {', '.join(LONGBENCH)}"
        )
    found = find_files(paths, "--longbench", "*.jsonl")
    left_out = [path.stem for path in found if _dataset(path) in CHINESE]
    if left_out:
        print(
            f"Left out, since their metrics need a Chinese word segmenter: {', '.join(left_out)}.",
            file=sys.stderr,
        )
    return [path for path in found if _dataset(path) not in CHINESE]


def _dataset(path: Path) -> str:
    """A file's data set; LongBench-E's files have the same names with an ending."""
    return path.stem.removesuffix("_e")


def _longbench(
    path: Path, config: Path | None, limit: Callable[[int], int], *, chat: bool
) -> LongBench:
    dataset = _dataset(path)
    if dataset not in LONGBENCH:
        raise ValueError(
            f"{path} is not named after a data set of LongBench{did_you_mean(dataset, LONGBENCH)}; "
            f"there are: {', '.join(LONGBENCH)}"
        )
    here = path.absolute().parent
    folders = [config] if config else [here, here / "config", here.parent / "config"]
    template = _configured(folders, TEMPLATES, dataset)
    max_tokens = _configured(folders, LENGTHS, dataset)
    if not isinstance(template, str) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(
            f"{TEMPLATES} and {LENGTHS} must give a text and a number of tokens for {dataset!r}, "
            f"not {template!r:.60} and {max_tokens!r:.60}"
        )
    return LongBench(path, dataset, template, max_tokens, limit, chat=chat)


def _configured(folders: Sequence[Path], name: str, dataset: str) -> Any:
    for folder in folders:
        if (folder / name).is_file():
            try:
                values = json.loads((folder / name).read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{folder / name} is not valid JSON: {error}") from None
            if not isinstance(values, dict) or dataset not in values:
                raise ValueError(f"{folder / name} has no entry {dataset!r}")
            return values[dataset]
    raise ValueError(
        f"no {name} in {', '.join(map(str, folders))}: LongBench's prompts do not come with this "
        "package. Take the folder LongBench/config of https://github.com/THUDM/LongBench and give "
        "it as --longbench-config"
    )
