# SPDX-License-Identifier: Apache-2.0
"""Serve the same prompts with OpenVINO GenAI and with this package, in turns on the same cores.

    python -m lab.openvino_peer --model FOLDER --ir FOLDER --peer-python PYTHON

`--ir` is the model as OpenVINO's IR, `--peer-python` an interpreter with openvino-genai. Each
variant has a process, which loads the model once, warms up, and waits while another one runs. A
round runs all variants, every second one in the opposite order.

    openvino [evict | kvcrush] [u8]    ContinuousBatchingPipeline: whole, with cache eviction, with
                                       a quarter of what is evictable left to KVCrush; `u8`: the
                                       cache in 8 bits, OpenVINO's default, in as many bytes
    vllm POLICY                        this package, evicted to the same number of tokens
    stock                              vLLM without this package

All requests come at once. The pool holds `--capacity` of them whole. Prompts, their tokens, the
pool's bytes, the tokens of a step, the threads and the budget are the same on both sides. Answers
are greedy and have exactly `--answer` tokens; an answer is right if it begins with the fact that
the prompt asks for. `common` is the mean share of an answer's tokens before the first that differs
from the whole cache's of that side, `equal` the share of answers without one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lab.openvino_peer.engines import BLOCK
from lab.openvino_peer.figures import reference_of, rightness, sameness, speeds, summary

VARIANTS = (
    "openvino", "openvino evict", "openvino u8", "openvino evict u8",
    "vllm full", "vllm snapkv", "vllm auto",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
ENGINES = Path(__file__).with_name("engines.py")
_OF_JOB = ("model", "ir", "answer", "budget", "recent", "window", "step_tokens", "threads")


class Child:
    """The process of a variant."""

    def __init__(self, job: dict[str, Any], python: str, log: Path) -> None:
        self.variant, self._log = job["variant"], log
        read, write = os.pipe()
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [python, "-P", str(ENGINES), str(write)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                pass_fds=[write],
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "PYTHONPATH": str(ROOT)},
            )
        os.close(write)
        self._reply = os.fdopen(read, encoding="utf-8")
        self._tell(json.dumps(job))
        self.warm_up = self._read()

    def answer(self) -> dict[str, Any]:
        """Run the job once; return what `answer_all` found."""
        self._tell("")
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._reply.close()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        line = self._reply.readline()
        if not line:
            raise RuntimeError(f"{self.variant}: {self._log.read_text()[-2000:]}")
        return dict(json.loads(line))


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the rounds, and print a row for each variant and round."""
    from transformers import AutoConfig, AutoTokenizer

    from lab.eval.registry import load_task
    from vllm_pyramid.tools.eval.haystack import Tokens

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens, each = Tokens(tokenizer), -(-args.prompts // len(args.tasks))
    drawn = [load_task(task).samples(tokens, args.length, each, args.seed) for task in args.tasks]
    # In turns, so that the first prompts are of all tasks.
    samples = [sample for several in zip(*drawn, strict=True) for sample in several][: args.prompts]
    prompts = [tokens.encode(sample.prompt) for sample in samples]
    whole = -(-(max(map(len, prompts)) + args.answer) // BLOCK) * BLOCK
    config = AutoConfig.from_pretrained(args.model)
    job = {
        **{name: getattr(args, name) for name in _OF_JOB},
        "head_size": config.hidden_size // config.num_attention_heads,
        "cache_tokens": whole * (args.capacity or args.prompts),
    }
    print(json.dumps({**job, "prompts": list(map(len, prompts))}), flush=True)
    args.logs.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    rows: list[dict[str, Any]] = []
    try:
        for variant in args.variants:
            peer = variant.startswith("openvino")
            python = args.peer_python if peer else sys.executable
            log = args.logs / f"{variant.replace(' ', '-')}.log"
            children.append(
                Child({**job, "prompts": prompts, "variant": variant}, str(python), log)
            )
        for number in range(args.rounds):
            order = children[:: -1 if number % 2 else 1]
            found = {child.variant: child.answer() for child in order}
            for variant in args.variants:
                own = dict(found[variant])
                ids, times = own.pop("tokens"), own.pop("times")
                texts = [tokenizer.decode(answer) for answer in ids]
                name = reference_of(variant, args.variants)
                row = {"variant": variant, "round": number, **speeds(ids, times), **own}
                row |= rightness(texts, [sample.answers[0] for sample in samples])
                row |= sameness(ids, found[name]["tokens"]) if name else {}
                print(json.dumps(row), flush=True)
                rows.append(row)
    finally:
        for child in children:
            child.close()
    return rows


def main() -> None:
    """Parse the command line, run, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.openvino_peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder of the model from Hugging Face")
    parser.add_argument("--ir", required=True, help="folder of the same model as OpenVINO's IR")
    parser.add_argument("--peer-python", required=True, help="interpreter that has openvino-genai")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--tasks", nargs="+", default=["needle", "multi-key"])
    for name, default, text in (
        ("prompts", 8, "requests, which come at once"),
        ("length", 2048, "tokens of a prompt"),
        ("answer", 64, "tokens of an answer"),
        ("budget", 256, f"tokens that stay, a multiple of {BLOCK}"),
        ("recent", 64, f"tokens at the end that OpenVINO keeps, a multiple of {BLOCK}"),
        ("window", 8, "last tokens of a prompt whose attention OpenVINO counts"),
        ("capacity", 0, "requests that the pool holds whole (0: all)"),
        ("rounds", 3, "of all variants"),
        ("threads", 2, "of each engine"),
        ("step_tokens", 2048, "most tokens of a step"),
        ("seed", 0, "of the prompts"),
    ):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, help=f"{text} (%(default)s)")
    parser.add_argument("--logs", type=Path, default=Path("openvino-peer"), help="folder of logs")
    args = parser.parse_args()
    print("\n" + summary(run_all(args)))


if __name__ == "__main__":
    main()
