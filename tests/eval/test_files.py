# SPDX-License-Identifier: Apache-2.0
"""Tasks from files: LongBench's and RULER's formats, wrong ones, cut prompts, scores."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_pyramid.eval import metrics
from vllm_pyramid.eval import run as run_module
from vllm_pyramid.eval.files import add_arguments, load_file_tasks, words_of
from vllm_pyramid.eval.haystack import Tokens
from vllm_pyramid.eval.longbench import CHINESE, LONGBENCH
from vllm_pyramid.eval.report import tables
from vllm_pyramid.eval.results import rows_of
from vllm_pyramid.eval.run import Run, Settings
from vllm_pyramid.eval.task import Result, Task
from vllm_pyramid.eval.variants import Variant

pytestmark = pytest.mark.cpu

CLASSES = ["Food", "City", "Other location"]
# What a reference looks like where not every text is one.
REFERENCES = {
    "passage_count": "7",
    "passage_retrieval_en": "Paragraph 7",
    "trec": "City",
    "lcc": "return x",
    "repobench-p": "return x",
}
OTHERS = {"passage_retrieval_en": "Paragraph 30"}


class Letters:
    """A tokenizer of one token a character, behind a first one that stands for `<s>`."""

    bos_token = "<s>"
    bos_token_id = 0
    chat_template: str | None = "{user}"

    def encode(self, text: str) -> list[int]:
        return [0, *map(ord, text)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(chr, filter(None, ids)))

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        return f"<s>[{messages[0]['role']}] {messages[0]['content']} [reply] "


TOKENS = Tokens(Letters())


def result(text: str) -> Result:
    return Result(text=text, computed_tokens=100, kept_tokens=[10], memory=0.1)


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def entry(dataset: str, /, **changes: Any) -> dict[str, Any]:
    return {
        "input": "Who came?",
        "context": "Ada came.",
        "answers": [OTHERS.get(dataset, "nobody at all"), REFERENCES.get(dataset, "Ada Lovelace")],
        "length": 4,
        "dataset": dataset,
        "language": "en",
        "all_classes": CLASSES if dataset == "trec" else None,
        "_id": "1",
    } | changes


def configure(folder: Path, datasets: Sequence[str] = LONGBENCH) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    prompts = dict.fromkeys(datasets, "Read {context} Q: {input} A:")
    (folder / "dataset2prompt.json").write_text(json.dumps(prompts))
    (folder / "dataset2maxlen.json").write_text(json.dumps(dict.fromkeys(datasets, 16)))


def load(*words: object) -> tuple[Task, ...]:
    return load_file_tasks(parse(*words, "--max-prompt", 1000), "no model is read")


def parse(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([*map(str, words)])


def samples(task: Task, count: int = 5) -> Sequence[Any]:
    return task.samples(TOKENS, task.lengths((1024,))[0], count, 0)


# ---- metrics, each value computed by hand --------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("The cat, sat!", "a cat sat DOWN", 2 * 2 / (2 + 3)),
        ("yes yes", "yes", 2 * 1 / (2 + 1)),
        ("theatre", "the theatre", 1.0),  # an article goes only as a word of its own
        ("no", "yes", 0.0),
        ("", "yes", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_token_f1(answer: str, reference: str, value: float) -> None:
    assert metrics.token_f1(answer, reference) == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("police kill the gunman", "Police killed the gunman.", 3 / 4),  # words are not stemmed
        ("red blue", "red green blue white", 2 * 1 * 0.5 / (1 + 0.5)),
        ("blue red", "red blue", 1 / 2),  # the order counts
        ("", "red", 0.0),
    ],
)
def test_rouge_l(answer: str, reference: str, value: float) -> None:
    assert metrics.rouge_l(answer, reference) == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("Type: City", "City", 1.0),
        ("City or Food", "City", 1 / 2),
        ("Food", "City", 0.0),
        ("Other location", "Other location", 1.0),  # "location" is a part of the right one
        ("location", "Other location", 0.0),
        ("", "City", 0.0),
    ],
)
def test_classification(answer: str, reference: str, value: float) -> None:
    classes = [*CLASSES, "location"]
    assert metrics.classification(answer, reference, classes) == value


def test_numbers() -> None:
    assert metrics.count("There are 3, not 4.", "3") == 1 / 2
    assert metrics.count("13", "3") == 0
    assert metrics.count("three", "3") == 0
    assert metrics.retrieval("Paragraph 12 of 30, so 12", "Paragraph 12") == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="'12' names no paragraph"):
        metrics.retrieval("Paragraph 12", "12")


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("\nreturn x\nmore", 1.0),
        ("```python\n# it returns\n// x\nreturn y", 2 * 7 / (8 + 8)),  # seven letters in common
        ("# nothing but this", 0.0),
        ("", 0.0),
    ],
)
def test_code_similarity(answer: str, value: float) -> None:
    assert metrics.code_similarity(answer, "return x") == pytest.approx(value)


def test_string_match() -> None:
    assert metrics.string_match_all("it is ALPHA and beta", ["alpha", "Beta", "gamma"]) == 2 / 3
    assert metrics.string_match_part("it is ALPHA", ["gamma", "alpha"]) == 1
    assert metrics.string_match_part("it is", ["gamma", "alpha"]) == 0


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None if name == "rapidfuzz" else name)
    with pytest.raises(ValueError, match=r"need rapidfuzz: pip install 'vllm-pyramid\[eval\]'"):
        metrics.check_packages()


# ---- LongBench -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", LONGBENCH)
def test_every_longbench_data_set(tmp_path: Path, dataset: str) -> None:
    configure(tmp_path)
    path = write(tmp_path / f"{dataset}.jsonl", entry(dataset), entry(dataset))
    (task,) = load("--longbench", path)
    assert task.name == f"longbench/{dataset}"
    assert task.lengths((1024, 2048)) == (0,)
    first, second = samples(task)
    assert first == second
    assert first.prompt == "Read Ada came. Q: Who came? A:"
    assert first.max_tokens == 16
    assert task.score(first, result(first.answers[1])) == 1  # the best of the references
    assert task.score(first, result("")) == 0
    assert len(samples(task, 1)) == 1


def test_only_the_first_line_answers_a_few_shot_prompt(tmp_path: Path) -> None:
    configure(tmp_path)
    for dataset, value in (("trec", 1.0), ("triviaqa", 1.0), ("samsum", 1.0), ("hotpotqa", 2 / 3)):
        (task,) = load("--longbench", write(tmp_path / f"{dataset}.jsonl", entry(dataset)))
        (sample,) = samples(task)
        answer = f"\n{sample.answers[1]}\nCity Food"
        assert task.score(sample, result(answer)) == pytest.approx(value), dataset


@pytest.mark.parametrize("folder", [".", "config", "../config"])
def test_templates_are_found_beside_the_data(tmp_path: Path, folder: str) -> None:
    path = write(tmp_path / "data" / "hotpotqa_e.jsonl", entry("hotpotqa"))
    configure(tmp_path / "data" / folder)
    (task,) = load("--longbench", tmp_path / "data")
    assert task.name == "longbench/hotpotqa_e"
    assert samples(task)[0].prompt.startswith("Read")
    assert task.path == path  # type: ignore[attr-defined]


def test_a_given_template_folder_is_the_only_one_looked_at(tmp_path: Path) -> None:
    path = write(tmp_path / "hotpotqa.jsonl", entry("hotpotqa"))
    configure(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"no dataset2prompt.json in .*empty: .*THUDM/LongBench"):
        load("--longbench", path, "--longbench-config", empty)
    configure(empty, ["qasper"])
    with pytest.raises(ValueError, match=r"dataset2prompt.json has no entry 'hotpotqa'"):
        load("--longbench", path, "--longbench-config", empty)


def test_wrong_templates_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "hotpotqa.jsonl", entry("hotpotqa"))
    configure(tmp_path)
    (tmp_path / "dataset2maxlen.json").write_text('{"hotpotqa": "many"}')
    with pytest.raises(ValueError, match=r"a number of tokens for 'hotpotqa', not .* 'many'"):
        load("--longbench", path)
    configure(tmp_path)
    (tmp_path / "dataset2prompt.json").write_text('{"hotpotqa": "{question}"}')
    (task,) = load("--longbench", path)
    with pytest.raises(ValueError, match=r"line 1: cannot fill in the template .*'question'"):
        samples(task)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"input": 3}, "line 2: the field 'input' must be a text, not 3"),
        ({"answers": []}, r"line 2: the field 'answers' must be a list of texts, not \[\]"),
        ({"answers": "Ada"}, "line 2: the field 'answers' must be a list of texts, not 'Ada'"),
        ({"dataset": "qasper"}, "line 2: an entry of 'qasper' in a file named after 'trec'"),
        ({"all_classes": None}, "line 2: the field 'all_classes' must be a list of texts"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    configure(tmp_path)
    path = write(tmp_path / "trec.jsonl", entry("trec"), entry("trec", **wrong))
    (task,) = load("--longbench", path)
    assert len(samples(task, 1)) == 1  # the wrong entry is not among the first
    with pytest.raises(ValueError, match=message):
        samples(task)


@pytest.mark.parametrize("name", ["input", "context", "answers", "dataset"])
def test_missing_fields_are_named(tmp_path: Path, name: str) -> None:
    configure(tmp_path)
    short = entry("trec")
    del short[name]
    (task,) = load("--longbench", write(tmp_path / "trec.jsonl", entry("trec"), short))
    with pytest.raises(ValueError, match=f"trec.jsonl, line 2: no field '{name}'; there are: "):
        samples(task)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\n{]\n", "line 2: not JSON in UTF-8"),
        (b"\xff\n", "line 1: not JSON in UTF-8"),
        (b"[]\n", "line 1: not a JSON object"),
        (b"\n\n", "has no entries"),
    ],
)
def test_files_of_something_else(tmp_path: Path, text: bytes, message: str) -> None:
    configure(tmp_path)
    (tmp_path / "lcc.jsonl").write_bytes(text)
    (task,) = load("--longbench", tmp_path / "lcc.jsonl")
    with pytest.raises(ValueError, match=message):
        samples(task)


def test_chinese_data_sets_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(tmp_path)
    write(tmp_path / "qasper.jsonl", entry("qasper"))
    for dataset in CHINESE:
        path = write(tmp_path / f"{dataset}.jsonl", entry(dataset, language="zh"))
        with pytest.raises(ValueError, match=rf"{dataset}.jsonl: .* need a word segmenter"):
            load("--longbench", path)
    # A folder can hold all of LongBench: the others run, and what does not is said.
    assert [task.name for task in load("--longbench", tmp_path)] == ["longbench/qasper"]
    said = capsys.readouterr().err
    assert said.startswith("Left out") and all(name in said for name in CHINESE)


def test_unknown_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"named after .*\(did you mean 'hotpotqa'\?\)"):
        load("--longbench", write(tmp_path / "hotpot.jsonl", entry("hotpotqa")))
    with pytest.raises(ValueError, match="--longbench: there is no file or folder"):
        load("--longbench", tmp_path / "qasper.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"--ruler: no \*\*/\*.jsonl in the folder"):
        load("--ruler", tmp_path / "empty")
    configure(tmp_path)
    first = write(tmp_path / "qasper.jsonl", entry("qasper"))
    second = write(tmp_path / "more" / "qasper.jsonl", entry("qasper"))
    words = ("--longbench", first, second, "--longbench-config", tmp_path)
    with pytest.raises(ValueError, match="are both 'longbench/qasper'"):
        load(*words)


def test_packages_are_needed_for_longbench_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ValueError("missing")

    monkeypatch.setattr(metrics, "check_packages", missing)
    (task,) = load("--ruler", write(tmp_path / "vt.jsonl", {"input": "x", "outputs": ["A"]}))
    assert task.name == "ruler/vt"
    assert load() == ()
    configure(tmp_path)
    with pytest.raises(ValueError, match="missing"):
        load("--longbench", write(tmp_path / "qasper.jsonl", entry("qasper")))


def test_references_that_cannot_be_scored_are_found_before_the_run(tmp_path: Path) -> None:
    configure(tmp_path)
    wrong = entry("passage_retrieval_en", answers=["7"])
    (task,) = load("--longbench", write(tmp_path / "passage_retrieval_en.jsonl", wrong))
    with pytest.raises(ValueError, match="line 1: the reference '7' names no paragraph"):
        samples(task)


# ---- long prompts and chat -----------------------------------------------------------------------


def long_task(folder: Path, dataset: str, limit: int, *words: str) -> Task:
    configure(folder)
    context = "".join(f"<{number}>" for number in range(100, 200))  # 500 tokens
    path = write(folder / f"{dataset}.jsonl", entry(dataset, context=context))
    (task,) = load_file_tasks(
        parse("--longbench", path, "--max-prompt", limit, *words), "no model is read"
    )
    return task


def test_long_prompts_lose_their_middle(tmp_path: Path) -> None:
    whole = "Read " + "".join(f"<{n}>" for n in range(100, 200)) + " Q: Who came? A:"
    fits = TOKENS.count(whole)
    (sample,) = samples(long_task(tmp_path, "qasper", fits))
    assert sample.prompt == whole
    (sample,) = samples(long_task(tmp_path, "qasper", 100))
    # Half of the tokens each, the first of the front half being `<s>`.
    assert sample.prompt == whole[:49] + whole[-50:]
    assert TOKENS.count(sample.prompt) == 100
    (sample,) = samples(long_task(tmp_path, "qasper", fits - 1))
    assert sample.prompt == whole[: fits // 2 - 2] + whole[-(fits // 2 - 1) :]


def test_a_cut_that_encodes_to_more_tokens_is_cut_again(tmp_path: Path) -> None:
    class Seams(Letters):
        """Where the front and the end meet, the text takes ten more tokens."""

        def encode(self, text: str) -> list[int]:
            seam = "<199>" in text and "<150>" not in text
            return super().encode(text) + [1] * 10 * seam

    task = long_task(tmp_path, "qasper", 100)
    (sample,) = task.samples(Tokens(Seams()), 0, 1, 0)
    assert Tokens(Seams()).count(sample.prompt) <= 100
    assert len(sample.prompt) in (88, 89)


def test_chat(tmp_path: Path) -> None:
    (sample,) = samples(long_task(tmp_path, "qasper", 1000, "--chat"))
    # Without the template's own `<s>`: encoding the prompt puts one there.
    assert sample.prompt.startswith("[user] Read <100>")
    assert sample.prompt.endswith("A: [reply] ")
    (sample,) = samples(long_task(tmp_path, "qasper", 100, "--chat"))
    assert sample.prompt.startswith("[user] Read <100>")
    assert sample.prompt.endswith("A: [reply] ")
    assert TOKENS.count(sample.prompt) in (99, 100)
    # Examples and code are to be continued.
    (sample,) = samples(long_task(tmp_path, "lcc", 1000, "--chat"))
    assert sample.prompt.startswith("Read <100>")

    class Base(Letters):
        chat_template = None

    task = long_task(tmp_path, "qasper", 1000, "--chat")
    with pytest.raises(ValueError, match="line 1: this model's tokenizer has no chat template"):
        task.samples(Tokens(Base()), 0, 1, 0)


def test_the_limit_comes_from_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": "llama", "max_position_embeddings": 117}
    (model / "config.json").write_text(json.dumps(config))
    task = long_task(tmp_path, "qasper", 64)
    args = parse("--longbench", tmp_path / "qasper.jsonl")
    (task,) = load_file_tasks(args, str(model))
    assert TOKENS.count(samples(task)[0].prompt) == 117 - 16 - 1
    with pytest.raises(ValueError, match="cannot read the configuration"):
        load_file_tasks(args, str(tmp_path / "none"))
    with pytest.raises(ValueError, match="at least 64 tokens, not 5"):
        load_file_tasks(parse("--max-prompt", 5), str(model))


# ---- RULER ---------------------------------------------------------------------------------------

RULER_TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
    "niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip


@pytest.mark.parametrize("name", RULER_TASKS)
def test_every_ruler_task(tmp_path: Path, name: str) -> None:
    line = {"index": 0, "input": "Text. Ask?", "outputs": ["Alpha", "beta"], "length": 60}
    with_prefix = line | {"index": 1, "answer_prefix": " They are"}
    path = tmp_path / "4096" / "data" / name / "validation.jsonl"
    (task,) = load("--ruler", write(path, line, with_prefix).parents[2])
    assert task.name == f"ruler/{name}"
    assert task.lengths((1024,)) == (4096,)
    plain, prefixed = samples(task)
    assert (plain.prompt, prefixed.prompt) == ("Text. Ask?", "Text. Ask? They are")
    assert task.score(plain, result("it is BETA and alpha")) == 1
    assert task.score(plain, result("it is BETA")) == (1 if name.startswith("qa") else 1 / 2)
    assert task.score(plain, result("")) == 0


def test_ruler_files_can_lie_anywhere(tmp_path: Path) -> None:
    line = {"input": "x", "outputs": ["A"]}
    write(tmp_path / "qa_1.jsonl", line)
    write(tmp_path / "8192" / "qa_1.jsonl", line)
    found = load("--ruler", tmp_path)
    assert [(task.name, *task.lengths(())) for task in found] == [
        ("ruler/qa_1", 8192),
        ("ruler/qa_1", 0),
    ]
    with pytest.raises(ValueError, match="named after a task of RULER; the names begin with niah"):
        load("--ruler", write(tmp_path / "other" / "validation.jsonl", line))


def test_long_ruler_prompts_are_refused(tmp_path: Path) -> None:
    (task,) = load("--ruler", write(tmp_path / "vt.jsonl", {"input": "x" * 1000, "outputs": ["A"]}))
    with pytest.raises(ValueError, match=r"line 1: the prompt has 1,001 tokens, 1,000 are allowed"):
        samples(task)


# ---- in the bench --------------------------------------------------------------------------------


def test_words_of_gives_the_same_arguments() -> None:
    words = "--longbench a.jsonl b --ruler c --longbench-config d --max-prompt 100 --chat"
    args = parse(*words.split())
    assert parse(*words_of(args)) == args
    assert words_of(parse()) == []


def test_files_run_in_the_bench_once_for_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "longest_of_model", lambda model: None)
    configure(tmp_path)
    write(tmp_path / "qasper.jsonl", entry("qasper"), entry("qasper", context="Bob came."))
    write(tmp_path / "ruler" / "4096" / "vt.jsonl", {"input": "x", "outputs": ["A"]})
    tasks = load("--longbench", tmp_path, "--ruler", tmp_path / "ruler")
    policies = (Variant("full"), Variant("snapkv"))
    settings = Settings("none", policies, ("50%",), tasks, (1024,), 10, (0, 1, 2))
    evaluation = Run(settings, TOKENS)
    jobs = evaluation.jobs
    assert len(jobs) == 2 * (2 + 1)
    assert all(job.request.prompt_token_ids == TOKENS.encode(job.sample.prompt) for job in jobs)
    results = {job.request.key: result("Ada") for job in jobs}
    rows = rows_of(evaluation.answers(results))  # type: ignore[arg-type]
    assert {row.digits for row in rows} == {None}
    assert [(row.task, row.policy, row.n, row.seeds) for row in rows] == [
        ("longbench/qasper", "full", 2, 1),
        ("ruler/vt", "full", 1, 1),
        ("longbench/qasper", "snapkv", 2, 1),
        ("ruler/vt", "snapkv", 1, 1),
    ]
    assert [row.score for row in rows[:2]] == pytest.approx([2 / 3, 1])
    titles = [str(table.title) for table in tables(rows)]
    assert titles[0].startswith("longbench/qasper, lengths of the file: F1 (higher")
    assert titles[1].startswith("ruler/vt, 4,096 tokens: references found (higher")
