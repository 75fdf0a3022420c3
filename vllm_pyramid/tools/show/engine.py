# SPDX-License-Identifier: Apache-2.0
"""One policy's engine in a process of its own: the answer, and what was kept of the prompt."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from vllm_pyramid.policy import load_policy
from vllm_pyramid.step.trace_files import read_kept
from vllm_pyramid.tools.child_process import ChildError, read_task, run_child, say
from vllm_pyramid.tools.eval.engine import Work
from vllm_pyramid.tools.show.pieces import pieces


class Task(BaseModel):
    """What one engine is to do.

    Attributes:
        policy, budget, policy_args: as for `LLM`; budget None for the policy's own.
        engine_args: further arguments of `LLM`.
        traces: an empty or new folder for the trace; None for one that is removed.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    prompt: str
    policy: str
    budget: str | None
    policy_args: dict[str, Any] = {}
    max_tokens: int
    engine_args: dict[str, Any] = {}
    traces: str | None = None


class Shown(BaseModel):
    """What one policy made of the prompt.

    Attributes:
        policy: the name that the engine reports. answer: the generated text.
        report: `kv_transfer_params` of the response.
        pieces: the text of each token of the prompt.
        layers: the model's own numbers of the layers that evict. heads: KV heads of each of them.
        counts: `[layers][tokens]`, how many KV heads kept each token.
    """

    model_config = ConfigDict(frozen=True)

    policy: str
    answer: str
    report: dict[str, Any]
    pieces: list[str]
    layers: list[int]
    heads: list[int]
    counts: list[list[int]]


def show_policy(task: Task, on_stage: Callable[[str], None]) -> Shown:
    """Run a policy's engine; `on_stage` gets what it is doing. ChildError has its log's end."""
    what, offline = f"the engine with {task.policy!r}", Path(task.model).is_dir()
    result: Shown | None = None
    with closing(run_child(__name__, task.model_dump(), what, offline=offline)) as messages:
        for message in messages:
            if "stage" in message:
                on_stage(f"{task.policy}: {message['stage']}")
            else:
                result = Shown.model_validate(message["shown"])
    if result is None:
        raise ChildError(f"{what} ended without an answer")
    return result


def run(task: Task) -> None:
    """Tokenize the prompt, answer it, and send what its trace holds."""
    say(stage="loading vLLM")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as `eval`'s engines
    from transformers import AutoTokenizer
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    from vllm_pyramid import LLM

    tokenizer = AutoTokenizer.from_pretrained(task.model)
    encoded = tokenizer(task.prompt, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    texts = pieces(
        task.prompt, encoded["offset_mapping"], tokenizer.convert_ids_to_tokens(list(ids))
    )
    engine_args = {"max_model_len": len(ids) + task.max_tokens + 64, **task.engine_args}
    work = Work(
        label=task.policy,
        model=task.model,
        kv_policy=task.policy,
        kv_policy_args=task.policy_args,
        policy_name=task.policy,
        engine_args=engine_args,
        requests=[],
        batch=1,
    )
    # Budgets as they are given, but for a floor that the policy itself has.
    floor = load_policy(task.policy, None, task.policy_args).min_tokens or 0
    with tempfile.TemporaryDirectory(prefix="vllm-pyramid-") as passing:
        folder = task.traces or passing
        say(stage="starting the engine")
        llm = LLM(
            task.model,
            kv_policy=task.policy,
            kv_budget=task.budget,
            kv_policy_args=task.policy_args or None,
            kv_min_tokens=floor,
            kv_trace=folder,
            **work.llm_args(),
        )
        say(stage="generating")
        # No text may stop it: vLLM then returns no report.
        params = SamplingParams(temperature=0.0, max_tokens=task.max_tokens, ignore_eos=True)
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)
        traces = read_kept(Path(folder))
        if len(traces) != 1:
            raise RuntimeError(f"the engine wrote {len(traces)} traces of one request")
        kept = traces[0]
    report: dict[str, Any] = output.kv_transfer_params or {}
    if kept.tokens != len(ids) or not report:
        raise RuntimeError(f"the trace is of {kept.tokens} tokens, and the prompt has {len(ids)}")
    shown = Shown(
        policy=report["kv_policy"],
        answer=output.outputs[0].text,
        report=report,
        pieces=texts,
        layers=kept.layers,
        heads=kept.heads,
        counts=np.asarray(kept.counts).tolist(),
    )
    say(shown=shown.model_dump())


if __name__ == "__main__":
    run(Task.model_validate(read_task()))
