# SPDX-License-Identifier: Apache-2.0
"""The generated tasks: what their prompts hold, and what answers to them are worth."""

from __future__ import annotations

import math
import random
import re

import pytest

from lab.eval import text_tasks
from lab.eval.recall import Measured
from lab.eval.registry import GENERATED, load_task
from lab.eval.task import DIGITS_METRIC, Figure, Sample, Task
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.phrases import is_held_out
from vllm_pyramid.tools.eval.result import EvictionReport

pytestmark = pytest.mark.cpu

LENGTH = 512


class WordTokenizer:
    """A token for every word and mark, and one in front: splits as no real tokenizer does."""

    bos_token = "<s>"
    chat_template: str | None = "stands for one"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens
        pieces = re.findall(r"\w+|[^\w\s]", text)
        return [0, *(1 + hash(piece) % 1000 for piece in pieces)]

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        turns = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(turns) + "assistant: "


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(WordTokenizer())


def eviction(kept: list[int], computed: int, memory: float, policy: str = "x") -> EvictionReport:
    return EvictionReport(
        kv_policy=policy,
        prompt_tokens=computed,
        computed_tokens=computed,
        kept_tokens=kept,
        evicted_tokens=computed * len(kept) - sum(kept),
        blocks_before=1000,
        blocks_after=round(1000 * memory),
    )


def result(
    text: str = "",
    nats: float | None = None,
    recall: list[list[float]] | None = None,
    report: EvictionReport | None = None,
    agreement: float = 0.0,
) -> Measured:
    report = report or eviction([1], LENGTH, 1.0)
    return Measured(
        text=text,
        eviction=report,
        nats=nats,
        recall=recall,
        agreement=agreement,
        divergence=1 - agreement,
    )


def perfect(task: Task, sample: Sample) -> Measured:
    """Return what a model that finds everything would answer."""
    answer = (*sample.answers, "")[0]
    text = f" {answer}{' And' * (task.name == 'quote') or '. And'}"
    if task.name == "two-questions":
        text = f" 10000. The secret code of X is {answer}."
    return result(text, nats=0.0, recall=[[1.0], [1.0]], agreement=1.0)


@pytest.mark.parametrize("name", GENERATED)
def test_samples(name: str, tokens: Tokens) -> None:
    task = load_task(name)
    assert task.name == name
    samples = task.samples(tokens, LENGTH, 5, seed=3)
    assert len(samples) == 5
    assert len({sample.prompt for sample in samples}) == 5
    for sample in samples:
        assert LENGTH - 64 <= tokens.count(sample.prompt) <= LENGTH
    assert task.samples(tokens, LENGTH, 5, seed=3) == samples, "the same seed, other samples"
    assert task.samples(tokens, LENGTH, 2, seed=3) == samples[:2], "samples depend on their number"
    assert task.samples(tokens, LENGTH, 5, seed=4) != samples


@pytest.mark.parametrize("name", GENERATED)
def test_scores_of_perfect_and_empty_answers(name: str, tokens: Tokens) -> None:
    task = load_task(name)
    for sample in task.samples(tokens, LENGTH, 3, seed=0):
        best = 0.0 if name == "perplexity" else 1.0
        assert task.score(sample, perfect(task, sample)) == best
        worst = task.score(sample, result(nats=2.5, recall=[[0.0, 0.5]]))
        assert worst == {"perplexity": 2.5, "attention-recall": 0.25}.get(name, 0.0)


@pytest.mark.parametrize("name", sorted(set(GENERATED) - {"perplexity"}))
def test_the_answer_stands_in_the_prompt(name: str, tokens: Tokens) -> None:
    task = load_task(name)
    for sample in task.samples(tokens, LENGTH, 4, seed=1):
        for answer in sample.answers:
            assert answer in sample.prompt
            assert task.needs_chat or is_held_out(answer)
        assert sample.follows_full == (not sample.answers)
        # What is given behind the prompt answers the first of two questions, never the second.
        assert not any(answer in sample.lead for answer in sample.answers)


def test_no_example_comes_twice(tokens: Tokens) -> None:
    few_shot = load_task("few-shot").samples(tokens, 2048, 2, seed=0)
    for sample in few_shot:
        texts = re.findall(r"Text: (.*)", sample.prompt)
        assert len(set(texts)) == len(texts) > 40


def test_few_shot_prompts_are_as_long_as_they_can_be(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the prompts that come of counting all tokens behind each example."""
    found = load_task("few-shot").samples(tokens, 1500, 3, seed=4)
    monkeypatch.setattr(text_tasks, "_SEAM", 1500)
    assert load_task("few-shot").samples(tokens, 1500, 3, seed=4) == found
    assert all(1400 < tokens.count(sample.prompt) <= 1500 for sample in found)


def test_a_wrong_number_that_begins_alike_is_wrong(tokens: Tokens) -> None:
    task = load_task("needle")
    sample = task.samples(tokens, LENGTH, 1, seed=0)[0]
    assert task.score(sample, result(f" {sample.answers[0]}0.")) == 0.0
    assert task.score(sample, result(f"{sample.answers[0]}")) == 1.0


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (" 12345.", 1.0),
        ("12", 0.4),
        (" 12945. The", 0.8),
        (" 51234.", 0.0),
        (" 123456.", 5 / 6),
        ("It is 12345", 0.0),
        ("", 0.0),
    ],
)
def test_digits_count_at_their_place(text: str, share: float) -> None:
    sample = Sample("", ("12345",), 9)
    for name in ("needle", "multi-key"):
        assert load_task(name).digits(sample, result(text)) == pytest.approx(share)
    second = result(f" 12345. And{text}") if share else result(" 12345.")
    assert load_task("two-questions").digits(sample, second) == pytest.approx(share)


def test_other_answers_have_no_digits() -> None:
    sample = Sample("", ("12345", "67890"), 9)
    names = {"needle", "multi-key", "two-questions"}
    names |= {"second-turn", "third-turn", "conversation"}
    for name in GENERATED:
        found = result(" 12345.", nats=1.0, recall=[[0.5]])
        metrics = [figure.metric for figure in load_task(name).figures([sample], [found])]
        assert (DIGITS_METRIC in metrics) == (name in names), metrics


def test_a_later_question_follows_right_answers_to_those_before(tokens: Tokens) -> None:
    for name, given in (("second-turn", 1), ("third-turn", 2)):
        for sample in load_task(name).samples(tokens, LENGTH, 3, seed=2):
            facts = dict(re.findall(r"The secret code of (\S+) is (\d+)\.", sample.prompt))
            assert len(facts) == 3
            said = re.findall(r"The secret code of (\S+) is (\d+)\.", sample.lead)
            assert len(said) == given and set(said) < set(facts.items())
            asked = re.findall(r"What is the secret code of (\S+)\?", sample.prompt + sample.lead)
            assert [name for name, _ in said] == asked[:-1]
            assert sample.lead.endswith(f"The secret code of {asked[-1]} is")
            assert sample.answers == (facts[asked[-1]],)


def test_a_conversation_asks_for_what_its_first_turn_said(tokens: Tokens) -> None:
    """Each turn brings a text; the last question is about the first, and new."""
    for sample in load_task("conversation").samples(tokens, LENGTH, 3, seed=2):
        first, second = sample.turns
        turns = sample.prompt[:first], sample.prompt[first:second], sample.prompt[second:]
        assert all(turn.endswith("assistant: ") for turn in turns)
        assert min(map(tokens.count, turns)) > LENGTH // 5
        assert all(turn.count("What is the secret code of") == 1 for turn in turns)
        assert turns[0].count(" is ") >= 2 and sample.answers[0] in turns[0]
        assert not any(sample.answers[0] in turn for turn in (*turns[1:], sample.lead))
    for sample in load_task("conversation-reply").samples(tokens, LENGTH, 3, seed=2):
        first, second = sample.turns
        words = sample.prompt[second:].split("says about this: ")[1].split("\n")[0]
        assert words in sample.prompt[:first] and words not in sample.prompt[first:second]
        assert sample.follows_full
    for task in map(load_task, GENERATED):
        if not task.name.startswith("conversation"):
            assert not any(sample.turns for sample in task.samples(tokens, LENGTH, 1, seed=2))


def test_the_needle_stands_at_its_depth(tokens: Tokens) -> None:
    samples = load_task("needle").samples(tokens, LENGTH, 10, seed=0)
    places = []
    for sample in sorted(samples, key=lambda sample: sample.facts["depth"]):
        text = sample.prompt.split("\n\nQuestion:")[0]
        places.append(text.index(sample.answers[0]) / len(text))
    assert places[0] < 0.15 and places[-1] > 0.85
    assert places == sorted(places)
    depths = [sample.facts["depth"] for sample in samples]
    assert sorted(depths) == pytest.approx([i / 9 for i in range(10)], abs=0.006)
    assert min(depths[:3]) < 0.3 and max(depths[:3]) > 0.7, "few samples are not spread"


def test_the_second_question_is_scored(tokens: Tokens) -> None:
    task = load_task("two-questions")
    sample = task.samples(tokens, LENGTH, 1, seed=0)[0]
    right = sample.answers[0]
    assert task.score(sample, result(f" {right}.")) == 0.0  # that was the first answer
    assert task.score(sample, result(f" 1. The secret code of Y is {right}.")) == 1.0


@pytest.mark.parametrize("name", ["needle", "multi-key", "few-shot"])
def test_a_length_that_is_too_small_is_refused(name: str, tokens: Tokens) -> None:
    with pytest.raises(ValueError, match="40 tokens"):
        load_task(name).samples(tokens, 40, 1, seed=0)


def test_unknown_task() -> None:
    with pytest.raises(ValueError, match=r"unknown task 'nedle' \(did you mean 'needle'\?\)"):
        load_task("nedle")


def test_text_is_cut_to_a_number_of_tokens(tokens: Tokens) -> None:
    text = "one two three four five"
    assert tokens.first(text, 4) == "one two three"
    with pytest.raises(ValueError, match="6 tokens cannot be cut to 9"):
        tokens.first(text, 9)


def test_figures_are_means_and_perplexity_of_the_mean(tokens: Tokens) -> None:
    samples = load_task("needle").samples(tokens, LENGTH, 2, seed=0)
    results = [result(f" {samples[0].answers[0]}."), result(f" {samples[1].answers[0][:2]}")]
    assert load_task("needle").figures(samples, results) == [
        Figure("exact match", 0.5, 0.0, 1.0),
        Figure(DIGITS_METRIC, pytest.approx(0.7), pytest.approx(0.4), 1.0),
    ]
    results = [result(nats=1.0), result(nats=2.0)]
    e = math.e
    assert load_task("perplexity").figures(samples, results) == [
        Figure(
            "perplexity",
            pytest.approx(e**1.5),
            pytest.approx(e),
            pytest.approx(e**2),
            lower_is_better=True,
        )
    ]
    results = [result(agreement=0.5), result(agreement=1.0)]
    agreement, divergence = load_task("summary").figures(samples, results)
    assert agreement.score == 0.75 and divergence.score == 0.25 and divergence.lower_is_better


def test_intervals() -> None:
    """As wide as theory says, the same for equal values, and on the same draws for all."""
    rng = random.Random(1)
    values = [rng.gauss(3.0, 1.0) for _ in range(400)]
    figure = Figure.of("x", values)
    assert figure == Figure.of("x", values)
    assert figure.low is not None and figure.high is not None
    assert figure.high - figure.low == pytest.approx(2 * 1.96 / 20, rel=0.1)
    assert figure.low < figure.score < figure.high
    shifted = Figure.of("x", [value + 1 for value in values])
    assert shifted.low == pytest.approx(figure.low + 1)
    alone = Figure.of("x", [0.5])
    assert (alone.low, alone.high) == (0.5, 0.5)


def test_words_of_a_quotation_count_at_their_place(tokens: Tokens) -> None:
    sample = Sample("", ("one two three four",), 9)
    for text, share in (
        (" one two three four five", 1.0),
        ("one two 3 four", 0.75),
        ("two three four", 0.0),
        ("one", 0.25),
        ("", 0.0),
    ):
        assert load_task("quote").score(sample, result(text)) == share


def test_a_chat_needs_a_template(monkeypatch: pytest.MonkeyPatch, tokens: Tokens) -> None:
    assert tokens.can_chat
    monkeypatch.setattr(WordTokenizer, "chat_template", None)
    assert not tokens.can_chat
    for name in (name for name, task in GENERATED.items() if task.needs_chat):
        with pytest.raises(ValueError, match="has no chat template"):
            load_task(name).samples(tokens, LENGTH, 1, seed=0)
