# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.certified` with its engines, and the policy that it writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.support import EnginePool, random_prompts
from vllm_pyramid.policy import load_policy

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("prepared_programs")]

ROOT = Path(__file__).parents[2]


def test_a_certified_budget(
    engines: EnginePool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """A risk so large that a few prompts do. An untrained model cannot do without its cache."""
    model = tiny_model("llama-mha")
    prompts = random_prompts([300, 200, 260, 320, 280], seed=3)
    file, output = tmp_path / "prompts.jsonl", tmp_path / "certified.yaml"
    file.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts))
    command = [sys.executable, "-m", "lab.certified", "--model", str(model)]
    command += ["--prompts", str(file), "-o", str(output), "--risk", "0.5", "--confidence", "0.5"]
    command += ["--kv-policy", "snapkv", "--kv-policy-args", '{"min_tokens": 0, "window": 8}']
    command += ["--budgets", "100%,6%", "--answer-tokens", "12"]
    command += ["--engine-args", json.dumps({"dtype": "float32", "skip_tokenizer_init": True})]
    engines.close()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=500, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    losses = {
        budget: float(loss) for budget, loss in re.findall(r"(\d+%) (\d\.\d{4})", done.stdout)
    }
    assert losses["100%"] == 0.0 and losses["6%"] > 0.5
    assert str(load_policy(str(output)).budget) == "100%"
