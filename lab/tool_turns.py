# SPDX-License-Identifier: Apache-2.0
"""Call twenty tools from an evicted cache, in the first, fourth and eighth turn of a conversation.

    python -m lab.tool_turns --model FOLDER [--keep none] [--variants 'auto 12%' 'auto 25%']

The system prompt describes the tools with JSON schemas (about 6k tokens in Qwen's template).
Earlier turns are written down, so all variants see the same prompts. Each measured turn is asked
QUESTIONS times for a call of another tool, and once for the names of all tools. A question says
what to do in words of the descriptions: names of tools and parameters stand in the schemas alone.

A variant is `full` or a policy's budget. `resume` goes on with what earlier turns kept; other
variants evict from the whole prompt of each turn. `kept` is the share of the prompt's tokens that
stay, protected ones included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from collections.abc import Sequence
from itertools import chain
from statistics import mean
from typing import Any

TURNS = (1, 4, 8)
QUESTIONS = 6
CALL_TOKENS, LIST_TOKENS = 100, 300
LIST = "Call no tool now: list the names of all tools that you have, one a line, and nothing else."
VARIANTS = ("full", "auto 12%", "auto 25%", "auto 12% resume")
WORK = re.split(
    r",\s",
    """open the ticket, bill the customer, ship the parcel, book the room, hire the van,
audit the ledger, renew the licence, refund the order, pause the pump, map the well,
grade the essay, print the badge, weigh the crate, rotate the key, scan the slide,
draft the lease, clean the tank, test the valve, rank the bids, seal the vault""",
)
# Parameters: the name's end, what it is in a schema and in a question, and values.
PARAMETERS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("ref", "the reference number", ("KX-1042", "PL-7731", "ZD-2290", "RM-5518")),
    ("due_on", "the day by which it has to be done", ("2026-03-14", "2026-07-02", "2027-01-20")),
    ("lvl", "the urgency from 1 to 9", (2, 4, 7, 9)),
    ("cc", "the cost centre that pays", ("north", "harbour", "museum", "campus")),
    ("max_min", "the most minutes that it may take", (15, 40, 75, 120)),
    ("via", "the person who is told afterwards", ("Imke", "Tarek", "Solveig", "Bao")),
)


def make_tools() -> list[dict[str, Any]]:
    """Make the tools, in the form of chat completions; names of parameters are each tool's own."""
    drawn, tools = random.Random(20), []
    for index, work in enumerate(WORK):
        verb, _, noun = work.split()
        properties = {}
        for end, what, values in drawn.sample(PARAMETERS, 4):
            kind = "integer" if isinstance(values[0], int) else "string"
            text = f"Of the {noun}: {what}, such as {values[index % len(values)]}. Leave it out "
            text += "where the request does not say it; never guess a value."
            properties[f"{noun[:3]}_{end}"] = {"type": kind, "description": text}
        of = {"type": "object", "properties": properties, "required": list(properties)[:3]}
        function = {
            "name": f"{noun}_{verb}_{drawn.randrange(100, 1000)}",
            "description": f"Use this to {work}. It changes the {noun} at once and returns "
            "its new state with a number, which belongs into the answer to the user.",
            "parameters": of,
        }
        tools.append({"type": "function", "function": function})
    return tools


def make_call(tools: Sequence[dict[str, Any]], index: int, seed: int) -> tuple[str, dict[str, Any]]:
    """Return a user's question to a tool, and the call that answers it."""
    function, drawn = tools[index]["function"], random.Random(seed)
    arguments, said = {}, []
    for name in function["parameters"]["required"]:
        what, values = next(rest for end, *rest in PARAMETERS if name.endswith(f"_{end}"))
        arguments[name] = drawn.choice(values)
        said.append(f"{what} is {arguments[name]}")
    question = f"Please {WORK[index]} now: {', '.join(said)}."
    return question, {"name": function["name"], "arguments": arguments}


def make_turns(tools: Sequence[dict[str, Any]], count: int) -> list[list[dict[str, Any]]]:
    """Write turns that call the tools with even numbers: a question, its call and the result."""
    turns = []
    for number in range(count):
        question, call = make_call(tools, 2 * number, number)
        checks = {f"check_{row}": f"{row * 37 + number}, in order" for row in range(12)}
        result = {"state": f"changed as {number + 500}", **checks}
        calls = [{"id": f"c{number}", "type": "function", "function": call}]
        turn = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"c{number}", "content": json.dumps(result)},
        ]
        turns.append(turn)
    return turns


def read_call(text: str) -> dict[str, Any] | None:
    """Return the first JSON object in an answer that has a name and arguments, in tags or not."""
    for match in re.finditer(r"\{", text):
        try:
            found, _ = json.JSONDecoder().raw_decode(text, match.start())
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("arguments"), dict):
            return found
    return None


def score_call(text: str, call: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether an answer calls the right tool, and whether with exactly its arguments."""
    found = read_call(text)
    if found is None or found.get("name") != call["name"]:
        return False, False
    said, right = found["arguments"], call["arguments"]
    return True, {k: str(v) for k, v in said.items()} == {k: str(v) for k, v in right.items()}


def count_names(text: str, tools: Sequence[dict[str, Any]]) -> int:
    """Return how many of the tools an answer names."""
    return len({tool["function"]["name"] for tool in tools}.intersection(re.findall(r"\w+", text)))


def settings(variant: str) -> dict[str, Any]:
    """Return the settings of a variant's requests."""
    name, *rest = variant.split()
    if name == "full":
        return {"kv_policy": "full"}
    return {"kv_budget": rest[0], **({"kv_turn_mode": "resume"} if "resume" in rest else {})}


def run(llm: Any, variant: str, turns_asked: Sequence[int]) -> None:
    """Ask one variant in each measured turn, and print a row each, then the answers."""
    from vllm import SamplingParams

    tools, own, ends = make_tools(), settings(variant), list[int]()
    turns = make_turns(tools, max(turns_asked))

    def ask(turn: int, questions: Sequence[str], tokens: Sequence[int]) -> list[Any]:
        extra = {**own, "kv_turns": [*ends]} if "kv_turn_mode" in own else own
        before = [{"role": "system", "content": "You work for an office and call its tools."}]
        before += chain.from_iterable(turns[: turn - 1])
        chats = [[*before, {"role": "user", "content": question}] for question in questions]
        params = [SamplingParams(temperature=0, max_tokens=n, extra_args=extra) for n in tokens]
        return list(llm.chat(chats, params, tools=tools, use_tqdm=False))

    for turn in range(1, max(turns_asked) + 1):
        if turn in turns_asked:
            numbers = [(2 * (turn + n) + 3) % len(tools) for n in range(QUESTIONS)]
            calls = [make_call(tools, number, 100 * turn + number) for number in numbers]
            questions = [question for question, _ in calls] + [LIST]
            outputs = ask(turn, questions, [CALL_TOKENS] * QUESTIONS + [LIST_TOKENS])
            texts = [output.outputs[0].text for output in outputs]
            scores = [score_call(text, call) for text, (_, call) in zip(texts, calls, strict=False)]
            names, both = (f"{sum(column)} of {QUESTIONS}" for column in zip(*scores, strict=True))
            reports = [output.kv_transfer_params for output in outputs]
            kept = mean(mean(one["kept_tokens"]) / one["prompt_tokens"] for one in reports)
            resumed = min(one["resumed"]["tokens"] for one in reports) if ends else 0
            row = (variant, turn, reports[-1]["prompt_tokens"], resumed, f"{kept:.3f}")
            listed = count_names(texts[-1], tools)
            print("|", *(f"{cell} |" for cell in (*row, names, both, listed)), flush=True)
            print(json.dumps(texts), flush=True)
        if "kv_turn_mode" in own and turn < max(turns_asked):
            (output,) = ask(turn, [turns[turn - 1][0]["content"]], [1])
            ends.append(len(output.prompt_token_ids))


def main() -> None:
    """Parse the command line, run, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.tool_turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder of a model with a tool template")
    parser.add_argument("--keep", help="--kv-keep of the server; default: the template's spans")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--turns", type=int, nargs="+", default=list(TURNS))
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    from vllm_pyramid import LLM

    engine = {"max_model_len": 10240, "max_num_batched_tokens": 2048, "enforce_eager": True}
    engine |= {"dtype": args.dtype, "enable_prefix_caching": True, "kv_cache_memory_bytes": 1 << 30}
    llm = LLM(args.model, kv_policy="auto", kv_budget="12%", kv_keep=args.keep, **engine)
    cells = "variant,turn,prompt,resumed,kept,right tool,right arguments,listed of 20"
    print("|", *(f"{cell} |" for cell in cells.split(",")))
    print("|---|" + "---:|" * 7, flush=True)
    for variant in args.variants:
        run(llm, variant, args.turns)


if __name__ == "__main__":
    main()
