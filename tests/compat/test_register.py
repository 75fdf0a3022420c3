# SPDX-License-Identifier: Apache-2.0
"""A vLLM that is not supported works as without the package, and refuses policies by its reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_pyramid.compat.versions import runs_without_plugins
from vllm_pyramid.version import __version__

PROCESS = """
import contextlib, io, json, sys
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_pyramid.compat import versions
make_config = "create_engine_config"

def rename(name):
    original = getattr(EngineArgs, name)
    delattr(EngineArgs, name)
    return original

{pretend}

def say(call):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            return repr(call())
        except SystemExit as error:
            return f"exit {{error.code}}: {{said.getvalue()}}"
        except Exception as error:
            return f"{{type(error).__name__}}: {{error}}"

parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
model = sys.argv[1]

def config(**asked):
    args = EngineArgs(model, max_model_len=512, additional_config=asked)
    made = getattr(args, make_config)()
    cls = made.scheduler_config.get_scheduler_cls()
    return cls.__module__, made.cache_config.block_size

def parse(*flags):
    return parser.parse_args(["--model", model, *flags]).model

found = dict(
    plain=say(config),
    none=say(lambda: config(kv_policy="none")),
    other=say(lambda: config(gdn_prefill_backend="triton")),
    policy=say(lambda: config(kv_policy="pyramidkv")),
    budget=say(lambda: config(kv_budget=64)),
    parsed=say(parse),
    parsed_none=say(lambda: parse("--kv-policy", "none")),
    flag=say(lambda: parse("--kv-policy", "pyramidkv")),
    lone_flag=say(lambda: parse("--kv-budget=64")),
    listed="--kv-policy" in parser.format_help(),
)
from vllm_pyramid.plugin import register
register()  # again, as in vLLM's other processes
found["again"] = say(config)
print("FOUND" + json.dumps(found))
"""
OTHER_VERSION = 'versions.vllm_version = lambda: "0.35.1"\n'
# What a later vLLM may have done.
CASES = {
    "another version": OTHER_VERSION,
    "another version, and a hook's place is gone": (
        OTHER_VERSION
        + 'EngineArgs.build_config = rename("create_engine_config")\n'
        + 'make_config = "build_config"\n'
    ),
    "this version without a private name": (
        "from vllm.engine import arg_utils\n"
        'build = rename("create_model_config")\n'
        # What vLLM itself calls goes on to work.
        "EngineArgs.__getattr__ = lambda self, name: (\n"
        '    (lambda: build(self)) if name == "create_model_config" else object.__getattribute__(\n'
        "        self, name))\n"
    ),
}


@pytest.fixture(scope="module")
def answers(random_model: Path) -> dict[str, dict[str, Any]]:
    """What each of the processes says; they run side by side."""
    if not runs_without_plugins():
        pytest.skip("the CUDA wheel finds no platform here without the package")
    processes = {
        case: subprocess.Popen(
            [sys.executable, "-c", PROCESS.format(pretend=pretend), str(random_model)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for case, pretend in CASES.items()
    }
    found = {}
    for case, process in processes.items():
        out, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors
        assert "pyramid" not in errors.lower(), "the log says something without being asked"
        found[case] = json.loads(out.rpartition("FOUND")[2])
    return found


@pytest.mark.parametrize("case", list(CASES))
def test_without_a_policy_it_works(answers: dict[str, dict[str, Any]], case: str) -> None:
    found = answers[case]
    for ask in ("plain", "none", "other", "again"):
        assert found[ask] == "('vllm.v1.core.sched.scheduler', 128)", (ask, found[ask])
    assert "exit" not in found["parsed"] + found["parsed_none"]
    assert not found["listed"]


@pytest.mark.parametrize("case", list(CASES))
def test_a_policy_is_refused(answers: dict[str, dict[str, Any]], case: str) -> None:
    found = answers[case]
    reason = f"vllm-pyramid {__version__} "
    installed = "this vLLM 0.3" if case.startswith("this") else "vLLM 0.35.1 is installed"
    for ask, said in (
        ("policy", "WrongVLLMError: a KV policy is asked for (kv_policy in additional_config)"),
        ("budget", "WrongVLLMError: a KV policy is asked for (kv_budget in additional_config)"),
        ("flag", "error: --kv-policy asks for a KV policy, but "),
        ("lone_flag", "error: --kv-budget asks for a KV policy, but "),
    ):
        assert said in found[ask] and reason in found[ask] and installed in found[ask], found[ask]
        assert "leave the KV policy out" in found[ask]
    assert found["flag"].startswith("exit 2") and found["lone_flag"].startswith("exit 2")
    if case.startswith("this"):
        assert "create_model_config" in found["policy"]
