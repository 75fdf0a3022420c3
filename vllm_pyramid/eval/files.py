# SPDX-License-Identifier: Apache-2.0
"""Tasks from files of public benchmarks that the user has: LongBench and RULER.

No data, prompt or template of theirs comes with this package. A file of JSON lines becomes one
task, scored by the benchmark's own metric (`metrics.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_pyramid.eval import metrics
from vllm_pyramid.eval.entries import entries, text_field, texts_field
from vllm_pyramid.eval.haystack import Tokens
from vllm_pyramid.eval.task import Result, Sample, Task
from vllm_pyramid.model_shape import longest_of_model
from vllm_pyramid.policy.component import did_you_mean

__all__ = ["LongBench", "Ruler", "add_arguments", "load_file_tasks", "words_of"]

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

# RULER's tasks by the beginning of their names, with the tokens it generates for each.
RULER = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}

_TEMPLATES, _LENGTHS = "dataset2prompt.json", "dataset2maxlen.json"


class FileTask(Task):
    """The first entries of a file. No seed and no length changes them.

    Args:
        path: JSON lines. name: for tables. limit: returns the most tokens that a prompt may have
            when so many are to be generated.
    """

    def __init__(self, path: Path, name: str, metric: str, limit: Callable[[int], int]) -> None:
        self.path = path
        self.name = self.title = name
        self.summary = f"entries of {path.name}"
        self.metric = metric
        self._limit = limit

    def lengths(self, asked: Sequence[int]) -> Sequence[int]:
        return (0,)

    def seeds(self, asked: Sequence[int]) -> Sequence[int]:
        return tuple(asked[:1])

    def samples(self, tokens: Tokens, length: int, count: int, seed: int) -> Sequence[Sample]:
        """The first `count` entries, or all if there are fewer.

        Raises:
            ValueError: an entry that cannot be used; names the line.
        """
        made: list[Sample] = []
        for line, entry in entries(self.path):
            try:
                made.append(self._sample(tokens, entry))
            except ValueError as error:
                raise ValueError(f"{self.path}, line {line}: {error}") from error
            if len(made) == count:
                break
        if not made:
            raise ValueError(f"{self.path} has no entries")
        return made

    def _sample(self, tokens: Tokens, entry: dict[str, Any]) -> Sample:
        raise NotImplementedError


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
            raise ValueError(f"cannot fill in the template of {_TEMPLATES}: {error!r}") from error
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `load_file_tasks` reads."""
    group = parser.add_argument_group("tasks from files of public benchmarks")
    listed = group.add_argument
    listed(
        "--longbench",
        nargs="+",
        default=[],
        metavar="PATH",
        help="LongBench's .jsonl files, or a folder of them",
    )
    listed(
        "--longbench-config",
        type=Path,
        metavar="FOLDER",
        help=f"with LongBench's {_TEMPLATES} and {_LENGTHS} (default: beside the data)",
    )
    listed(
        "--ruler",
        nargs="+",
        default=[],
        metavar="PATH",
        help="RULER's generated .jsonl files, or a folder of them",
    )
    listed(
        "--max-prompt",
        type=int,
        metavar="TOKENS",
        help="longer prompts of LongBench lose their middle (default: what the model can take)",
    )
    listed(
        "--chat",
        action="store_true",
        help="put LongBench's prompts into the model's chat template (not few-shot and code)",
    )


def words_of(args: argparse.Namespace) -> list[str]:
    """The words of a command line that give these arguments."""
    words: list[str] = []
    for name in ("longbench", "ruler"):
        if getattr(args, name):
            words += [f"--{name}", *getattr(args, name)]
    if args.longbench_config is not None:
        words += ["--longbench-config", str(args.longbench_config)]
    if args.max_prompt is not None:
        words += ["--max-prompt", str(args.max_prompt)]
    return words + ["--chat"] * args.chat


def load_file_tasks(args: argparse.Namespace, model: str) -> tuple[Task, ...]:
    """The tasks of the files that were asked for, in alphabetical order; none if none was.

    Args:
        args: with what `add_arguments` added. model: its configuration says how long prompts may
            be, unless `--max-prompt` does.

    Raises:
        ValueError: a file, template or package is missing, a data set cannot be scored.
    """
    if args.max_prompt is not None and args.max_prompt < 64:
        raise ValueError(f"--max-prompt must be at least 64 tokens, not {args.max_prompt}")
    if not args.longbench and not args.ruler:
        return ()
    limit = _limit_of(model, args.max_prompt)
    tasks: list[FileTask] = []
    if args.longbench:
        metrics.check_packages()
        tasks += [
            _longbench(path, args.longbench_config, limit, chat=args.chat)
            for path in _longbench_files(args.longbench)
        ]
    tasks += [
        Ruler(path, *_ruler_task(path), limit)
        for path in _files(args.ruler, "--ruler", "**/*.jsonl")
    ]
    seen: dict[tuple[str, Sequence[int]], Path] = {}
    for task in tasks:
        other = seen.setdefault((task.name, tuple(task.lengths(()))), task.path)
        if other != task.path:
            raise ValueError(f"{other} and {task.path} are both {task.name!r}: give one of them")
    return tuple(tasks)


def _limit_of(model: str, asked: int | None) -> Callable[[int], int]:
    if asked is not None:
        return lambda max_tokens: asked
    longest = longest_of_model(model)
    if longest is None:
        raise ValueError(f"{model!r} does not say its maximum length: give --max-prompt TOKENS")
    # The bench starts engines with room for one token more than a prompt and its answer.
    return lambda max_tokens: longest - max_tokens - 1


def _files(paths: Sequence[str], flag: str, pattern: str) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        files = sorted(path.glob(pattern)) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            what = f"no {pattern} in the folder" if path.is_dir() else "there is no file or folder"
            raise ValueError(f"{flag}: {what} {str(path)!r}")
        found += files
    return list(dict.fromkeys(found))


def _longbench_files(paths: Sequence[str]) -> list[Path]:
    """The files. The Chinese ones of a folder are left out with a word; a named one is an error."""
    chinese = [path for path in map(Path, paths) if _dataset(path) in CHINESE]
    if chinese:
        raise ValueError(
            f"{', '.join(map(str, chinese))}: the metrics of LongBench's Chinese data sets need a "
            f"word segmenter; the bench scores {', '.join(LONGBENCH)}"
        )
    found = _files(paths, "--longbench", "*.jsonl")
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
    template = _configured(folders, _TEMPLATES, dataset)
    max_tokens = _configured(folders, _LENGTHS, dataset)
    if not isinstance(template, str) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(
            f"{_TEMPLATES} and {_LENGTHS} must give a text and a number of tokens for {dataset!r}, "
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
