# SPDX-License-Identifier: Apache-2.0
"""Two replicas behind one server, whose KV heads have lengths of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.support import Job, greedy, start_engine
from tests.plumbing.one_device import PROMPTS, SETTINGS, TOKENS, client_of, complete
from tests.plumbing.server import serving

pytestmark = pytest.mark.engine
LAYERS, HEADS = 8, 4  # of `random_model`
MASK = [[(layer + head) % 3 / 2 for head in range(HEADS)] for layer in range(LAYERS)]
ARGS = {"mask": MASK, "heads.sinks": 16, "heads.recent": 40}
LENGTH = 430


def test_each_replica_does_what_one_device_does(random_model: Path, tmp_path: Path) -> None:
    numbers = {name: int(value) for name, value in SETTINGS.items() if value.isdigit()}
    policy = {"kv_policy": "duoattention", "kv_policy_args": ARGS, "kv_min_tokens": None}
    engine = start_engine(str(random_model), **{**SETTINGS, **numbers, **policy})
    try:
        (outcome,) = engine.run([Job(PROMPTS[LENGTH], greedy(TOKENS))])
    finally:
        engine.shutdown()
    assert len(set(outcome.report["kept_tokens"])) == 2
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in SETTINGS.items())
    flags = [part for pair in pairs for part in pair]
    flags += ["--kv-policy", "duoattention", "--kv-policy-args", json.dumps(ARGS)]
    flags += ["--data-parallel-size", "2", "--api-server-count", "1", "--enforce-eager"]
    with serving(random_model, *flags, log=tmp_path / "server.log") as server:
        for replica in ("0", "1"):
            answer = complete(
                client_of(server),
                random_model,
                LENGTH,
                extra_headers={"X-data-parallel-rank": replica},
            )
            found = answer.choices[0].token_ids, answer.kv_transfer_params
            assert found == (outcome.token_ids, outcome.report), replica
        metrics = server.metrics_by_engine()
        evictions = [metrics[replica]["vllm_pyramid:evictions_total"][-1] for replica in (0, 1)]
        assert evictions == [1, 1]
