# SPDX-License-Identifier: Apache-2.0
"""From `vllm serve` to its end as a user goes through it, with the official client."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from tests.plumbing.server import Server, serving

pytestmark = [pytest.mark.engine, pytest.mark.long]

LAYERS = 8
BLOCK = 16
TEXT = "The quick brown fox jumps over the lazy dog. " * 30
FLAGS = (
    *("--kv-policy", "pyramidkv", "--kv-min-tokens", "0", "--enable-prompt-tokens-details"),
    *("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", str(256 << 20)),
)
WRONG = [
    ({"kv_policy": "snapkv"}, "'snapkv' is not served here: a request may ask for 'pyramidkv'"),
    ({"kv_policy": "nonsense"}, "'nonsense' is not served here"),
    ({"kv_budget": -3}, "-3"),
    ({"kv_budget": 3}, "at least 9"),
    ({"kv_budget": "120%"}, "120%"),
    ({"kv_budgt": 33}, "did you mean 'kv_budget'"),
]
# With `--kv-request-overrides budget,turns --kv-max-request-budget 50%`.
FORBIDDEN = [
    ({"kv_policy": "full"}, "kv_policy is not open to requests .*--kv-request-overrides"),
    ({"kv_min_tokens": 9999}, "may only give kv_budget, kv_turns"),
    ({"kv_budget": "60%"}, r"this server allows \d+ \(--kv-max-request-budget 50%"),
    ({"kv_budget": 100_000}, r"would keep (\d+) of \1 tokens"),
]


@pytest.fixture(scope="module")
def server(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with serving(random_model, *FLAGS, "--kv-budget", "64", log=log, fresh=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def _complete(client: openai.OpenAI, model: str, **changes: Any) -> Any:
    arguments = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, **changes}
    return client.completions.create(model=model, **arguments)


def _xargs(**values: Any) -> dict[str, Any]:
    return {"extra_body": {"vllm_xargs": values}}


def _check_report(report: dict[str, Any], budget: int) -> None:
    """The report adds up and keeps what was asked for, rounded up to blocks a layer."""
    prompt, kept = report["prompt_tokens"], report["kept_tokens"]
    assert report["kv_policy"] == "pyramidkv"
    assert report["kv_budget"] == budget
    assert len(kept) == LAYERS
    assert LAYERS * budget <= sum(kept) < LAYERS * (budget + BLOCK)
    assert kept == sorted(kept, reverse=True) and kept[0] > kept[-1]
    assert report["evicted_tokens"] == LAYERS * prompt - sum(kept) > 0
    assert report["blocks_before"] == LAYERS * -(-prompt // BLOCK)
    assert report["blocks_before"] - report["blocks_after"] == report["evicted_tokens"] // BLOCK


def _wait_until_idle(server: Server) -> dict[str, dict[int, float]]:
    """The metrics once nothing is held any more; the last that were read after ten seconds."""
    for _ in range(50):
        metrics = server.metrics()
        held = [*metrics["vllm_pyramid:blocks_held"].values()]
        held += metrics["vllm_pyramid:tokens_held"].values()
        if not any(held):
            break
        time.sleep(0.2)
    return metrics


def _totals(metrics: dict[str, dict[int, float]]) -> tuple[float, float, float]:
    """Evictions, evicted tokens and freed blocks, summed over layers."""
    names = ("evictions_total", "tokens_evicted_total", "blocks_freed_total")
    evictions, tokens, blocks = (sum(metrics[f"vllm_pyramid:{name}"].values()) for name in names)
    return evictions, tokens, blocks


def test_completions(client: openai.OpenAI, model: str) -> None:
    answer = _complete(client, model)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    _check_report(answer.kv_transfer_params, 64)
    assert answer.kv_transfer_params["prompt_tokens"] == answer.usage.prompt_tokens

    # Computed anew: what follows a hit comes in other chunks, and these round otherwise.
    anew = {"extra_body": {"cache_salt": "streamed"}}
    chunks = _complete(client, model, stream=True, **anew)
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert len(pieces) > 1
    assert "".join(pieces) == answer.choices[0].text


@pytest.mark.parametrize(("values", "reason"), WRONG)
def test_wrong_requests_are_answered(server, client, model, values, reason) -> None:
    before = _totals(_wait_until_idle(server))
    with pytest.raises(openai.BadRequestError) as caught:
        _complete(client, model, **_xargs(**values))
    assert reason in caught.value.message
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], **_xargs(**values)
        )
    assert _totals(_wait_until_idle(server)) == before
    _check_report(_complete(client, model).kv_transfer_params, 64)  # it lives on


def test_metrics_agree_with_the_responses(server, client, model) -> None:
    """Requests that run side by side, among them one that opts out and one that is short."""
    before = _totals(_wait_until_idle(server))
    changes: list[dict[str, Any]] = [
        {"prompt": f"Number {index}. {TEXT}", "max_tokens": 4 + index} for index in range(6)
    ]
    changes += [_xargs(kv_policy="full"), _xargs(kv_budget=256), {"prompt": "Short."}]
    with ThreadPoolExecutor(len(changes)) as threads:
        answers = list(threads.map(lambda change: _complete(client, model, **change), changes))
    reports = [answer.kv_transfer_params for answer in answers]
    evicted = [report for report in reports if report["evicted_tokens"]]
    assert len(evicted) == 7
    metrics = _wait_until_idle(server)
    after = _totals(metrics)
    assert after[0] - before[0] == len(evicted)
    assert after[1] - before[1] == sum(report["evicted_tokens"] for report in reports)
    assert after[2] - before[2] == sum(
        report["blocks_before"] - report["blocks_after"] for report in reports
    )
    for name in ("tokens_evicted_total", "blocks_freed_total", "tokens_held", "blocks_held"):
        assert sorted(metrics[f"vllm_pyramid:{name}"]) == list(range(LAYERS)), name
    assert set(metrics["vllm_pyramid:blocks_held"].values()) == {0}
    assert set(metrics["vllm_pyramid:tokens_held"].values()) == {0}
    freed = metrics["vllm_pyramid:blocks_freed_total"]
    assert freed[LAYERS - 1] > freed[0] > 0  # a pyramid


def test_a_closed_stream_gives_its_blocks_back(server, client, model) -> None:
    evictions = _totals(_wait_until_idle(server))[0]
    stream = _complete(client, model, max_tokens=1200, stream=True, extra_body={"ignore_eos": True})
    for _ in range(3):
        next(iter(stream))
    held = server.metrics()["vllm_pyramid:blocks_held"]
    assert held[0] > held[LAYERS - 1] > 0
    stream.close()
    metrics = _wait_until_idle(server)
    assert set(metrics["vllm_pyramid:blocks_held"].values()) == {0}
    assert set(metrics["vllm_pyramid:tokens_held"].values()) == {0}
    assert _totals(metrics)[0] == evictions + 1
    _check_report(_complete(client, model).kv_transfer_params, 64)


def _check_end(server: Server, how: signal.Signals) -> None:
    """The signal ends all processes in good order."""
    assert len(server.group()) > 1
    # Of what was served. Later, vLLM's front end may complain that the engine ended before it.
    assert "Traceback" not in server.log.read_text()
    seconds = server.stop(how, seconds=30)
    print(f"ended {seconds:.1f} s after {how.name} with status {server.process.returncode}")
    for _ in range(50):  # helpers such as Python's resource tracker end after the front end
        if not server.group():
            break
        time.sleep(0.1)
    assert server.group() == []
    assert server.process.returncode == 0


def test_the_end(server: Server) -> None:
    """The last test of this server."""
    _check_end(server, signal.SIGTERM)
    assert "Application shutdown complete" in server.log.read_text()


def test_two_front_ends(random_model: Path, tmp_path: Path) -> None:
    """Each front end checks requests, and gets a part of the statistics."""
    overrides = ("--kv-request-overrides", "budget,turns", "--kv-max-request-budget", "50%")
    flags = (*FLAGS, "--kv-budget", "10%", "--api-server-count", "2", *overrides)
    with serving(random_model, *flags, log=tmp_path / "server.log") as server:
        reports = []
        for _ in range(10):  # a client each: a connection each, so both front ends take part
            for refused, reason in ({"kv_budget": 3}, "at least 9"), *FORBIDDEN:
                with (
                    client_of(server) as client,
                    pytest.raises(openai.BadRequestError, match=reason),
                ):
                    _complete(client, str(random_model), **_xargs(**refused))
            with client_of(server) as client:
                reports.append(_complete(client, str(random_model)).kv_transfer_params)
        with client_of(server) as client:  # spans that a client has kept count, too
            said = ("system", TEXT), ("user", TEXT[:450])
            tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
            asked: Any = {
                "messages": [{"role": role, "content": text} for role, text in said],
                "tools": [tool],
                "tool_choice": "none",
            }
            answer: Any = client.chat.completions.create(
                model=str(random_model), max_tokens=4, **asked
            )
            reports.append(answer.kv_transfer_params)
        assert "kv_keep" not in reports[-1] and reports[-1]["kv_template"].startswith("left out")
        metrics = _wait_until_idle(server)
        expected = (
            len(reports),
            sum(report["evicted_tokens"] for report in reports),
            sum(report["blocks_before"] - report["blocks_after"] for report in reports),
        )
        assert expected[1] > 0
        assert _totals(metrics) == expected
        assert set(metrics["vllm_pyramid:blocks_held"].values()) == {0}
        _check_end(server, signal.SIGINT)


def test_what_stays_of_every_chat(random_model: Path, tmp_path: Path) -> None:
    """`--kv-keep`: system prompt, template and the first tokens of messages, in every head."""
    traces = tmp_path / "traces"
    keep = ("--kv-keep", "template+3", "--kv-trace", str(traces), "--kv-budget", "25%")
    system = "Answer in capital letters, and name the animal that jumps."
    chat: list[dict[str, str]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": "The fox."},
        {"role": "user", "content": f"Again: {TEXT}"},
    ]
    with (
        serving(random_model, *FLAGS, *keep, log=tmp_path / "server.log") as server,
        client_of(server) as client,
    ):
        arguments: dict[str, Any] = {"model": str(random_model), "max_tokens": 4}

        def ask(messages: Any, **xargs: Any) -> Any:
            answer = client.chat.completions.create(
                messages=messages, **arguments, **_xargs(**xargs)
            )
            return answer.kv_transfer_params

        report = ask(chat)
        bounds = report["kv_keep"]
        spans = list(zip(bounds[::2], bounds[1::2], strict=True))
        tokens = {token for span in spans for token in range(*span)}
        assert spans[0][0] == 0 and len(spans) >= 3 and report["evicted_tokens"] > 0
        (path,) = traces.glob("*.npz")
        with np.load(path) as trace:
            assert int(trace["prompt_len"]) == report["prompt_tokens"]
            for layer in range(LAYERS):
                for head in trace[f"kept_{layer}"]:
                    assert tokens <= {*head.tolist()} and len(head) == report["kept_tokens"][layer]
        # A conversation that is evicted again keeps what stands before the first message.
        assert ask(chat[:2], kv_turns=[])["kv_keep"] == bounds[:2]
        more = ask(chat, kv_keep=[bounds[1] + 40, bounds[1] + 44])["kv_keep"]
        assert more == [*bounds[:2], bounds[1] + 40, bounds[1] + 44, *bounds[2:]]
        assert ask(chat, kv_policy="full")["evicted_tokens"] == 0
        with pytest.raises(openai.BadRequestError, match="ends at token 5000, and the prompt has"):
            ask(chat, kv_keep=[4990, 5000])
        with pytest.raises(openai.BadRequestError, match="vllm_pyramid_keep cannot be set"):
            ask(chat, vllm_pyramid_keep=[0, 4])
        # Settings that vLLM would ignore: at the wrong place, or of a beam search.
        plain = {"prompt": TEXT, **arguments}
        beams = {"use_beam_search": True, "n": 2}
        for body, header, reason in (
            ({"kv_budget": "25%"}, None, "'kv_budget' stands at the top level"),
            ({"KV-Budget": "25%"}, None, "'KV-Budget' stands at the top level"),
            ({"kvBudgt": "25%"}, None, "'kvBudgt' stands at the top level"),
            ({"extra_body": {"vllm_xargs": {"kv_budget": 9}}}, None, "extra_body is an argument"),
            ({**beams, "vllm_xargs": {"kv_budget": 64}}, None, "not work with beam search"),
            ({**beams, "vllm_xargs": {"kv_budgt": 64}}, None, "'kv_budgt' does not work with beam"),
            (beams, "a", "'a' in X-KV-Session does not work with beam search"),
        ):
            headers = {"X-KV-Session": header} if header else {}
            with pytest.raises(openai.BadRequestError, match=reason):
                client.completions.create(**plain, extra_body=body, extra_headers=headers)
        with pytest.raises(openai.BadRequestError, match="stands at the top level"):
            client.chat.completions.create(
                messages=chat[:2], **arguments, extra_body={"kv_turns": []}
            )
        assert len(client.completions.create(**plain, extra_body=beams).choices) == 2
        complete = client.completions.create(prompt=TEXT, **arguments)
        assert "kv_keep" not in complete.kv_transfer_params
    log = (tmp_path / "server.log").read_text()
    assert "Chat template warmup failed" not in log and "Traceback" not in log


def test_no_other_flag_is_needed(random_model: Path, tmp_path: Path) -> None:
    """As the README starts it. What is chosen for the machine is said, and is what happens."""
    if torch.cuda.is_available():
        pytest.skip("threads and memory of the host are chosen where the CPU computes")
    log = tmp_path / "server.log"
    flags = ("--kv-policy", "pyramidkv", "--kv-budget", "64")
    settings: dict[str, Any] = {"unset": ("OMP_NUM_THREADS",), "fresh": True}
    with serving(random_model, *flags, log=log, **settings) as server:
        with client_of(server) as client:
            _check_report(_complete(client, str(random_model)).kv_transfer_params, 64)
            _check_that_others_stay_hidden(client, str(random_model))
        text = log.read_text()
        cores = len(os.sched_getaffinity(0))
        if cores <= 8 and len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) == 1:
            # One worker has all of them; vLLM would leave it one less.
            (said,) = re.findall(r"threads: VLLM_CPU_OMP_THREADS_BIND=([\d,]+);", text)
            bound = {int(core) for core in said.split(",")}
            assert bound <= os.sched_getaffinity(0) and len(bound) > cores // 2
        (taken, free) = re.findall(r"memory: at most ([\d.]+) GiB.*?, of ([\d.]+) GiB", text)[0]
        # 80 % of what is free, and what the worker has taken before it asks.
        assert 0.8 * float(free) <= float(taken) + 0.1 <= min(0.8 * float(free) + 2, float(free))


def _check_that_others_stay_hidden(client: openai.OpenAI, model: str) -> None:
    """Without a salt a response does not tell whether another's conversation was found."""
    for salt, said in ((None, False), ("a tenant's", True)):
        prompt, turns, reports = TEXT, [], []
        for _ in range(2):
            xargs = {"vllm_xargs": {"kv_turns": turns}} | ({"cache_salt": salt} if salt else {})
            answer = _complete(client, model, prompt=prompt, max_tokens=40, extra_body=xargs)
            assert answer.usage.prompt_tokens_details is None
            reports.append(answer.kv_transfer_params)
            turns = reports[-1]["kv_turns"]
            prompt += answer.choices[0].text + TEXT
        assert all(("resumed_tokens" in report) == said for report in reports)


def test_prompts_longer_than_the_cache(random_model: Path, tmp_path: Path) -> None:
    """With evictions inside the prompt the model's length fits; what does not fit is refused."""
    with serving(
        random_model,
        *("--kv-policy", "snapkv-chunked", "--kv-budget", "256"),
        *("--kv-policy-args", '{"chunk.tokens": 256, "chunk.keep": 256}'),
        *("--max-model-len", "auto", "--num-gpu-blocks-override", str(LAYERS * 40 + 1)),
        *("--enforce-eager", "--max-num-seqs", "4", "--enable-prompt-tokens-details"),
        log=tmp_path / "server.log",
    ) as server:
        client = client_of(server)
        (model,) = client.models.list().data
        assert model.max_model_len == 8192
        prompt = [8 + i % 500 for i in range(8000)]
        answer = _complete(client, model.id, prompt=prompt)
        report = answer.kv_transfer_params
        assert answer.usage.prompt_tokens == 8000 and report["prompt_tokens"] == 8000
        assert report["inner_evictions"] == 30 and max(report["kept_tokens"]) < 256 + BLOCK
        # As many tokens as there may be: it ends where the pool does, or by itself.
        answer = _complete(client, model.id, prompt=prompt, max_tokens=None)
        assert answer.choices[0].finish_reason in ("length", "stop")
        for changes, reason in (
            (_xargs(kv_policy="full"), "holds up to 4000 blocks, and the pool has 320"),
            (_xargs(kv_budget="50%"), "and the pool has 320"),
            ({"prompt": [8] * 10, "max_tokens": 8000}, "lower max_tokens"),
            ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                _complete(client, model.id, **{"prompt": prompt, **changes})
            assert reason in caught.value.message
        whole = _complete(client, model.id, prompt=prompt[:600], **_xargs(kv_policy="full"))
        assert whole.kv_transfer_params["inner_evictions"] == 0
        text = server.log.read_text()
    assert "evicts inside prompts, every 256 tokens" in text
