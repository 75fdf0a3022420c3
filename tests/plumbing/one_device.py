# SPDX-License-Identifier: Apache-2.0
"""What one device answers and keeps, for servers on several to be compared with."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai

from tests.engine.support import Job, greedy, random_prompts, start_engine
from tests.plumbing.server import Server

TOKENS = 12
LENGTHS = (300, 181, 430, 212, 40)
PROMPTS = dict(zip(LENGTHS, random_prompts(LENGTHS, vocab_size=2048), strict=True))
POLICY = {"kv_policy": "pyramidkv", "kv_budget": "64", "kv_min_tokens": "0"}
SETTINGS = {
    "dtype": "float32",
    "max_model_len": "2048",
    "max_num_seqs": "8",
    "kv_cache_memory_bytes": str(64 << 20),
}

# Tokens and report of a prompt, by its length.
Answers = dict[int, tuple[list[int], dict[str, Any]]]


def flags(trace: Path, policy: Mapping[str, Any] = POLICY) -> tuple[str, ...]:
    """Of `vllm serve`, to serve as `answers_of_one_device` does."""
    settings = {**SETTINGS, **policy, "kv_trace": str(trace)}
    pairs = (
        (f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value))
        for name, value in settings.items()
    )
    return (*(part for pair in pairs for part in pair), "--enforce-eager")


def answers_of_one_device(model: Path, trace: Path, policy: Mapping[str, Any] = POLICY) -> Answers:
    """All prompts in turn, in an engine of this process; what they keep goes to `trace`."""
    numbers = {name: int(value) for name, value in SETTINGS.items() if value.isdigit()}
    served = {**policy, "kv_min_tokens": 0, "kv_trace": str(trace)}
    engine = start_engine(str(model), **{**SETTINGS, **numbers, **served})
    try:
        answers = {}
        for length, prompt in PROMPTS.items():
            (outcome,) = engine.run([Job(prompt, greedy(TOKENS))])
            answers[length] = (outcome.token_ids, outcome.report)
    finally:
        engine.shutdown()
    assert sum(report["evicted_tokens"] > 0 for _, report in answers.values()) == 4
    return answers


def kept(trace: Path) -> dict[int, list[list[list[int]]]]:
    """Kept positions of the prompts of each length: all KV heads of all layers, of all ranks and
    stages."""
    found: dict[int, dict[str, dict[int, list[Any]]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(trace.glob("*.npz")):
        name = re.split(r"-stage\d|-rank\d", path.stem)[0]
        with np.load(path) as arrays:
            layers = found[int(arrays["prompt_len"])][name]
            for layer in range(len(arrays["held"])):
                if f"kept_{layer}" in arrays:
                    layers.setdefault(layer, []).extend(arrays[f"kept_{layer}"].tolist())
    return {
        length: [
            [head for layer in sorted(layers) for head in layers[layer]]
            for layers in requests.values()
        ]
        for length, requests in found.items()
    }


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def complete(client: openai.OpenAI, model: Path, length: int, **changes: Any) -> Any:
    """The prompt of that length, greedily."""
    arguments: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, **changes}
    extra = {"ignore_eos": True, "return_token_ids": True}
    return client.completions.create(
        model=str(model), prompt=PROMPTS[length], extra_body=extra, **arguments
    )


# More than the engine runs at once: some clients wait for their first token, all for their last.
CLIENTS = 12
ERRORS = (
    "APIError",
    "APIConnectionError",
    "InternalServerError",
    "RemoteProtocolError",
    "ReadError",
)
# Between a death and the last client's error, and until the server has ended.
LONGEST_SECONDS = 60


def check_death(
    server: Server,
    client: openai.OpenAI,
    model: Path,
    kill: Callable[[], None],
    headers: Sequence[dict[str, str]] = ({},),
    others: Sequence[str] = (),
) -> str:
    """`kill()` under load: every request ends with an error, and so do all processes; the log.

    Args:
        headers: of the clients, in turn. others: how else a request may end.
    """
    answering = threading.Semaphore(0)

    def ask(index: int) -> tuple[str, float]:
        """How and when a request that takes minutes has ended: with which error or reason."""
        stream, own = index % 3 != 2, client.with_options(timeout=2 * LONGEST_SECONDS)
        changes = {"max_tokens": 1500, "n": 4, "temperature": 1, "stream": stream}
        changes["extra_headers"] = headers[index % len(headers)]
        try:
            answer = complete(own, model, LENGTHS[index % len(LENGTHS)], **changes)
            reasons = set()
            for chunk in answer if stream else [answer]:
                reasons |= {choice.finish_reason for choice in chunk.choices}
                answering.release()
        except (openai.APIError, httpx.HTTPError) as error:
            return type(error).__name__, time.monotonic()
        return f"finish_reason {'/'.join(sorted(filter(None, reasons)))}", time.monotonic()

    with ThreadPoolExecutor(CLIENTS) as threads:
        asked = [threads.submit(ask, index) for index in range(CLIENTS)]
        for _ in range(20):
            assert answering.acquire(timeout=120), "no tokens come"
        start = time.monotonic()
        kill()
        ends = [future.result(3 * LONGEST_SECONDS) for future in asked]
    last = max(when for _, when in ends) - start
    print(f"requests ended up to {last:.1f} s later with {Counter(how for how, _ in ends)}")
    assert {how for how, _ in ends} <= {*ERRORS, *others} and last < LONGEST_SECONDS, ends
    server.process.wait(LONGEST_SECONDS)
    print(f"the server ended {time.monotonic() - start:.1f} s later")
    for _ in range(100):
        if not server.group():
            break
        time.sleep(0.1)
    assert server.group() == []
    return server.log.read_text()
