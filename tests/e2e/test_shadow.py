# SPDX-License-Identifier: Apache-2.0
"""With `--kv-shadow` a bad scorer is found, and its application runs with `full`."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.plumbing.server import Server, serving
from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.demo.run import build_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FLAGS = (
    *("--kv-policy", "random", "--kv-budget", "3%", "--kv-min-tokens", "0", "--kv-page"),
    *("--kv-shadow", "100%", "--kv-shadow-floor", "85%", "--enforce-eager"),
    *("--max-model-len", "2048", "--max-num-seqs", "16", "--dtype", "float32"),
    *("--kv-cache-memory-bytes", str(48 << 20)),
)


def shadow_of(server: Server, application: str, method: str = "GET") -> Any:
    url = f"{server.url}/pyramid/shadow"
    if method == "DELETE":
        url += f"?application={application}"
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as answer:
        found = json.loads(answer.read())
    if method == "DELETE":
        return found
    return next(row for row in found["applications"] if row["application"] == application)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def words(count: int) -> str:
    return build_prompt(model_path(), count)[0]


def ask(
    client: openai.OpenAI, prompt: str, tokens: int, application: str, number: int, **settings: Any
) -> dict[str, Any]:
    """Send a prompt of an application; the report."""
    settings["kv_application"] = application
    answer: Any = client.completions.create(
        model=str(model_path()),
        prompt=f"Number {number} of {application}. {prompt}",
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "vllm_xargs": settings},
    )
    report: dict[str, Any] = answer.kv_transfer_params
    return report


def test_a_bad_scorer_is_found_within_four_answers(tmp_path: Path) -> None:
    with serving(model_path(), *FLAGS, log=tmp_path / "server.log") as server:
        client = client_of(server)

        def compared(application: str, count: int) -> dict[str, Any]:
            """Return what is known of `count` answers, or when the policy is given up."""
            end = time.monotonic() + 120
            while time.monotonic() < end:
                row: dict[str, Any] = shadow_of(server, application)
                if row["runs_full"] or row["compared"] >= count:
                    return row
                time.sleep(0.1)
            raise AssertionError(row)

        with pytest.raises(openai.BadRequestError, match="cannot be sent"):
            client.completions.create(  # and the server is idle again
                model=str(model_path()), prompt="x", extra_body={"top_k": 2**64}
            )
        for number in range(4):
            report = ask(client, words(500 + 40 * number), 32, "bad", number)
            assert report["kv_policy"] == "random" and "kv_shadow" not in report
            row = compared("bad", number + 1)
        assert row["runs_full"], row
        report = ask(client, words(660), 32, "bad", 4)
        assert report["kv_policy"] == "full" and report["kv_shadow"] == "full"
        assert report["evicted_tokens"] == 0

        for number in range(5):
            report = ask(client, words(500 + 40 * number), 32, "good", number, kv_budget="90%")
            assert report["kv_policy"] == "random"
            row = compared("good", number + 1)
        assert not row["runs_full"] and row["agreement"] > 0.85

        log = (tmp_path / "server.log").read_text()
        assert log.count("requests now run with policy 'full'") == 1
        metrics = server.metrics_text()
        assert 'vllm_pyramid:shadow_full{application="bad"} 1.0' in metrics
        assert 'shadow_requests_total{application="bad",cache="evicted"} 4.0' in metrics

        assert shadow_of(server, "bad", "DELETE") == {"restored": 1}
        assert ask(client, words(700), 32, "bad", 5)["kv_policy"] == "random"


def test_under_pressure_evicted_answers_alone_are_replayed(tmp_path: Path) -> None:
    """A burst in a pool for three prompts, then a request that has it for itself."""
    flags = [*FLAGS[:-1], str(12 << 20), "--max-model-len", "1024", "--kv-evict", "pressure"]
    with serving(model_path(), *flags, log=tmp_path / "server.log") as server:
        own = partial(ask, client_of(server), words(900), 48)
        with ThreadPoolExecutor(8) as pool:
            reports = list(pool.map(partial(own, "burst"), range(8)))
        tokens = [48 - min(after) for one in reports if (after := one["evicted_after"])]
        print(reports[0]["blocks_before"], [one["evicted_after"] for one in reports])
        assert len(tokens) >= 3, "fewer requests were evicted than the judge needs"
        assert own("alone", 9)["evicted_after"] == []
        sample = 'shadow_requests_total{application="burst",cache="evicted"}'
        end = time.monotonic() + 120
        while f"{sample} {len(tokens)}.0" not in (metrics := server.metrics_text()):
            assert time.monotonic() < end, metrics
            time.sleep(0.1)
        compared = 'shadow_tokens_total{application="burst",cache="evicted"}'
        assert f"{compared} {sum(tokens)}.0" in metrics
        assert 'application="alone"' not in metrics and 'cache="whole"' not in metrics
