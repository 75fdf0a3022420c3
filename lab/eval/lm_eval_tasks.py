# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) under every policy.

lm-eval makes the prompts and scores the answers; engines, budgets and results are those of this
bench. So `lm_eval.evaluator.evaluate` runs with a stand-in for the model: once to collect the
prompts, and once for each policy and budget, with the answers that the engines gave.

Nothing is downloaded: a task whose data is neither a local file nor in the cache is an error.
"""

from __future__ import annotations

import io
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn
from unittest import mock

import datasets
import huggingface_hub
import lm_eval.tasks
from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from lab.eval.answer_figures import answer_figures, with_interval
from lab.eval.task import Figure, Sample, Task
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.result import Result

logging.getLogger("lm_eval").setLevel(logging.ERROR)

_LONGBENCH = Path(lm_eval.tasks.__file__).parent / "longbench"
# LongBench's examples and code are to be continued, by chat models too.
_CONTINUED = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
# RULER's tasks by the beginning of their names, with the tokens that it generates for each.
RULER_ANSWERS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}

_Texts = Annotated[list[str], Field(min_length=1)]
Respond = Callable[[list[Instance]], list[str]]


class LongBenchEntry(BaseModel):
    """A line of LongBench's own files, whose `input` is `question` in lm-eval's templates."""

    context: str
    question: str = Field(alias="input")
    answers: _Texts
    all_classes: list[str] | None = None


class RulerEntry(BaseModel):
    """A line of the files that RULER's scripts generate."""

    input: str
    outputs: _Texts
    answer_prefix: str = ""


class _StandIn(LM):
    """A stand-in for the model: `respond` gives the texts for lm-eval's requests."""

    def __init__(self, tokens: Tokens | None, respond: Respond):
        super().__init__()
        self._tokens = tokens
        self._respond = respond

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._respond(requests)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> NoReturn:
        raise ValueError(
            "it asks for log probabilities of the prompt, which come from the prefill, before "
            "anything is evicted: choose tasks that generate (output_type: generate_until)"
        )

    loglikelihood_rolling = loglikelihood
    tokenizer_name = "of the engine"  # for a cache of lm-eval's that is not used

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        assert self._tokens is not None
        return self._tokens.chat(chat_history)


class LmEvalTask(Task):
    """A task of lm-eval. No seed changes it, and its prompts have lengths of their own.

    Args:
        task: as lm-eval's `TaskManager` loads it. length: of all its prompts, 0 if it varies.
        chat: put prompts into the model's chat template. may_be_cut: see `Sample`.
        max_answer: the most tokens of an answer; None for what the task says.
    """

    def __init__(
        self,
        task: Any,
        *,
        length: int = 0,
        chat: bool = False,
        may_be_cut: bool = True,
        max_answer: int | None = None,
    ) -> None:
        self.name = str(task.config.task)
        self._task, self._length = task, length
        self._chat, self._may_be_cut, self._max_answer = chat, may_be_cut, max_answer
        self._tokens: Tokens | None = None
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)

    def lengths(self, requested: Sequence[int]) -> Sequence[int]:
        return (self._length,)

    def seeds(self, requested: Sequence[int]) -> Sequence[int]:
        return tuple(requested[:1])

    def samples(self, tokens: Tokens, length: int, count: int, seed: int) -> Sequence[Sample]:
        """Return the prompts of the first `count` entries, or of all if there are fewer."""
        found: list[Sample] = []

        def collect(requests: list[Instance]) -> list[str]:
            found.extend(map(self._sample, requests))
            return [""] * len(requests)  # finds references that cannot be scored

        self._tokens = tokens
        self._evaluate(collect, count)
        return found

    def figures(self, samples: Sequence[Sample], results: Sequence[Result]) -> list[Figure]:
        """Return a figure for each metric and filter of lm-eval, then length and speed."""
        answers = [
            postprocess_generated_text(result.text, list(sample.stop), None)
            for sample, result in zip(samples, results, strict=True)
        ]

        def respond(requests: list[Instance]) -> list[str]:
            if [self._sample(request) for request in requests] != list(samples):
                raise RuntimeError(f"lm-eval makes other prompts for {self.name} than before")
            return answers

        found = self._evaluate(respond, len({sample.facts["entry"] for sample in samples}))
        higher = found["higher_is_better"].get(self.name, {})
        logged = found["samples"][self.name]
        figures = []
        for key, value in found["results"][self.name].items():
            metric, _, of_filter = key.partition(",")
            # LongBench's metric comes once more as `score`; RULER's metrics are the lengths, those
            # without prompts -1.
            repeated = metric == "score" and len(higher) > 1
            absent = metric.isdecimal() and value == -1
            if not of_filter or metric.endswith("_stderr") or repeated or absent:
                continue
            name = metric if of_filter == "none" else f"{metric} ({of_filter})"
            figure = Figure(name, float(value), lower_is_better=higher.get(metric) is False)
            of_prompts = [one[metric] for one in logged if one["filter"] == of_filter]
            figures.append(with_interval(figure, of_prompts))
        assert self._tokens is not None
        return figures + answer_figures(self._tokens, answers, results)

    def _sample(self, request: Instance) -> Sample:
        prompt, arguments = request.args
        settings = normalize_gen_kwargs(arguments)
        if settings["do_sample"]:
            raise ValueError("it samples its answers; this bench decodes greedily")
        return Sample(
            prompt=prompt,
            answers=(),
            max_tokens=self._max_answer or settings["max_gen_toks"],
            facts={"entry": request.doc_id},
            stop=tuple(text for text in settings["until"] if text),
            may_be_cut=self._may_be_cut,
        )

    def _evaluate(self, respond: Respond, count: int) -> Any:
        self._task.set_fewshot_seed(seed=0)
        known = {"tasks": {self.name: self._task}, "groups": {}, "group_map": {}}
        try:
            with _quiet_and_offline():
                return evaluate(
                    lm=_StandIn(self._tokens, respond),
                    task_dict=known,
                    limit=count,
                    bootstrap_iters=0,
                    log_samples=True,
                    apply_chat_template=self._chat,
                )
        except (ValueError, LookupError, TypeError, TemplateError, NoNetworkError) as error:
            raise ValueError(f"lm-eval's task {self.name!r}: {error}") from error


class NoNetworkError(RuntimeError):
    """Something tried to reach another machine."""


@contextmanager
def _quiet_and_offline() -> Iterator[None]:
    """Hide progress bars; the Hub's libraries use their cache, and other look-ups of hosts fail."""

    def refuse(host: object, *_: object, **__: object) -> NoReturn:
        raise NoNetworkError(f"it asks for {host!r}")

    with (
        redirect_stderr(io.StringIO()),
        mock.patch.object(datasets.config, "HF_HUB_OFFLINE", True),
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        mock.patch.object(socket, "getaddrinfo", refuse),
    ):
        yield


@cache
def _known_tasks(within: Path | None) -> lm_eval.tasks.TaskManager:
    return lm_eval.tasks.TaskManager(include_path=within, include_defaults=within is None)


def _load(spec: str | dict[str, Any], within: Path | None = None) -> list[Any]:
    """Return lm-eval's task objects of a name, file or configuration.

    `within` is the folder of tasks to look in: to read all that lm-eval has takes ten seconds.
    """
    name = spec if isinstance(spec, str) else (spec.get("group") or spec["task"])
    try:
        with _quiet_and_offline():
            return list(_known_tasks(within).load([spec])["tasks"].values())
    except (OSError, LookupError, ValueError, ImportError, TemplateError, NoNetworkError) as error:
        reason = f"cannot load lm-eval's task {name!r}: {error.args[0] if error.args else error}"
        if isinstance(error, (ConnectionError, NoNetworkError)):
            reason += ". Nothing is downloaded: give a local file, as in --lm-eval NAME=FILE.jsonl"
        raise ValueError(reason) from error


def load_tasks(
    specs: Sequence[str], *, chat: bool, max_answer: int | None = None
) -> list[LmEvalTask]:
    """Return the tasks of a list: names, groups, `.yaml` files, and `NAME=FILE.jsonl`.

    The last is lm-eval's task NAME on the entries of a file. ValueError if lm-eval does not know
    one, or its data is not on this machine.
    """
    tasks: list[LmEvalTask] = []
    for spec in specs:
        name, equals, file = spec.partition("=")
        folder = Path(spec).absolute().parent if spec.endswith((".yaml", ".yml")) else None
        found = _load_on_file(name, Path(file)) if equals else _load(spec, folder)
        plain = name.removeprefix("longbench_").removesuffix("_e") in _CONTINUED
        settings: dict[str, Any] = {"chat": chat and not plain, "max_answer": max_answer}
        tasks += [LmEvalTask(task, **settings) for task in found]
    return tasks


def _load_on_file(name: str, path: Path) -> list[Any]:
    """Return lm-eval's task `name` on a file's entries; its prompt has no examples of others."""
    if not path.is_file():
        raise ValueError(f"the file {str(path)!r} for lm-eval's task {name!r} is missing")
    of_longbench = name.startswith("longbench_")
    task = {
        "task": name,
        "custom_dataset": _reader(path, LongBenchEntry if of_longbench else dict[str, Any]),
        "test_split": "test",
        **dict.fromkeys(["validation_split", "training_split", "fewshot_split"]),
    }
    # A group is the form in which lm-eval takes changes to a task of its own.
    group = {"group": f"{name} of {path.name}", "task": [task]}
    return _load(group, _LONGBENCH if of_longbench else None)


def longbench_tasks(paths: Sequence[str], *, chat: bool) -> list[LmEvalTask]:
    """Return lm-eval's LongBench tasks on LongBench's own files, each named after its data set.

    ValueError if a file is missing, of something else, or cannot be read.
    """
    files = _files(paths, "--longbench", "*.jsonl")
    if unknown := [path for path in files if not (_LONGBENCH / f"{path.stem}.yaml").is_file()]:
        raise ValueError(f"{unknown[0]} is not named after a data set that lm-eval has")
    return load_tasks([f"longbench_{path.stem}={path}" for path in files], chat=chat)


def ruler_tasks(paths: Sequence[str]) -> list[LmEvalTask]:
    """Return RULER's tasks on the files that its scripts generate, scored by lm-eval's matching.

    lm-eval's own RULER tasks download some of their data. Prompts are never cut, since the answer
    could be lost. ValueError if a file is missing, of an unknown task, or cannot be read.
    """
    tasks = []
    for path in _files(paths, "--ruler", "**/*.jsonl"):
        above = path.absolute().parents
        names = [n for n in (path.stem, above[0].name) if n.split("_")[0] in RULER_ANSWERS]
        if not names:
            raise ValueError(
                f"{path}: neither the file nor its folder is named after a task of RULER; the "
                f"names begin with {', '.join(RULER_ANSWERS)}"
            )
        # RULER's scripts write `4096/data/vt/validation.jsonl`.
        lengths = [int(folder.name) for folder in above[:3] if folder.name.isdecimal()]
        (task,) = _load(_ruler_task(names[0], path), path.parent)
        tasks.append(LmEvalTask(task, length=(*lengths, 0)[0], may_be_cut=False))
    return tasks


def _ruler_task(name: str, path: Path) -> dict[str, Any]:
    kind = name.split("_")[0]
    metric = "any reference found" if kind == "qa" else "references found"

    def process_results(doc: dict[str, Any], answers: list[str]) -> dict[str, float]:
        answers, outputs = postprocess_pred(answers), doc["outputs"]
        groups = [[one] for one in outputs] if kind == "qa" else [outputs]
        return {metric: max(string_match_all(answers, [group]) for group in groups)}

    return {
        "task": f"ruler_{name}",
        "custom_dataset": _reader(path, RulerEntry),
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": lambda doc: doc["input"] + doc["answer_prefix"],
        "doc_to_target": lambda doc: doc["outputs"],
        "process_results": process_results,
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {"max_gen_toks": RULER_ANSWERS[kind], "until": []},
    }


def _reader(path: Path, entry: Any) -> Callable[..., dict[str, datasets.Dataset]]:
    """Read a file now; return what gives its entries to lm-eval. ValueError names a wrong line."""
    adapter: TypeAdapter[Any] = TypeAdapter(entry)
    entries = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            if line.strip():
                entries.append(adapter.dump_python(adapter.validate_json(line)))
        except ValidationError as error:
            wrong = error.errors()[0]
            field = "".join(f"{part}: " for part in wrong["loc"])
            raise ValueError(f"{path}, line {number}: {field}{wrong['msg']}") from None
    if not entries:
        raise ValueError(f"{path} has no entries")
    return lambda **_: {"test": datasets.Dataset.from_list(entries)}


def _files(paths: Sequence[str], flag: str, pattern: str) -> list[Path]:
    """Return the files, and of folders those that match `pattern`, each once, in order."""
    found: list[Path] = []
    for path in map(Path, paths):
        files = sorted(path.glob(pattern)) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            what = f"no {pattern} in the folder" if path.is_dir() else "there is no file or folder"
            raise ValueError(f"{flag}: {what} {str(path)!r}")
        found += files
    return list(dict.fromkeys(found))
