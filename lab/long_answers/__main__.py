# SPDX-License-Identifier: Apache-2.0
"""Answers of thousands of tokens, scored line by line: policies and budgets on the same tables.

    python -m lab.long_answers --model FOLDER --policies 'full,r-kv,snapkv' --budgets 256,512
    python -m lab.long_answers --count --policies 'full,r-kv' --budgets 256
    python -m lab.long_answers --pool 0.25 --policies 'stock,full,r-kv' --budgets 256

A model translates tables of CSV to JSON lines (`table.py`), greedily. `right` is the mean share of
a table's rows that its answer has, with a 95 % interval by bootstrap over the tables; `first_wrong`
the mean number of lines before the first that is wrong, of `rows`. With `--task sums` it adds a
number again and again (`sums.py`), from a short prompt.

With `--count` answers have as many tokens as the right ones and are not scored: `steps`,
`preemptions` and `at_once` (requests that ran in a step: the mean and the most) of serving all
tables from a pool for POOL of their requests, whole. These counts follow from lengths, under
pressure from scores too. Without `--model`, the built-in one serves.

With `--pool SHARE` each budget is served alone, from a pool for that share of the requests, whole,
after a short answer that warms up; rows have `tokens_per_s` and the counts too. `stock` is vLLM
without the plugin.

Each policy has a process, which runs all its budgets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from lab.bursts.__main__ import STOCK_BLOCK, preemptions
from lab.eval.task import Figure
from lab.eval.variants import Variant, budgets_of, parse_variants
from lab.long_answers.sums import Sums
from lab.long_answers.table import OPENING, Table

POOL = 0.25  # of the requests, with `--count`
STOCK = "stock"
TASKS: dict[str, type[Table | Sums]] = {"tables": Table, "sums": Sums}
SLACK = 1.1  # tokens that an answer may have, of the right one's
ROOT = Path(__file__).resolve().parents[2]


def prompt_of(tokenizer: Any, table: Table | Sums) -> list[int]:
    """Return the tokens of a prompt that ends where the answer's first line begins."""
    if tokenizer.chat_template is None:
        text = table.question + OPENING
    else:
        chat = [{"role": "user", "content": table.question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        text += OPENING
    return tokenizer.encode(text, add_special_tokens=False)


def answer(args: argparse.Namespace, variant: Variant | None) -> None:
    """Answer all tables with one policy in this process, and print a row for each budget.

    Without a variant stock vLLM answers.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from transformers import AutoConfig, AutoTokenizer
    from vllm import SamplingParams

    from vllm_pyramid import LLM
    from vllm_pyramid.tools.demo import model_path

    model = args.model or str(model_path())
    tokenizer = AutoTokenizer.from_pretrained(model)
    tables = [TASKS[args.task].drawn(args.rows, args.seed + index) for index in range(args.tables)]
    texts = [prompt_of(tokenizer, table) for table in tables]
    exact = [len(tokenizer.encode("\n".join(table.lines))) for table in tables]
    limits = [tokens if args.count else round(SLACK * tokens) for tokens in exact]
    longest = max(len(text) + limit for text, limit in zip(texts, limits, strict=True))
    settings: dict[str, Any]
    if variant is None:
        settings, budgets = {"kv_policy": "none", "block_size": STOCK_BLOCK}, [None]
        blocks = -(-longest // STOCK_BLOCK)
    else:
        settings = {"kv_policy": variant.policy, "kv_policy_args": dict(variant.args)}
        settings |= variant.engine_args
        budgets = budgets_of(variant.load(), args.budgets)
        blocks = AutoConfig.from_pretrained(model).num_hidden_layers * -(-longest // 16)
    if budgets != [None]:
        settings["kv_min_tokens"] = 0  # shares are measured as they are given
    pool = args.pool or (POOL if args.count else None)
    whole = args.at_once if pool is None else pool * len(tables)
    llm = LLM(
        model,
        dtype=args.dtype,
        max_model_len=longest + 1,
        max_num_batched_tokens=2048,
        max_num_seqs=args.at_once,
        enforce_eager=True,
        gpu_memory_utilization=args.memory,
        num_gpu_blocks_override=int(whole * blocks) + 1,
        enable_prefix_caching=False,
        **settings,
    )
    if args.pool:
        llm.generate([{"prompt_token_ids": texts[0]}], SamplingParams(max_tokens=8))
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    preempted = preemptions(scheduler)
    for group in [[budget] for budget in budgets] if pool else [budgets]:
        done: dict[str, Any] = {}
        running: list[int] = []
        preempted.clear()
        began = time.monotonic()
        for budget, (index, text) in product(group, enumerate(texts)):
            own = {} if budget is None else {"extra_args": {"kv_budget": budget}}
            params = SamplingParams(
                temperature=0, max_tokens=limits[index], ignore_eos=args.count, **own
            )
            engine.add_request(f"{budget}-{index}", {"prompt_token_ids": text}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            running.append(len(scheduler.running))
            done |= {output.request_id: output.outputs[0] for output in outputs if output.finished}
        seconds = time.monotonic() - began
        for budget in group:
            answers = [done[f"{budget}-{index}"] for index in range(len(tables))]
            row = {
                "policy": STOCK if variant is None else variant.label,
                "budget": budget,
                "tables": len(tables),
                "rows": args.rows,
                "prompt_tokens": round(mean(map(len, texts))),
                "answer_tokens": round(mean(len(answer.token_ids) for answer in answers)),
            }
            if pool:
                row["steps"], row["preemptions"] = len(running), len(preempted)
                row["at_once"] = [round(mean(running), 2), max(running)]
            if args.pool:
                tokens = sum(len(answer.token_ids) for answer in answers)
                row["tokens_per_s"] = round(tokens / seconds, 1)
            if not args.count:
                scored = [table.score(a.text) for table, a in zip(tables, answers, strict=True)]
                right = Figure.of("right", [share for share, _ in scored])
                row["right"] = [
                    round(share or 0.0, 3) for share in (right.score, right.low, right.high)
                ]
                row["first_wrong"] = round(mean(first for _, first in scored), 1)
                if args.out is not None:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row | {"answers": [a.text for a in answers]}) + "\n")
            print(json.dumps(row), flush=True)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.long_answers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--policies", required=True, help="as `python -m lab.eval` takes them")
    parser.add_argument("--budgets", type=lambda text: text.split(","), default=["25%"])
    parser.add_argument("--model", help="folder of a model; default: the built-in one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--task", choices=TASKS, default="tables")
    parser.add_argument("--tables", type=int, default=8, help="or sums")
    parser.add_argument("--rows", type=int, default=40, help="of 25 tokens in tables, 16 in sums")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=8, help="requests in a step, at most")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the machine's")
    parser.add_argument("--pool", type=float, metavar="SHARE", help="of the requests; see above")
    parser.add_argument("--count", action="store_true", help="steps and preemptions; see above")
    parser.add_argument("--out", type=Path, help="rows with their answers are added to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.policies.split(",")
    variants: list[Variant | None] = [None] if STOCK in names else []
    rest = ",".join(name for name in names if name != STOCK)
    variants += parse_variants(rest, "--policies") if rest else []
    if args.one:
        (variant,) = variants
        answer(args, variant)
        return
    for variant in variants:
        name = STOCK
        if variant is not None:
            name = variant.policy + (f":{json.dumps(variant.args)}" if variant.args else "")
        command = [sys.executable, "-m", "lab.long_answers", *sys.argv[1:], "--policies", name]
        subprocess.run([*command, "--one"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
