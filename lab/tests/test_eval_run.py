# SPDX-License-Identifier: Apache-2.0
"""A run without engines: its jobs, what it keeps and goes on from, its rows and tables."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.eval import __main__ as command
from lab.eval import run as run_module
from lab.eval.__main__ import main
from lab.eval.registry import load_task
from lab.eval.run import REFERENCE, Run, Settings, Store
from lab.eval.tables import COLUMNS, as_json, as_markdown, rows_of, tables
from lab.eval.variants import Variant, parse_variants
from lab.tests.test_eval_tasks import WordTokenizer, eviction
from vllm_pyramid.tools.child_process import ChildError
from vllm_pyramid.tools.eval import engine
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.result import Reference, Result

pytestmark = pytest.mark.cpu


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "model": "some/model",
        "policies": (Variant("full"), Variant("snapkv")),
        "budgets": ("10%", "50%"),
        "tasks": (load_task("needle"), load_task("perplexity")),
        "lengths": (256,),
        "samples": 3,
        "seeds": (0, 1),
    }
    return Settings(**{**values, **changes})


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(WordTokenizer())


@pytest.fixture(autouse=True)
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """`some/model` has no configuration to read."""
    monkeypatch.setattr(run_module, "longest_of_model", lambda model: None)


class FakeEngines:
    """Stands for `run_child`: answers like an engine that knows the text, or breaks off."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.fail_after = fail_after
        self.served: list[str] = []

    def compared(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["is_reference"]:
            assert not request["forced"] and request["budget"] is None
            ids = request["prompt_token_ids"][:3]
            return {"reference": Reference(token_ids=ids, likeliest=[], logprobs=[])}
        if request["reference"] is None:
            return {}
        assert request["forced"] == request["prompt_token_ids"][:3], "of another prompt"
        assert request["max_tokens"] == 0
        return {"agreement": 0.5, "divergence": 0.25}

    def __call__(
        self, module: str, work: Mapping[str, Any], what: str, *, offline: bool
    ) -> Iterator[dict[str, Any]]:
        yield {"stage": "starting the engine"}
        for request in work["requests"]:
            if len(self.served) == self.fail_after:
                raise ChildError(f"{what} failed")
            self.served.append(request["key"])
            memory, pages = (0.125, (3, 12)) if request["budget"] else (1.0, (None, None))
            kept = eviction([10, 6], len(request["prompt_token_ids"]), memory)
            result = Result(
                text=" 1.",
                eviction=kept.model_copy(
                    update=dict(zip(("pages_read", "pages_visible"), pages, strict=True))
                ),
                nats=math.log(4.0) if request["forced"] else None,
                **self.compared(request),
            )
            yield {"key": request["key"], "result": result.model_dump()}


def test_every_policy_and_budget_gets_the_same_prompts(tokens: Tokens) -> None:
    evaluation = Run(settings(), tokens)
    groups: dict[tuple[str, str | None], list[str]] = {}
    for job in evaluation.jobs:
        groups.setdefault((job.variant.label, job.request.budget), []).append(job.sample.prompt)
    assert list(groups) == [("full", None), ("snapkv", "10%"), ("snapkv", "50%")]
    assert len({tuple(prompts) for prompts in groups.values()}) == 1
    assert len(evaluation.jobs) == 3 * 2 * 2 * 3
    keys = [job.request.key for job in evaluation.jobs]
    assert len(set(keys)) == len(keys)


def test_an_interrupted_run_goes_on(
    tmp_path: Path, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = Run(settings(), tokens)
    path = tmp_path / "new" / "samples.jsonl"
    first = FakeEngines(fail_after=7)
    monkeypatch.setattr(engine, "run_child", first)
    store = Store(path)
    done: list[None] = []
    with pytest.raises(ChildError):
        evaluation.execute(store, lambda _: None, lambda: done.append(None))
    store.close()
    assert len(done) == 7
    with pytest.raises(RuntimeError, match="no result of"):
        list(evaluation.answers(store))

    # A line that the interruption cut off is run again.
    text = path.read_text()
    path.write_text(text[:-40])
    second = FakeEngines()
    monkeypatch.setattr(engine, "run_child", second)
    store = Store(path)
    evaluation.execute(store, lambda _: None, lambda: None)
    store.close()
    assert len(second.served) == len(evaluation.jobs) - 6
    assert not set(first.served[:6]) & set(second.served)
    again = Store(path)
    assert evaluation.missing(again) == {}
    assert len(list(evaluation.answers(again))) == len(evaluation.jobs)
    again.close()
    fresh = Store(path, fresh=True)
    assert sum(map(len, evaluation.missing(fresh).values())) == len(evaluation.jobs)
    fresh.close()


def test_rows(tmp_path: Path, tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run_child", FakeEngines())
    evaluation = Run(settings(), tokens)
    store = Store(tmp_path / "samples.jsonl")
    evaluation.execute(store, lambda _: None, lambda: None)
    answers = list(evaluation.answers(store))
    rows = rows_of(answers)
    store.close()
    seconds = {(answer.policy, answer.result.seconds is None) for answer in answers}
    assert seconds == {("full", True), ("snapkv", True)}, "batches of two tasks have no time"
    listed = list(rows.itertuples())
    assert [(row.task, row.policy, row.budget) for row in listed] == [
        (task, *rest)
        for rest in (("full", "100%"), ("snapkv", "10%"), ("snapkv", "50%"))
        for task in ("needle", "needle", "perplexity")
    ]
    needle, digits, perplexity = listed[:3]
    assert (needle.score, needle.low, needle.high) == (0.0, 0.0, 0.0)
    assert (needle.n, needle.seeds) == (6, 2)
    # The answer is "1": one digit of five where the number begins with it.
    ones = [job.sample.answers[0].startswith("1") for job in evaluation.jobs[:6]]
    assert digits.score == pytest.approx(sum(ones) / 30)
    assert digits.low <= digits.score <= digits.high
    assert perplexity.score == pytest.approx(4.0) and perplexity.metric == "perplexity"
    assert perplexity.lower_is_better and not needle.lower_is_better
    assert (listed[0].memory, listed[3].memory) == (1.0, 0.125)
    assert math.isnan(listed[0].read) and listed[3].read == 0.25

    written = json.loads(as_json(rows, {"model": "m"}))
    assert written["run"] == {"model": "m"}
    assert written["rows"][0] == {name: getattr(needle, name) for name in COLUMNS} | {"read": None}
    read = list(csv.DictReader(io.StringIO(rows.to_csv(index=False))))
    assert len(read) == 9 and read[2]["policy"] == "full" and float(read[2]["score"]) > 3.9

    shown = tables(rows)
    assert [str(table.title).split(" (")[0] for table in shown] == [
        "needle, 256 tokens: exact match",
        "needle, 256 tokens: digits right at their place",
        "perplexity, 256 tokens: perplexity",
    ]
    for table in shown[:2]:
        assert [column.header for column in table.columns] == ["policy", "10%", "50%", "100%"]
    assert list(shown[0].columns[1].cells) == ["", "0.00 (0.00 to 0.00)"]
    assert list(shown[1].columns[1].cells) == [
        "",
        f"{digits.score:.2f} ({digits.low:.2f} to {digits.high:.2f})",
    ]
    markdown = as_markdown(rows).splitlines()
    assert markdown[2:5] == [
        "| policy | 10% | 50% | 100% |",
        "|---|---:|---:|---:|",
        "| full |  |  | 0.00 (0.00 to 0.00) |",
    ]


def test_answers_are_compared_with_the_whole_caches_own(
    tmp_path: Path, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the references, once for all policies; then every request goes with its own."""
    engines = FakeEngines()
    monkeypatch.setattr(engine, "run_child", engines)
    evaluation = Run(settings(tasks=(load_task("summary"),)), tokens)
    store = Store(tmp_path / "samples.jsonl")
    missing = evaluation.missing(store)
    assert [(label, len(of)) for label, of in missing.items()] == [
        (REFERENCE, 6),
        ("full", 6),
        ("snapkv", 12),
    ]
    evaluation.execute(store, lambda _: None, lambda: None)
    assert len(engines.served) == len(set(engines.served)) == 24
    answers = list(evaluation.answers(store))
    assert {one.policy for one in answers if one.result.seconds is not None} == {"full"}
    rows = rows_of(answers)
    store.close()
    assert set(rows["metric"]) == {
        "greedy tokens as of the whole cache",
        "divergence from the whole cache, nats",
    }
    assert all(rows[rows["metric"].str.startswith("greedy")]["score"] == 0.5)
    again = Store(tmp_path / "samples.jsonl")
    more = Run(settings(tasks=(load_task("summary"),), policies=(Variant("xkv"),)), tokens)
    assert list(more.missing(again)) == ["xkv"], "the references are there"
    again.close()


def test_what_is_given_behind_a_prompt_is_no_answer(tokens: Tokens) -> None:
    evaluation = Run(settings(tasks=(load_task("second-turn"),)), tokens)
    for job in evaluation.jobs:
        prompt, lead = job.request.prompt_token_ids, job.request.forced
        assert prompt + lead == tokens.encode(job.sample.prompt + job.sample.lead)
        assert job.request.answer_tokens == len(lead) + job.sample.max_tokens > len(lead) > 0


def test_where_turns_ended_is_said_where_the_variant_says_so(tokens: Tokens) -> None:
    policies = (Variant("full"), Variant("snapkv"), Variant("snapkv", turns=True))
    tasks = (load_task("conversation"), load_task("conversation-reply"), load_task("second-turn"))
    evaluation = Run(settings(tasks=tasks, policies=policies), tokens)
    keys: dict[tuple[str, str], set[str]] = {}
    for job in evaluation.jobs:
        keys.setdefault((job.task.name, job.policy), set()).add(job.request.key)
        ends = [tokens.count(job.sample.prompt[:end]) for end in job.sample.turns]
        assert len(ends) == (2 if job.task.name.startswith("conversation") else 0)
        assert job.request.turns == (ends if job.policy == "snapkv@turns" else [])
    for task in tasks[:2]:
        assert not keys[task.name, "snapkv"] & keys[task.name, "snapkv@turns"]
    # One turn: nothing to say, so nothing else to measure.
    assert keys["second-turn", "snapkv"] == keys["second-turn", "snapkv@turns"]
    # What all are compared with is the whole cache's, whatever the variant.
    references = evaluation._references.values()
    assert references and not any(request.turns for request in references)
    whole = Run(settings(tasks=tasks, policies=(Variant("full"),)), tokens)
    assert {r.key for r in references} == {r.key for r in whole._references.values()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policies": (Variant("snapvk"),)}, "snapvk"),
        ({"policies": (Variant("snapkv", {"window": 60}),), "budgets": ("32",)}, "at least 61"),
        ({"budgets": ("5",)}, "budget 5 is too small"),
        ({"budgets": ("0%",)}, "0%"),
        ({"lengths": (40,)}, "40 tokens"),
        (
            {
                "policies": (Variant("snapkv", turns=True),),
                "tasks": (load_task("attention-recall"),),
            },
            "'snapkv@turns' evicts where earlier turns ended, so the full attention",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_an_engine_starts(
    tokens: Tokens, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Run(settings(**changes), tokens)


def test_a_run_that_stops_early_leaves_no_empty_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "rows.json"
    kept.write_text("of an earlier run")
    files = ["--csv", str(tmp_path / "rows.csv"), "--markdown", str(tmp_path / "rows.md")]
    where = ["--out", str(tmp_path), "--json", str(kept), *files]
    assert main([*where, "--model", "/nowhere"]) == 2
    assert "cannot read the tokenizer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [kept]
    assert kept.read_text() == "of an earlier run"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--samples", "0"], "--samples must be at least 1"),
        (["--lengths", "1k"], "'1k' is not a whole number"),
        (["--tasks", "needel"], "unknown task 'needel'"),
        (["--policies", ""], "--policies is empty"),
        (["--engine-args", "[1]"], "--engine-args must be a JSON object"),
        (["--engine-args", '{"kv_policy": "x"}'], "leave kv_policy out"),
        (["--engine-args", "{"], "--engine-args is not valid JSON"),
        (
            ["--json", "/nowhere/rows.json"],
            "cannot write /nowhere/rows.json: No such file",
        ),
        (["--csv", "/"], "cannot write /: Is a directory"),
        (["--policies", 'kcache:{"top_m":1}'], "--policies: policy 'kcache': unknown argument"),
        (["--model", "/nowhere"], "cannot read the tokenizer of '/nowhere'"),
        (["--max-prompt", "5"], "--max-prompt must be at least 64 tokens, not 5"),
        (["--longbench", "/nowhere"], "--longbench: there is no file or folder '/nowhere'"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_defaults_work(tokens: Tokens) -> None:
    """What plain `python -m lab.eval` asks for, up to the engines."""
    args = command.parse_args([])
    settings = Settings(
        model="some/model",
        policies=parse_variants(args.policies, "--policies"),
        budgets=tuple(args.budgets.split(",")),
        tasks=(load_task("needle"),),
        lengths=(int(args.lengths),),
        samples=1,
        seeds=(int(args.seeds),),
    )
    assert len(Run(settings, tokens).jobs) == 1 + 3 * 2


def test_other_engine_arguments_are_other_results(tokens: Tokens) -> None:
    keys = [
        {job.request.key for job in Run(settings(engine_args=arguments), tokens).jobs}
        for arguments in ({}, {"dtype": "float32"})
    ]
    assert len(keys[0]) == len(keys[1]) and not keys[0] & keys[1]


def test_a_length_beyond_the_model_is_refused(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "longest_of_model", lambda model: 256)
    with pytest.raises(ValueError, match="the model takes 256: ask for at most"):
        Run(settings(), tokens)


def test_recall_of_prompts_that_are_thinned_is_refused(tokens: Tokens) -> None:
    """Their full attention is never computed: said now, not when the engine has answered."""
    asked = {
        "policies": (Variant("full"), Variant("pyramidinfer")),
        "tasks": (load_task("attention-recall"),),
    }
    with pytest.raises(ValueError, match=r"'pyramidinfer' thins .* attention-recall measures"):
        Run(settings(**asked), tokens)
    assert Run(settings(**{**asked, "tasks": (load_task("needle"),)}), tokens).jobs


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "two-questions" in capsys.readouterr().out


def test_a_prompt_that_may_be_cut_loses_its_middle(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(type(load_task("needle"))):  # type: ignore[misc]
        def sample(self, *arguments: Any) -> Any:
            return replace(super().sample(*arguments), may_be_cut=True)

    def prompts(**changes: Any) -> list[list[int]]:
        made = Run(settings(tasks=(Cut(),), policies=(Variant("full"),), **changes), tokens)
        return [job.request.prompt_token_ids for job in made.jobs]

    whole = prompts()
    assert prompts(max_prompt=100) == [ids[:50] + ids[-50:] for ids in whole]
    # The model's own limit holds, too, with room for the answer and one token more.
    monkeypatch.setattr(run_module, "longest_of_model", lambda model: 110)
    answer = Cut().samples(tokens, 256, 1, 0)[0].max_tokens
    room = 110 - answer - 1
    assert prompts() == [ids[: room // 2] + ids[room // 2 - room :] for ids in whole]
    monkeypatch.setattr(run_module, "longest_of_model", lambda model: answer + 2)
    with pytest.raises(ValueError, match="leaves no room for a prompt"):
        prompts()
