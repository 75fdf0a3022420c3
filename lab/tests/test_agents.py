# SPDX-License-Identifier: Apache-2.0
"""Recorded sessions: the file, their tokens, their replay, and what comes out by turn."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.agents import replay as replay_module
from lab.agents.__main__ import main
from lab.agents.measure import agreed_tokens, by_turn, made_up, turns_table
from lab.agents.recordings import Recording, read_recording, read_sessions
from lab.agents.replay import replay
from vllm_pyramid.tools.bench import prepare
from vllm_pyramid.tools.bench.job import Job, Variant
from vllm_pyramid.tools.bench.samples import Step
from vllm_pyramid.tools.bench.shapes import SHAPES
from vllm_pyramid.tools.demo import model_path

pytestmark = pytest.mark.cpu

SAMPLE = Path(__file__).resolve().parents[1] / "agents" / "sample.jsonl"
USER, ANSWER = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "It is there.", "wait": 0.5}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "sessions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recording(
    path: Path, template: str | None = "chatml", model: Any = None, **options: Any
) -> Recording:
    given = {"most_agents": None, "most_turns": None, "output_len": 8, "own_answers": False}
    return read_recording(path, str(model or model_path()), template, **{**given, **options})


def prompts(found: Recording, agent: int) -> list[list[int]]:
    """The prompts of an agent, put together as the replay does it with the recorded answers."""
    made: list[list[int]] = []
    for turn in found.agents[agent]:
        begin = [] if turn.before is None else made[turn.before][: turn.shared]
        made.append([*begin, *turn.rest])
    return made


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"session": "a", "messages": []}], "line 1: messages: List should have at least 1"),
        ([{"session": "a", "messages": [ANSWER]}], "begins with an answer to nothing"),
        ([{"session": "a", "messages": [USER]}] * 2, "line 2: there are two sessions 'a'"),
        (
            [{"session": "b", "messages": [USER], "branch_of": "a", "after": 1}],
            "branch_of 'a' is no session of an earlier line",
        ),
        ([{"session": "b", "messages": [USER], "after": 1}], "`branch_of` and `after` go together"),
        (
            [{"session": "a", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}],
            "a part of type 'image_url': only text is replayed",
        ),
        (
            [{"session": "a", "messages": [USER, {**CALLING, "tool_calls": [{"id": "1"}]}]}],
            "line 1: a tool call without 'function'",
        ),
        ([], "has no sessions"),
    ],
)
def test_wrong_files(lines: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sessions\.jsonl") as error:
        read_sessions(write(tmp_path, *lines))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_branch_behind_the_end(tmp_path: Path) -> None:
    branch = {"session": "b", "branch_of": "a", "after": 3, "messages": [USER]}
    path = write(tmp_path, {"session": "a", "messages": [USER, ANSWER]}, branch)
    with pytest.raises(ValueError, match="behind 3 messages of 'a', which has 2"):
        recording(path)


def test_templates_that_cannot_be_used(tmp_path: Path) -> None:
    path = write(tmp_path, {"session": "a", "messages": [USER, ANSWER]})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        copied = json.loads((Path(model_path()) / name).read_text(encoding="utf-8"))
        copied.pop("chat_template", None)
        (tmp_path / name).write_text(json.dumps(copied))
    with pytest.raises(ValueError, match="has no chat template: give --chat-template"):
        recording(path, None, model=tmp_path)
    with pytest.raises(ValueError, match="--chat-template: cannot read /nowhere"):
        recording(path, "/nowhere")
    refusing = tmp_path / "refusing.jinja"
    refusing.write_text("{{ raise_exception('no such role') }}")
    with pytest.raises(ValueError, match="the chat template refuses a message: no such role"):
        recording(path, str(refusing))


def test_prompts_are_what_a_server_renders(tmp_path: Path) -> None:
    """Text, tools and calls by the template; branches share turns; waits, lengths."""
    from transformers import AutoTokenizer

    messages = [USER, CALLING, RESULT, ANSWER, {**USER, "wait": 2.0}]
    other = {"role": "user", "content": [{"type": "text", "text": "Another?"}]}
    path = write(
        tmp_path,
        {"session": "a", "tools": TOOLS, "messages": messages},
        {"session": "b", "branch_of": "a", "after": 2, "messages": [other, ANSWER]},
        {"session": "c", "messages": [USER, ANSWER]},
    )
    found = recording(path)
    turns = found.agents[0]
    assert [(turn.number, turn.before, turn.wait) for turn in turns] == [
        *((1, None, 0.0), (2, 0, 0.5), (3, 1, 2.0), (2, 0, 0.0))
    ]
    assert len(found.agents) == 2 and found.branches == 2 and found.turns == 3
    texts = [AutoTokenizer.from_pretrained(model_path()).decode(p) for p in prompts(found, 0)]
    begin, call = texts[0], '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
    assert '# Tools\n{"type": "function", "function": {"name": "look"' in begin
    assert begin.endswith("<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n")
    asked = f"{begin}\n{call}<|im_end|>\n"
    assert texts[1].startswith(f"{asked}<|im_start|>tool\nIt is there.<|im_end|>")
    assert texts[2].startswith(f"{texts[1]}This one.<|im_end|>\n<|im_start|>user\nWhich?")
    assert texts[3].startswith(f"{asked}<|im_start|>user\nAnother?<|im_end|>")
    assert "# Tools" not in AutoTokenizer.from_pretrained(model_path()).decode(prompts(found, 1)[0])
    fixed = AutoTokenizer.from_pretrained(model_path()).decode(
        prompts(found, 0)[0][: turns[0].fixed]
    )
    assert fixed.endswith("<|im_end|>\n<|im_start|>user\n") and "# Tools" in fixed
    assert {turn.fixed for turn in turns} == {turns[0].fixed} and found.agents[1][0].fixed == 0
    assert [turn.prompt_len for turn in turns] == [len(prompt) for prompt in prompts(found, 0)]
    assert found.longest_prompt == len(prompts(found, 0)[2])
    # The recorded answers are longer than 8 tokens or 4; the last turn has none.
    assert [turn.max_tokens for turn in turns] == [8, turns[3].max_tokens, 8, turns[1].max_tokens]
    assert 2 <= turns[1].max_tokens < 8
    few = recording(path, most_agents=1, most_turns=1)
    assert [[turn.number for turn in turns] for turns in few.agents] == [[1]]


def test_the_engines_own_answers(tmp_path: Path) -> None:
    """They stand where the recorded ones do; a template that rewrites answers is refused."""
    path = write(tmp_path, {"session": "a", "messages": [USER, ANSWER, USER]})
    recorded, own = recording(path), recording(path, own_answers=True)
    answer = own.agents[0][1].rest
    whole = prompts(recorded, 0)[1]
    first = prompts(recorded, 0)[0]
    assert whole[: len(first)] == first and whole[-len(answer) :] == answer
    assert own.agents[0][1].shared == len(first) < len(whole) - len(answer)
    rewriting = tmp_path / "rewriting.jinja"
    rewriting.write_text(
        "{% for m in messages %}{{ m.content if loop.last else m.content | upper }};{% endfor %}"
    )
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        recording(path, str(rewriting), own_answers=True)
    assert len(recording(path, str(rewriting)).agents[0]) == 2


class FakeEngine:
    """An engine that answers each step one request, the oldest, with tokens counted from 50."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[int], Any, str, float]] = []
        self.open: list[str] = []
        self.most = 0
        self.log, self.scheduler = SimpleNamespace(preemptions=3), SimpleNamespace()
        self.client = SimpleNamespace(
            has_unfinished_requests=lambda: bool(self.open), vllm_config=None
        )

    def send(self, prompt: list[int], params: Any, salt: str) -> str:
        self.sent.append((prompt, params, salt, time.perf_counter()))
        self.open.append(str(len(self.sent) - 1))
        self.most = max(self.most, len(self.open))
        return self.open[-1]

    def step(self, on_output: Callable[[Any, float], None], finished: int) -> Step:
        name = self.open.pop(0)
        prompt, params, *_ = self.sent[int(name)]
        tokens = list(range(50, 50 + params.max_tokens))
        output = SimpleNamespace(
            request_id=name,
            outputs=[SimpleNamespace(token_ids=tokens)],
            finished=True,
            kv_transfer_params={"evicted_tokens": 5},
            num_cached_tokens=len(prompt) - 1,
        )
        on_output(output, time.perf_counter())
        return Step(1.0, len(prompt), 1, False, finished, 1)


def turn(number: int, before: int | None, shared: int, rest: list[int], wait: float = 0.0) -> Any:
    place = {"number": number, "before": before, "shared": shared, "rest": rest}
    return place | {"prompt_len": 9, "max_tokens": 3, "wait": wait}


AGENTS = [
    [turn(1, None, 0, [1, 2, 3]), turn(2, 0, 3, [4]), {**turn(2, 0, 2, [5], 0.2), "fixed": 2}],
    [turn(1, None, 0, [7])],
]


def run(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[FakeEngine, dict[str, Any], int]:
    def sampling(max_tokens: int, budget: str | None, **own: Any) -> Any:
        return SimpleNamespace(max_tokens=max_tokens, budget=budget, own=own)

    monkeypatch.setattr(replay_module, "sampling", sampling)
    served = SimpleNamespace(of=lambda config: SimpleNamespace(keep_tools=True))
    monkeypatch.setattr(replay_module, "ServedSettings", served)
    engine, finished = FakeEngine(), list[int]()
    given: dict[str, Any] = {"budget": "12%", "turn_mode": "exact", "salt": "s"}
    given |= {"own_answers": False, "ends": [52], "concurrency": None, **settings}
    sample = replay(engine, AGENTS, on_finish=lambda: finished.append(1), **given)
    return engine, sample, len(finished)


def test_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sample, finished = run(monkeypatch)
    assert [prompt for prompt, *_ in engine.sent] == [[1, 2, 3], [7], [1, 2, 3, 4], [1, 2, 5]]
    assert finished == 2 and engine.most == 2 and sample["preemptions"] == 0
    own = [params.own for _, params, *_ in engine.sent]
    assert own[0] == own[2] == {"kv_session": "agent-0", "kv_turn_mode": "exact"}
    assert own[3]["kv_keep"] == [0, 2]
    assert own[1]["kv_session"] == "agent-1" and {salt for *_, salt, _ in engine.sent} == {"s"}
    answered, sent_late = [one[3] for one in engine.sent[1:3]], engine.sent[3][3]
    assert sent_late - max(answered) > 0.15, "it thinks for 0.2 s"
    # By its own clock, not the late one of a step: the time it waited for the engine counts.
    assert [(one["agent"], one["index"], one["turn"]) for one in sample["requests"]] == [
        *((0, 0, 1), (1, 0, 1), (0, 1, 2), (0, 2, 2))
    ]
    assert all(one["answer"] == [50, 51, 52] for one in sample["requests"])
    assert all(0 <= one["first"] <= one["last"] < 0.1 for one in sample["requests"])
    assert sample["cached_share"] == (2 + 0 + 3 + 2) / 11
    assert 0 < sample["requests_per_min"] < 4 / 0.2 * 60


def test_a_replay_with_own_answers_and_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer counts up to the token that ends it; one agent at a time."""
    engine, _, _ = run(monkeypatch, own_answers=True, turn_mode=None, concurrency=1)
    made = [prompt for prompt, *_ in engine.sent]
    assert made == [[1, 2, 3], [1, 2, 3, 50, 51, 4], [1, 2, 50, 51, 5], [7]]
    assert [params.own for _, params, *_ in engine.sent] == [{}, {}, {"kv_keep": [0, 2]}, {}]
    assert engine.most == 1


def test_agreement_is_counted_up_to_the_first_difference() -> None:
    assert agreed_tokens([1, 2, 3, 4], [1, 2, 9, 4], [0]) == (2, 4)
    assert agreed_tokens([1, 0, 3, 4], [1, 0, 9, 4], [0]) == (2, 2), "an end token ends it"
    assert agreed_tokens([1, 2], [1, 2], []) == (2, 2)


def test_rows_by_turn() -> None:
    stock, auto = Variant("stock-prefix-caching", None), Variant("auto", "12%", None, "resume")

    def sample(first: float, *cached: int, **more: int) -> dict[str, Any]:
        made = [
            {"turn": number, "first": first * number, "last": 2 * first, "prompt_len": 100}
            | {"cached": found, **more}
            for number, found in enumerate(cached, start=1)
        ]
        return {"requests": made, "pool_prompts": 2.0}

    samples = [(stock, sample(1.0, 0, 50)), (auto, sample(0.5, 0, 80, agreed=1, compared=4))]
    rows = by_turn([*samples, (stock, sample(3.0, 0, 70)), samples[1]])
    assert [(row.turn, row.policy, row.turn_mode) for row in rows.itertuples()] == [
        (turn, policy, mode)
        for turn in (1, 2, "all")
        for policy, mode in (("stock-prefix-caching", ""), ("auto", "resume"))
    ]
    assert rows["requests"].tolist() == [2, 2, 2, 2, 4, 4]
    assert rows["cached_share"].tolist() == [0.0, 0.0, 0.6, 0.8, 0.3, 0.4]
    assert rows["ttft_p50_ms"][2] == 4000.0 and rows["ttft_p95_ms"][2] == pytest.approx(5800.0)
    assert rows["e2e_p50_ms"][0] == 4000.0
    assert rows["agreement"].tolist()[1::2] == [0.25] * 3
    shown = turns_table(rows).splitlines()
    assert shown[4].split()[:5] == ["2", "2", "auto", "12%", "resume"] and "0.8" in shown[4]


def test_the_sample_of_the_examples() -> None:
    found = recording(SAMPLE, output_len=64)
    assert [len(turns) for turns in found.agents] == [11, 5] and found.turns == 9
    assert 2000 < found.longest_prompt < 4000 and found.branches == 2
    assert SAMPLE.stat().st_size < 20_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--file", "/nowhere.jsonl"], "cannot read /nowhere.jsonl: [Errno 2] No such file"),
        (
            ["--file", str(SAMPLE), "--prompt-len", "9", "--shared-len", "5"],
            "--prompt-len, --shared-len does not go with a file: leave it out",
        ),
        (["--own-answers"], "--own-answers is for recorded sessions: leave it out"),
        (["--resume"], "--resume: give --turn-modes resume"),
        (["--turn-modes", "resume", "--policies", "h2o"], "--turn-modes resume and h2o: it adds"),
        (
            ["--file", str(SAMPLE), "--model", "built-in", "--output-len", "7000"],
            "9709 with --output-len, and the model takes 8192: give --turns, or --num-prompts",
        ),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare, "runs_without_plugins", lambda: True)
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_agents_that_are_made_up() -> None:
    """Five turns of 10 tokens behind 20 shared ones, in two ways behind the third."""
    job = Job(SHAPES["small"], 20 + 5 * 10 + 4 * 8, 8, 2, 4.0, turns=5, shared_len=20)
    agents = made_up(job, 0, 2)
    assert [turn.before for turn in agents[0]] == [None, 0, 1, 2, 3, 2, 5]
    assert [turn.number for turn in agents[0]] == [1, 2, 3, 4, 5, 4, 5]
    assert [turn.prompt_len for turn in agents[0]] == [30, 48, 66, 84, 102, 84, 102]
    rests = [tuple(turn.rest[-10:]) for turns in agents for turn in turns]
    assert len(set(rests)) == 14 and agents[0][0].rest[:20] == agents[1][0].rest[:20]
    assert made_up(job, 1, 2)[0][0].rest != agents[0][0].rest


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.usefixtures("prepared_programs")
def test_recorded_agents_find_what_was_said(tmp_path: Path) -> None:
    """The sample of the examples, one agent after the other, in a pool for all."""
    command = ["--file", str(SAMPLE), "--model", "built-in", "--policies", "full,auto"]
    command += ["--budget", "50%", "--concurrency", "1", "--pool-prompts", "8", "--threads", "1"]
    command += ["--turns", "4", "--output-len", "8", "--repetitions", "1", "--host-cache", "0"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "agents.json").read_text())
    full, auto, resume, exact = written["rows"]
    modes = [(row["policy"], row["turn_mode"]) for row in written["rows"]]
    ours = [("auto", mode) for mode in ("auto", "resume", "exact")]
    assert modes == [("full", ""), *ours]
    options = {"most_agents": None, "most_turns": 4, "output_len": 8, "own_answers": False}
    agents = read_recording(SAMPLE, str(model_path()), "chatml", **options).agents
    # A turn finds the whole blocks that its prompt has in common with the one before. The second
    # agent finds the first one's tools and system prompt; its own question comes behind them.
    later = [
        turn.shared // 16 * 16 for turns in agents for turn in turns if turn.before is not None
    ]
    one, other = (turns[0].rest for turns in agents)
    begin = next(i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    tokens = sum(turn.prompt_len for turns in agents for turn in turns)
    found = sum(later) + begin // 16 * 16
    assert full["cached_share"] == pytest.approx(found / tokens)
    # Evicted from, a prompt is found up to what its end's queries have to compute.
    assert found / tokens - 0.02 < exact["cached_share"] <= found / tokens
    assert found / tokens - 0.02 < resume["cached_share"] < found / tokens + 0.02
    assert auto["cached_share"] == resume["cached_share"], "nothing here has lost its snapshot"
    assert full["agreement"] == 1.0 and 0 <= resume["agreement"] < 1
    turns = [row for row in written["by_turn"] if row["policy"] == "full"]
    assert [row["turn"] for row in turns] == [1, 2, 3, 4, "all"]
    assert sum(row["requests"] for row in turns[:-1]) == turns[-1]["requests"] == 8
    assert all(0 < row["ttft_p50_ms"] <= row["e2e_p50_ms"] for row in turns)
