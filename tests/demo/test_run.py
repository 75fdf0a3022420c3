# SPDX-License-Identifier: Apache-2.0
"""The demonstration without an engine: its prompt, its refusals, what it prints."""

from __future__ import annotations

import dataclasses
import io
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from vllm_pyramid.child_process import ChildError
from vllm_pyramid.demo import run
from vllm_pyramid.demo.worker import Answer, Task, proof_of

pytestmark = pytest.mark.cpu

ANSWER = Answer(
    kv_policy="pyramidkv",
    text="no[i]se\x1b with a control character",
    prompt_tokens=1000,
    kept_tokens=[400, 200, 100, 20],
    evicted_tokens=3280,
    blocks_before=252,
    blocks_after=48,
    prefill_seconds=0.5,
    decode_tokens_per_second=123.4,
)


def proof() -> dict[str, object]:
    return {
        "kv_policy": "pyramidkv",
        "prompt_tokens": 1000,
        "kept_tokens": [400, 200, 100, 20],
        "evicted_tokens": 3280,
        "blocks_before": 252,
        "blocks_after": 48,
    }


@pytest.mark.parametrize("tokens", [256, 3000])
def test_prompt_has_the_length_that_was_asked_for(random_model: Path, tokens: int) -> None:
    from tokenizers import Tokenizer

    prompt, right = run.build_prompt(random_model, tokens)
    ids = Tokenizer.from_file(str(random_model / "tokenizer.json")).encode(prompt).ids
    assert tokens - 32 <= len(ids) <= tokens
    assert prompt.count(right) == 1
    place = prompt.index(right) / len(prompt)
    assert 0.2 < place < 0.6
    assert prompt.endswith(" is")


def test_a_prompt_without_room_is_refused(random_model: Path) -> None:
    with pytest.raises(ValueError, match="3 tokens leave no room"):
        run.build_prompt(random_model, 3)


def test_a_complete_report_is_accepted() -> None:
    assert proof_of(proof(), "pyramidkv") == proof()


@pytest.mark.parametrize("report", [None, {}])
def test_a_missing_report_is_an_error(report: dict[str, object] | None) -> None:
    with pytest.raises(RuntimeError, match="the plugin is not active"):
        proof_of(report, "pyramidkv")


@pytest.mark.parametrize("key", sorted(proof()))
def test_an_incomplete_report_is_an_error(key: str) -> None:
    report = proof()
    del report[key]
    with pytest.raises(RuntimeError, match=f"lacks {key}"):
        proof_of(report, "pyramidkv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_policy": "full"}, "ran 'full'"),
        ({"evicted_tokens": 0}, "contradicts itself"),
        ({"kept_tokens": [], "evicted_tokens": 0}, "contradicts itself"),
    ],
)
def test_a_wrong_report_is_an_error(change: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        proof_of(proof() | change, "pyramidkv")


def test_bars_are_right_aligned_and_never_vanish() -> None:
    assert run.bar(50, 100, width=10) == "[dim]·····[/dim][cyan]█████[/cyan]"
    assert run.bar(100, 100, width=4) == "[dim][/dim][cyan]████[/cyan]"
    assert run.bar(1, 100_000, width=4) == "[dim]···[/dim][cyan]█[/cyan]"
    assert run.bar(0, 100, width=4) == "[dim]····[/dim][cyan][/cyan]"


def test_show_prints_every_number() -> None:
    stream = io.StringIO()
    run.show(Console(file=stream, width=100), ANSWER, "18%", "12345")
    shown = stream.getvalue()
    assert "wrong: it is 12345" in shown
    assert "pyramidkv, budget 18%" in shown
    assert "no[i]se  with a control character" in shown
    assert "\x1b" not in shown
    for kept in ("400", "200", "100", "20"):
        assert f" {kept} " in shown
    assert "3,280 over 4 layers (18.0% kept)" in shown
    assert "252 before, 48 after (204 given back)" in shown
    assert "123.4 tokens/s" in shown


@pytest.mark.parametrize(("text", "verdict"), [(" 123. And", "right"), (" 1234.", "wrong")])
def test_the_answer_is_judged(text: str, verdict: str) -> None:
    stream = io.StringIO()
    answer = dataclasses.replace(ANSWER, text=text)
    run.show(Console(file=stream, width=100), answer, None, "123")
    assert f"answer ({verdict}" in stream.getvalue()


def task() -> Task:
    return Task("no-such-model", "a prompt", 4, 64, "pyramidkv", "12%")


def use_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """Let a small script stand in for the process that starts an engine."""
    script = tmp_path / "worker"
    script.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_stages_and_the_answer_arrive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dataclasses import asdict

    use_worker(
        monkeypatch,
        tmp_path,
        "task = json.load(sys.stdin)\n"
        "print('noise of the engine')\n"
        "print('@vllm-pyramid ' + json.dumps({'stage': task['prompt']}))\n"
        f"print('@vllm-pyramid ' + json.dumps({{'answer': {asdict(ANSWER)!r}}}))",
    )
    stages: list[str] = []
    assert run.run_policy(task(), stages.append) == ANSWER
    assert stages == ["pyramidkv: a prompt"]


def test_a_failing_worker_shows_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_worker(monkeypatch, tmp_path, "sys.exit('the reason')")
    with pytest.raises(ChildError, match=r"exit status 1(?s:.)*the reason"):
        run.run_policy(task(), lambda _: None)


def test_an_interruption_ends_the_worker_and_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine's processes are children of the worker; none may outlive the demonstration."""
    use_worker(
        monkeypatch,
        tmp_path,
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        "print('@vllm-pyramid ' + json.dumps({'stage': str(child.pid)}), flush=True)\n"
        "child.wait()",
    )
    pids: list[int] = []

    def interrupt(stage: str) -> None:
        pids.append(int(stage.split()[-1]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run_policy(task(), interrupt)
    for _ in range(100):
        if not is_running(pids[0]):
            break
        time.sleep(0.05)
    assert not is_running(pids[0])


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # ended, though nobody has asked for its exit status


def test_a_worker_without_an_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_worker(monkeypatch, tmp_path, "")
    with pytest.raises(ChildError, match="ended without an answer"):
        run.run_policy(task(), lambda _: None)


def test_bad_arguments_end_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--prompt-tokens", "3"]) == 1
    assert "3 tokens leave no room" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run.main(["--max-tokens", "1"])
