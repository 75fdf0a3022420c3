# SPDX-License-Identifier: Apache-2.0
"""The demonstration without an engine: its prompt, its refusals, what it prints."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from vllm_pyramid.tools.child_process import ChildError
from vllm_pyramid.tools.demo import model_path, run
from vllm_pyramid.tools.eval.engine import Work
from vllm_pyramid.tools.eval.haystack import topics
from vllm_pyramid.tools.eval.result import EvictionReport, Result

RESULT = Result(
    text="no[i]se\x1b with a control character",
    eviction=EvictionReport(
        kv_policy="pyramidkv",
        prompt_tokens=1000,
        computed_tokens=1000,
        kept_tokens=[400, 200, 100, 20],
        evicted_tokens=3280,
        blocks_before=252,
        blocks_after=48,
    ),
    prefill_seconds=0.5,
    decode_tokens_per_second=123.4,
)


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


def test_show_prints_every_number() -> None:
    stream = io.StringIO()
    run.show(Console(file=stream, width=100), "pyramidkv", RESULT, "18%", "12345")
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


def work() -> Work:
    return run.work_of(model_path(), "a prompt", 4, ["pyramidkv"], "12%")


def results_of(work: Work) -> list[tuple[str, Result]]:
    return list(run.run_engine(work, lambda _: None))


def use_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """Let a small script stand in for the process that starts an engine."""
    script = tmp_path / "worker"
    script.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def answer_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, result: Result) -> None:
    use_worker(
        monkeypatch,
        tmp_path,
        "work = json.load(sys.stdin)\n"
        "print('noise of the engine')\n"
        "for request in work['requests']:\n"
        "    print('@vllm-pyramid ' + json.dumps({'stage': request['budget']}))\n"
        "    message = {'key': request['key'], 'result': " + repr(result.model_dump()) + "}\n"
        "    print('@vllm-pyramid ' + json.dumps(message))",
    )


def test_requests_of_the_engines_policy_and_of_none_share_an_engine() -> None:
    full, own = run.work_of(model_path(), "a prompt", 4, ["full", "pyramidkv"], "12%").requests
    extra = {"kv_policy": "full"}
    assert full.params(Path()).extra_args == extra
    assert own.params(Path()).extra_args == {"kv_budget": "12%"}


def test_an_engine_that_evicts_nothing_fails_the_demonstration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {"kept_tokens": [1000] * 4, "evicted_tokens": 0, "blocks_after": 252}
    eviction = RESULT.eviction.model_copy(update=kept)
    answer_with(monkeypatch, tmp_path, RESULT.model_copy(update={"eviction": eviction}))
    with pytest.raises(ChildError, match="'pyramidkv' evicted nothing at budget 12%"):
        results_of(work())
    full = run.work_of(model_path(), "a prompt", 4, ["full"], "12%")
    assert full.requests[0].budget is None
    assert results_of(full)[0][1].eviction == eviction
    # The command: the policy that evicts nothing is shown, then it ends with the error.
    assert run.main(["--prompt-tokens", "300"]) == 1
    said = capsys.readouterr().out
    assert "'streaming-llm' evicted nothing at budget 12%" in said and "In short" not in said


def test_an_interruption_ends_the_worker_and_its_children(monkeypatch, tmp_path) -> None:
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
        list(run.run_engine(work(), interrupt))
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
    return state != "Z"  # ended; its exit status has not been asked for


def test_a_worker_without_an_answer_is_an_error(monkeypatch, tmp_path) -> None:
    use_worker(monkeypatch, tmp_path, "")
    with pytest.raises(ChildError, match="ended without an answer"):
        results_of(work())


def test_bad_arguments_end_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--prompt-tokens", "3"]) == 1
    assert "3 tokens leave no room" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run.main(["--max-tokens", "1"])


def test_the_built_in_tokenizer_round_trips_any_text() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    english = "\n\n".join(topics().values())
    for sample in ("A plain sentence, 42.", "naïve 漢字 😀\t\x07\n", english[:5000]):
        ids = tokenizer(sample).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == sample
    assert len(english) / len(tokenizer(english).input_ids) > 2.5  # it did learn English
    digits = tokenizer("is 48213.", add_special_tokens=False).input_ids
    assert [tokenizer.decode([token]) for token in digits[1:]] == [" 4", *"8213", "."]
