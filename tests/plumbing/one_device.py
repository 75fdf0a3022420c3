# SPDX-License-Identifier: Apache-2.0
"""What one device answers and keeps, for servers on several to be compared with."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

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


def flags(trace: Path) -> tuple[str, ...]:
    """Of `vllm serve`, to serve as `answers_of_one_device` does."""
    settings = {**SETTINGS, **POLICY, "kv_trace": str(trace)}
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in settings.items())
    return (*(part for pair in pairs for part in pair), "--enforce-eager")


def answers_of_one_device(model: Path, trace: Path) -> Answers:
    """All prompts in turn, in an engine of this process; what they keep goes to `trace`."""
    numbers = {name: int(value) for name, value in SETTINGS.items() if value.isdigit()}
    policy = {**POLICY, "kv_min_tokens": 0, "kv_trace": str(trace)}
    engine = start_engine(str(model), **{**SETTINGS, **numbers, **policy})
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


def check_death(server: Server, client: openai.OpenAI, model: Path, kill: Any) -> str:
    """`kill()` while a request runs: it ends with an error, and so do all processes; the log."""
    # Eight answers at once take longer than a busy machine takes to send the signal.
    many = {"max_tokens": 1500, "n": 8, "temperature": 1}
    stream = complete(client, model, LENGTHS[0], stream=True, **many)
    for _ in range(3):
        next(iter(stream))
    start = time.monotonic()
    kill()
    with pytest.raises((openai.APIError, httpx.HTTPError)) as caught:
        list(stream)
    print(f"the request ended {time.monotonic() - start:.1f} s later with {caught.value!r}")
    server.process.wait(60)
    print(f"the server ended {time.monotonic() - start:.1f} s later")
    for _ in range(100):
        if not server.group():
            break
        time.sleep(0.1)
    assert server.group() == []
    return server.log.read_text()
