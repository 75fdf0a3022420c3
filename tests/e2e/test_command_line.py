# SPDX-License-Identifier: Apache-2.0
"""Our flags on vLLM's commands, and what they answer to mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plumbing.server import VLLM
from vllm_pyramid.policy import policy_names

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Refused = Callable[..., str]
POLICIES = ", ".join(["auto", *policy_names()])
BAD_PRESET = """\
name: mine
scorer: {kind: observation-window}
alocator: {kind: uniform}
"""


@pytest.fixture
def vllm_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """`vllm_error(*arguments)`: the last line that `vllm` writes when it refuses them."""

    def run(*arguments: str) -> str:
        from vllm.entrypoints.cli.main import main

        # What the command would change in the environment is put back after the test.
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        monkeypatch.setattr(sys, "argv", ["vllm", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        last: str = capsys.readouterr().err.rstrip().splitlines()[-1]
        return last

    return run


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--kv-policy", "pyramid"], f"did you mean 'pyramidkv'?); valid policies: {POLICIES}"),
        (["--kv-policy", "pyramidkv", "--kv-budget", "0"], "0"),
        (["--kv-policy", "pyramidkv", "--kv-budget=-5"], "-5"),
        (["--kv-budget", "3", "--kv-policy", "pyramidkv"], "at least 9"),
        (["--kv-policy", "pyramidkv", "--kv-budget", "120%"], "120%"),
        (["--kv-policy", "pyramidkv", "--kv-budget", "many"], "many"),
        (["--kv-budget", "64"], "without a kv_policy"),
        (["--kv-policy", "none", "--kv-trace", "somewhere"], "without a kv_policy"),
        (["--kv-policy", "pyramidkv", "--kv-policy-args", "{beta: 14}"], "not valid JSON"),
        (["--kv-policy", "pyramidkv", "--kv-policy-args", "[14]"], "must be a JSON object"),
        (["--kv-policy", "pyramidkv", "--kv-policy-args", '{"bta": 14}'], "'bta'"),
        (
            ["--kv-policy", "pyramidkv", "--additional-config", '{"kv_policy": "snapkv"}'],
            "--kv-policy given both as a flag and in --additional-config",
        ),
        (["--additional-config", '{"kv_polcy": "snapkv"}'], "did you mean 'kv_policy'"),
        (["--kv-policy", "missing.yaml"], "missing.yaml"),
    ],
)
def test_mistakes(vllm_error: Refused, flags: list[str], reason: str) -> None:
    line = vllm_error("serve", "no-such-model", *flags)
    assert line.startswith("vllm serve: error: ")
    assert reason in line


@pytest.mark.parametrize(
    ("text", "reason"), [(BAD_PRESET, "unknown key 'alocator'"), ("name: [mine\n", "line 2")]
)
def test_mistakes_in_a_preset(vllm_error: Refused, tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    line = vllm_error("serve", "no-such-model", "--kv-policy", str(path))
    assert reason in line
    assert "mine.yaml" in line


def test_a_flag_and_other_additional_settings_go_together(random_model: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_pyramid.plugin import register

    register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--kv_policy", "pyramidkv", "--kv-budget", "64", "--kv-policy-args", '{"beta": 9}']
    model = ["--model", str(random_model)]
    args = parser.parse_args([*model, *flags, "--additional-config", '{"other": 1}'])
    assert EngineArgs.from_cli_args(args).additional_config == {
        "other": 1,
        "kv_policy": "pyramidkv",
        "kv_budget": "64",
        "kv_policy_args": '{"beta": 9}',
    }
    assert EngineArgs.from_cli_args(parser.parse_args(model)).additional_config == {}


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "latency"],
        ["bench", "throughput"],
        ["bench", "startup"],
        ["run-batch", "-i", "a", "-o", "b"],
    ],
)
def test_other_commands_have_the_flags(vllm_error: Refused, command: list[str]) -> None:
    line = vllm_error(*command, "--kv-policy", "pyramidkv", "--kv-budget", "120%")
    assert "120%" in line


def test_the_command_itself(random_model: Path) -> None:
    """With vLLM's own start: plugins are loaded in time, and nothing else is."""
    policy = ["--kv-policy", "pyramidkv", "--kv-budget"]
    commands = {
        "at least 9": ["serve", str(random_model), *policy, "8"],
        "--enable-prefix-caching": [
            *("serve", str(random_model), "--kv-policy", "h2o", "--enable-prefix-caching")
        ],
        "120%": ["bench", "throughput", "--model", str(random_model), *policy, "120%"],
    }
    start = time.monotonic()
    running = {
        reason: subprocess.Popen(
            [*VLLM, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
        )
        for reason, command in commands.items()
    }
    for reason, process in running.items():
        _, errors = process.communicate(timeout=300)
        print(f"{reason}: refused after {time.monotonic() - start:.1f} s")
        assert process.returncode not in (0, None)
        assert any(reason in line for line in errors.splitlines()[-60:]), errors[-6000:]
        assert "Loading weights" not in errors
