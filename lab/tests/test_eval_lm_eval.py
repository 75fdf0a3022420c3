# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-eval: prompts from local files, its scores, errors that name what is missing."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.eval import __main__ as command
from lab.eval import run as run_module
from lab.eval.answer_figures import ANSWER_TOKENS, SPEED, with_interval
from lab.eval.lm_eval_tasks import (
    RULER_ANSWERS,
    LmEvalTask,
    NoNetworkError,
    _quiet_and_offline,
    load_tasks,
    longbench_tasks,
    ruler_tasks,
)
from lab.eval.run import Run, Settings
from lab.eval.tables import rows_of, tables
from lab.eval.task import Figure, Sample
from lab.eval.variants import Variant
from lab.tests.test_eval_tasks import eviction
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.result import Result

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

# A task of one's own, as lm-eval's documentation describes it.
YAML = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}} It is"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 5
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
filter_list:
  - name: stripped
    filter:
      - function: remove_whitespace
      - function: take_first
"""


class Letters:
    """A tokenizer of one token a character, behind a first one that stands for `<s>`."""

    bos_token = "<s>"
    chat_template: str | None = "{user}"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = list(map(ord, text.removeprefix("<s>")))
        return [0, *ids] if add_special_tokens or text.startswith("<s>") else ids

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        return f"<s>[{messages[0]['role']}] {messages[0]['content']} [reply] "


TOKENS = Tokens(Letters())


def result(text: str) -> Result:
    return Result(text=text, eviction=eviction([10], 100, 0.1))


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def samples(task: LmEvalTask, count: int = 5) -> Sequence[Sample]:
    return task.samples(TOKENS, task.lengths((1024,))[0], count, 0)


def scores(task: LmEvalTask, *texts: str) -> dict[str, float]:
    made = samples(task, len(texts))
    figures = task.figures(made, list(map(result, texts)))
    assert not any(figure.lower_is_better for figure in figures)
    return {one.metric: one.score for one in figures if one.metric != ANSWER_TOKENS}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lm-eval reads of a file is kept nowhere else."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# Tasks and data of one's own ----------------------------------------------------------------------


def test_a_yaml_file_with_a_local_file(tmp_path: Path) -> None:
    entries = [{"question": "Capital of France?", "answer": "Paris"}] * 2
    data = write(tmp_path / "capitals.jsonl", *entries)
    (tmp_path / "capitals.yaml").write_text(YAML.format(file=data))
    (task,) = load_tasks([str(tmp_path / "capitals.yaml")], chat=False)
    assert (task.name, task.lengths((1024,)), task.seeds((3, 4))) == ("capitals", (0,), (3,))
    made = samples(task)
    assert [sample.prompt for sample in made] == ["Capital of France? It is"] * 2
    assert (made[0].max_tokens, made[0].stop, made[0].may_be_cut) == (5, (".",), True)
    assert scores(task, " paris. Rome is another.", "Rome") == {"exact_match (stripped)": 0.5}


def test_missing_data_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    (tmp_path / "capitals.yaml").write_text(YAML.format(file=missing))
    with pytest.raises(ValueError, match=r"capitals.yaml': Unable to find .*/none.jsonl"):
        load_tasks([str(tmp_path / "capitals.yaml")], chat=False)
    with pytest.raises(ValueError, match=r"/none.jsonl' for lm-eval's task 'gsm8k' is missing"):
        load_tasks([f"gsm8k={missing}"], chat=False)


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the Hub's libraries nor by anything else; not to rely on the test's settings."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match=r"'Xnhyacinth/LongBench' on the Hub.*NAME=FILE.jsonl"):
        load_tasks(["longbench_qasper"], chat=False)
    with pytest.raises(NoNetworkError, match=r"asks for 'example\.org'"), _quiet_and_offline():
        socket.create_connection(("example.org", 80))
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_registered_task_on_a_file(tmp_path: Path) -> None:
    data = write(
        tmp_path / "sums.jsonl",
        {"question": "1 + 1?", "answer": "It is #### 2"},
        {"question": "1 + 2?", "answer": "It is #### 3"},
    )
    (task,) = load_tasks([f"gsm8k_cot={data}"], chat=False, max_answer=640)
    first, second = samples(task)
    assert first.max_tokens == 640
    assert first.prompt.endswith("The answer is 8.\n\nQ: 1 + 1?\nA:") and "Q:" in first.stop
    assert second.prompt.endswith("The answer is 8.\n\nQ: 1 + 2?\nA:")
    assert samples(task) == [first, second], "the same prompts again"
    found = scores(task, "The answer is 2.", "so it is 3")
    assert found["exact_match (strict-match)"] == 0.5
    assert found["exact_match (flexible-extract)"] == 1.0
    wrong = write(tmp_path / "wrong.jsonl", {"text": "1 + 1?"})
    with pytest.raises(ValueError, match=r"task 'gsm8k_cot of wrong.jsonl': 'question' is undef"):
        load_tasks([f"gsm8k_cot={wrong}"], chat=False)


def test_unknown_tasks_and_those_that_do_not_generate(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot load lm-eval's task 'gsm9k'"):
        load_tasks(["gsm9k"], chat=False)
    entry = {"question": "1 + 1?", "answer": "2"}
    yaml = YAML.format(file=write(tmp_path / "q.jsonl", entry))
    path = tmp_path / "q.yaml"
    path.write_text(yaml.replace("generate_until", "loglikelihood").split("metric_list")[0])
    (task,) = load_tasks([str(path)], chat=False)
    with pytest.raises(ValueError, match=r"'capitals': it asks for log prob.*before anything is"):
        samples(task)
    path.write_text(yaml.replace("max_gen_toks: 5", "do_sample: true\n  temperature: 1.0"))
    (task,) = load_tasks([str(path)], chat=False)
    with pytest.raises(ValueError, match="it samples its answers; this bench decodes greedily"):
        samples(task)


# LongBench ----------------------------------------------------------------------------------------


def entry(dataset: str, /, **changes: Any) -> dict[str, Any]:
    return {
        "input": "Who came?",
        "context": "Ada came.",
        "answers": ["nobody at all", "Ada Lovelace"],
        "length": 4,
        "dataset": dataset,
        "language": "en",
        "all_classes": None,
        "_id": "1",
    } | changes


@pytest.mark.parametrize(
    ("dataset", "changes", "text", "found"),
    [
        ("qasper", {}, " the Ada.", {"qa_f1_score": 2 / 3}),
        ("gov_report", {"answers": ["red green blue"]}, "red blue", {"rouge_score": 0.8}),
        ("trec", {"answers": ["City"], "all_classes": ["City", "Food"]}, "City", 1.0),
        ("trec", {"answers": ["City"], "all_classes": ["City", "Food"]}, "City Food", 0.5),
        ("passage_count", {"answers": ["7"]}, "7 or 8", 0.5),
        ("passage_retrieval_en_e", {"answers": ["Paragraph 7"]}, "Paragraph 7", 1.0),
        ("lcc", {"answers": ["return x"]}, "\n# so\nreturn x\n", {"code_sim_score": 1.0}),
        ("multifieldqa_zh", {"answers": ["北京"]}, "北京", 1.0),
    ],
)
def test_longbench_files(
    tmp_path: Path, dataset: str, changes: dict[str, Any], text: str, found: Any
) -> None:
    path = write(tmp_path / f"{dataset}.jsonl", entry(dataset, **changes))
    (task,) = longbench_tasks([str(path)], chat=False)
    assert task.name == f"longbench_{dataset}"
    (sample,) = samples(task)
    assert "Ada came." in sample.prompt and sample.may_be_cut
    made = scores(task, text)
    assert len(made) == 1
    expected = found if isinstance(found, dict) else dict.fromkeys(made, found)
    assert made == pytest.approx(expected, abs=1e-6)


def test_longbench_prompts_hold_the_question(tmp_path: Path) -> None:
    write(tmp_path / "qasper.jsonl", entry("qasper"), entry("qasper", input="Who went?"))
    (task,) = longbench_tasks([str(tmp_path)], chat=False)
    first, second = samples(task)
    assert first.prompt.endswith("\n\nQuestion: Who came?\n\nAnswer:")
    assert second.prompt.endswith("\n\nQuestion: Who went?\n\nAnswer:")
    assert len(samples(task, 1)) == 1


def test_chat_is_not_for_what_is_to_be_continued(tmp_path: Path) -> None:
    for dataset in ("qasper", "lcc"):
        write(tmp_path / f"{dataset}.jsonl", entry(dataset))
    continued, asked = longbench_tasks([str(tmp_path)], chat=True)
    (sample,) = samples(asked)
    assert sample.prompt.startswith("<s>[user] You are given")
    assert sample.prompt.endswith("Answer: [reply] ")
    assert TOKENS.encode(sample.prompt).count(0) == 1, "the first token twice"
    assert samples(continued)[0].prompt.startswith("Please complete the code")

    class Base(Letters):
        chat_template = None

    with pytest.raises(ValueError, match="this model's tokenizer has no chat template"):
        asked.samples(Tokens(Base()), 0, 1, 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: Invalid JSON"),
        (b'"text"', "line 2: Input should be an object"),
        (b"\xff\xfe", "line 2: Invalid JSON"),
        (json.dumps(entry("qasper", answers=[])).encode(), "line 2: answers: List should have"),
        (json.dumps(entry("qasper", context=None)).encode(), "line 2: context: Input should be"),
        (b'{"context": "x", "answers": ["y"]}', "line 2: input: Field required"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "qasper.jsonl"
    path.write_bytes(b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"qasper.jsonl, {message}"):
        longbench_tasks([str(path)], chat=False)


def test_unknown_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hotpot.jsonl is not named after a data set"):
        longbench_tasks([str(write(tmp_path / "hotpot.jsonl", entry("hotpotqa")))], chat=False)
    with pytest.raises(ValueError, match="--longbench: there is no file or folder"):
        longbench_tasks([str(tmp_path / "qasper.jsonl")], chat=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"--ruler: no \*\*/\*.jsonl in the folder"):
        ruler_tasks([str(tmp_path / "empty")])
    (tmp_path / "qasper.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"qasper.jsonl has no entries"):
        longbench_tasks([str(tmp_path / "qasper.jsonl")], chat=False)


def test_references_that_cannot_be_scored_are_found_before_the_run(tmp_path: Path) -> None:
    wrong = entry("passage_retrieval_en", answers=["7"])
    path = write(tmp_path / "passage_retrieval_en.jsonl", wrong)
    (task,) = longbench_tasks([str(path)], chat=False)
    with pytest.raises(ValueError, match="lm-eval's task 'longbench_passage_retrieval_en'"):
        samples(task)


# RULER --------------------------------------------------------------------------------------------

RULER_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multivalue", "vt", "cwe", "fwe", "qa_1")


@pytest.mark.parametrize("name", RULER_TASKS)
def test_ruler_files(tmp_path: Path, name: str) -> None:
    line = {"index": 0, "input": " Text {{x}}.\nAsk?\n", "outputs": ["Alpha", "beta"], "length": 60}
    with_prefix = line | {"index": 1, "answer_prefix": " They are"}
    path = tmp_path / "4096" / "data" / name / "validation.jsonl"
    (task,) = ruler_tasks([str(write(path, line, with_prefix).parents[3])])
    assert (task.name, task.lengths((1024,))) == (f"ruler_{name}", (4096,))
    plain, prefixed = samples(task)
    assert plain.prompt == line["input"] and prefixed.prompt == f"{line['input']} They are"
    assert plain.max_tokens == RULER_ANSWERS[name.split("_")[0]] and not plain.may_be_cut
    (metric,) = scores(task, "")
    assert scores(task, "it is BETA and alpha") == {metric: 1}
    assert scores(task, "it is BETA") == {metric: 1 if name.startswith("qa") else 1 / 2}
    assert scores(task, "") == {metric: 0}


def test_ruler_files_can_lie_anywhere(tmp_path: Path) -> None:
    line = {"input": "x", "outputs": ["A"]}
    write(tmp_path / "qa_1.jsonl", line)
    write(tmp_path / "8192" / "qa_1.jsonl", line)
    found = ruler_tasks([str(tmp_path)])
    assert [(task.name, *task.lengths(())) for task in found] == [
        ("ruler_qa_1", 8192),
        ("ruler_qa_1", 0),
    ]
    with pytest.raises(ValueError, match="named after a task of RULER; the names begin with niah"):
        ruler_tasks([str(write(tmp_path / "other" / "validation.jsonl", line))])


# In the bench -------------------------------------------------------------------------------------


def parse(*words: object) -> argparse.Namespace:
    return command.parse_args(list(map(str, words)))


def settings_of(*words: object) -> Settings:
    return command._settings(parse(*words), can_chat=True)


def test_a_task_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "qasper.jsonl", entry("qasper"))
    second = write(tmp_path / "more" / "qasper.jsonl", entry("qasper"))
    with pytest.raises(ValueError, match="the task 'longbench_qasper' is given twice"):
        settings_of("--longbench", first, second)


def test_the_command_of_a_run_gives_the_same_arguments() -> None:
    words = "--samples 3 --longbench a.jsonl b --ruler c --lm-eval d=e --max-prompt 100 --chat"
    args = parse(*words.split())
    assert parse(*command._command(args).split()[3:]) == args


def test_files_run_in_the_bench_once_for_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "longest_of_model", lambda model: 1000)
    write(tmp_path / "qasper.jsonl", entry("qasper"), entry("qasper", context="Bob came."))
    write(tmp_path / "ruler" / "4096" / "vt.jsonl", {"input": "x", "outputs": ["A"]})
    settings = settings_of(
        *("--longbench", tmp_path, "--ruler", tmp_path / "ruler", "--max-prompt", 500),
        *("--policies", "full,snapkv", "--budgets", "50%", "--seeds", "0,1,2"),
    )
    jobs = Run(settings, TOKENS).jobs
    assert len(jobs) == 2 * (2 + 1)
    lengths = [len(job.request.prompt_token_ids) for job in jobs]
    assert lengths == [500, 500, 2] * 2, "only LongBench's prompts are cut"
    timed = {**result("Ada").model_dump(), "seconds": 0.5}
    results = {job.request.key: timed for job in jobs}
    answers = list(Run(settings, TOKENS).answers(results))  # type: ignore[arg-type]
    rows = rows_of(answers)
    lengths, speeds = (rows[rows["metric"] == name] for name in (ANSWER_TOKENS, SPEED))
    assert list(lengths["score"]) == [3] * 4 and list(speeds["score"]) == [6] * 4
    rows = rows[~rows["metric"].isin([ANSWER_TOKENS, SPEED])]
    assert list(rows["low"].isna()) == [True, False] * 2, "only shares have intervals"
    assert list(rows[["task", "policy", "n", "seeds"]].itertuples(index=False, name=None)) == [
        ("longbench_qasper", "full", 2, 1),
        ("ruler_vt", "full", 1, 1),
        ("longbench_qasper", "snapkv", 2, 1),
        ("ruler_vt", "snapkv", 1, 1),
    ]
    assert list(rows["score"][:2]) == pytest.approx([2 / 3, 1])
    titles = [str(table.title) for table in tables(rows)]
    assert titles[0].startswith("longbench_qasper, lengths of the file: qa_f1_score (higher")
    assert titles[1].startswith("ruler_vt, 4,096 tokens: references found (higher")


def test_only_shares_of_prompts_have_wilsons_interval() -> None:
    # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    for right, count, low, high in ((81, 263, 0.2553, 0.3662), (0, 20, 0, 0.1611)):
        values = [1] * right + [0.0] * (count - right)
        share = with_interval(Figure("m", right / count, lower_is_better=True), values)
        assert (share.low, share.high) == pytest.approx((low, high), abs=5e-5)
        assert share.lower_is_better
    for other in (Figure("a mean", 0.5), Figure("of lists", 1.0), Figure("another", 0.9)):
        values = {"a mean": [0.5, 0.5], "of lists": [[1], [1]], "another": [1, 1]}[other.metric]
        assert with_interval(other, values) is other


def test_long_ruler_prompts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "longest_of_model", lambda model: 100)
    (task,) = ruler_tasks(
        [str(write(tmp_path / "vt.jsonl", {"input": "x" * 80, "outputs": ["A"]}))]
    )
    settings = Settings("none", (Variant("full"),), ("50%",), (task,), (1024,), 1, (0,))
    with pytest.raises(ValueError, match="needs 112 tokens with its answer, and the model takes"):
        Run(settings, TOKENS)


def test_other_prompts_than_before_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "vt.jsonl", {"input": "x", "outputs": ["A"]})
    (task,) = ruler_tasks([str(path)])
    made = samples(task)
    found, length = task.figures(made, [result("A")])
    assert (found.metric, found.score, length.metric) == ("references found", 1.0, ANSWER_TOKENS)
    other = Sample("y", (), 30, {"entry": 0})
    with pytest.raises(RuntimeError, match="lm-eval makes other prompts for ruler_vt than before"):
        task.figures([other], [result("A")])
