# SPDX-License-Identifier: Apache-2.0
"""Call tools in the last turn of BFCL's conversations, from an evicted cache.

    pip download --no-deps bfcl-eval && unzip -d FOLDER bfcl_eval-*.whl
    python -m lab.bfcl_turns --model FOLDER --bfcl FOLDER --conversations 24

The Berkeley Function Calling Leaderboard's package has its data, and simulators of its tools. Here
the turns before the last one hold the calls of its ground truth and what the simulators return, so
all variants see the same prompts. The answer to the last turn is scored by its first call: the
right tool, and exactly the right arguments. That is not the leaderboard's score, which lets the
model act in all turns and compares the tools' states.

A variant is `full` or a policy's budget, as in `lab.tool_turns`. `kept` is the share of a prompt's
tokens that stay, protected ones included. `same` counts the answers whose first call, or lack of
one, is the first variant's.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from lab.eval.task import Figure
from lab.tool_turns import CALL_TOKENS, read_call, score_call, settings

DATA = "BFCL_v4_multi_turn_base.json"
# BFCL's names of types, in JSON schemas.
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
Execute = Callable[[Sequence[str], dict[str, Any]], list[str]]


@dataclass(frozen=True)
class Conversation:
    """A conversation up to its last question, the tools, and the first call that answers it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    call: dict[str, Any]


def as_schema(value: Any) -> Any:
    """Return a description of a tool with JSON schema's names of types."""
    if isinstance(value, list):
        return [as_schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    named = {"type": TYPES.get(kind, kind)} if isinstance(kind, str) else {}
    return {key: as_schema(one) for key, one in value.items()} | named


def read_tools(folder: Path, files: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tools that the files describe, in the form of chat completions."""
    lines = [line for file in files for line in (folder / file).read_text().splitlines()]
    keys = ("name", "description", "parameters")
    functions = [{key: json.loads(line)[key] for key in keys} for line in lines]
    return [{"type": "function", "function": as_schema(function)} for function in functions]


def parse_call(text: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the name and the named arguments of a call as Python writes it."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    name = call.func.id
    function = next(tool["function"] for tool in tools if tool["function"]["name"] == name)
    names = [*function["parameters"]["properties"]][: len(call.args)]
    pairs = [*zip(names, call.args, strict=True), *((one.arg, one.value) for one in call.keywords)]
    return {"name": name, "arguments": {str(key): ast.literal_eval(one) for key, one in pairs}}


def converse(
    entry: dict[str, Any],
    truth: Sequence[Sequence[str]],
    tools: list[dict[str, Any]],
    execute: Execute,
) -> Conversation:
    """Write a conversation down with its right calls, one message each, and their results."""
    messages = list[dict[str, Any]]()
    for question, calls in zip(entry["question"][:-1], truth[:-1], strict=True):
        messages += question
        results = execute(calls, entry)
        for text, result in zip(calls, results, strict=True):
            number = f"c{len(messages)}"
            call = {"id": number, "type": "function", "function": parse_call(text, tools)}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": number, "content": result})
    messages += entry["question"][-1]
    return Conversation(messages, tools, parse_call(truth[-1][0], tools))


def load(folder: Path, count: int) -> list[Conversation]:
    """Return `count` conversations, spread over all kinds of tools.

    Simulators are imported from `folder`, the unpacked wheel of bfcl-eval.
    """
    sys.path.insert(0, str(folder))
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import (
        execute_multi_turn_func_call,
    )

    def execute(calls: Sequence[str], entry: dict[str, Any]) -> list[str]:
        classes, config = entry["involved_classes"], entry["initial_config"]
        results, _ = execute_multi_turn_func_call(list(calls), config, classes, "lab", entry["id"])
        return [str(result) for result in results]

    data = folder / "bfcl_eval" / "data"
    entries = [json.loads(line) for line in (data / DATA).read_text().splitlines()]
    answers = map(json.loads, (data / "possible_answer" / DATA).read_text().splitlines())
    truths = {answer["id"]: answer["ground_truth"] for answer in answers}
    usable = [one for one in entries if len(one["question"]) > 1 and truths[one["id"]][-1]]
    found = []
    for number in range(min(count, len(usable))):
        entry = usable[number * len(usable) // count]
        files = [MULTI_TURN_FUNC_DOC_FILE_MAPPING[kind] for kind in entry["involved_classes"]]
        tools = read_tools(data / "multi_turn_func_doc", files)
        found.append(converse(entry, truths[entry["id"]], tools, execute))
    return found


def cell(right: Sequence[bool]) -> str:
    """Return how many are right, with Wilson's interval of the share."""
    share = Figure.share("right", sum(right), len(right))
    return f"{sum(right)} of {len(right)} ({share.low:.2f} to {share.high:.2f})"


def main() -> None:
    """Parse the command line, run, and print a table, then the answers."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.bfcl_turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder of a model with a tool template")
    parser.add_argument("--bfcl", type=Path, required=True, help="the unpacked wheel of bfcl-eval")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--keep", help="--kv-keep of the server, such as none (default: not given)")
    parser.add_argument("--variants", nargs="+", default=["full", "auto 12%", "auto 25%"])
    args = parser.parse_args()
    conversations = load(args.bfcl, args.conversations)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    from vllm import SamplingParams

    from vllm_pyramid import LLM

    engine = {"max_model_len": 12288, "max_num_batched_tokens": 2048, "enforce_eager": True}
    # Room for all prompts: variants behind the first find them whole, and compute their ends alone.
    engine |= {"dtype": "bfloat16", "kv_cache_memory_bytes": 4 << 30, "max_num_seqs": 8}
    llm = LLM(args.model, kv_policy="auto", kv_budget="12%", kv_keep=args.keep, **engine)
    print("| variant | tokens of a prompt | kept | right tool | right arguments | same |")
    print("|---|" + "---:|" * 5, flush=True)
    whole: list[Any] = []
    for variant in args.variants:
        extra = settings(variant)
        params = SamplingParams(temperature=0, max_tokens=CALL_TOKENS, extra_args=extra)
        outputs = [
            llm.chat(one.messages, params, tools=one.tools, use_tqdm=False)[0]
            for one in conversations
        ]
        texts = [output.outputs[0].text for output in outputs]
        pairs = zip(texts, conversations, strict=True)
        names, both = zip(*(score_call(text, one.call) for text, one in pairs), strict=True)
        reports = [output.kv_transfer_params for output in outputs]
        kept = mean(mean(one["kept_tokens"]) / one["prompt_tokens"] for one in reports)
        calls = [read_call(text) for text in texts]
        whole = whole or calls
        same = sum(a == b for a, b in zip(calls, whole, strict=True))
        lengths = f"{mean(one['prompt_tokens'] for one in reports):.0f}"
        row = (variant, lengths, f"{kept:.3f}", cell(names), cell(both), f"{same} of {len(calls)}")
        print("|", *(f"{value} |" for value in row), flush=True)
        print(json.dumps(texts), flush=True)


if __name__ == "__main__":
    main()
