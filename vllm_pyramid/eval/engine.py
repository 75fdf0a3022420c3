# SPDX-License-Identifier: Apache-2.0
"""One policy's engine in a process of its own: answers all requests of a run, budget by budget.

Started by `run.py` through `vllm_pyramid.child_process`. Sends `{"stage": ...}`, then for each
request `{"result": {...}, "key": ...}`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_pyramid.child_process import read_task, say
from vllm_pyramid.eval.task import Result
from vllm_pyramid.model_shape import shape_of_model

__all__ = ["Request", "Work"]


@dataclass(frozen=True)
class Request:
    """One prompt to be answered.

    Attributes:
        key: comes back with the result. prompt_token_ids: the prompt.
        budget: the request's own, None for a policy that evicts nothing.
        max_tokens: to generate. forced: the continuation to decode instead, or empty.
    """

    key: str
    prompt_token_ids: list[int]
    budget: str | None
    max_tokens: int
    forced: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """What one engine is to do.

    Attributes:
        model: folder or name. kv_policy, kv_policy_args: as for `LLM`. recall: measure it.
        engine_args: further arguments of `LLM`. batch: requests given to the engine at a time.
    """

    model: str
    kv_policy: str
    kv_policy_args: dict[str, Any]
    recall: bool
    engine_args: dict[str, Any]
    batch: int
    requests: list[Request]


def run(work: Work, requests: Sequence[Request]) -> None:
    """Start the engine, answer everything, send each result as soon as its batch is done."""
    say(stage="loading vLLM")
    forced = any(request.forced for request in requests)
    if forced:
        # vLLM's second model runner takes logits processors of another kind.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from vllm_pyramid import LLM
    from vllm_pyramid.eval.forced import QUALIFIED_NAME

    with tempfile.TemporaryDirectory(prefix="vllm-pyramid-") as folder:
        traces = Path(folder)
        say(stage="starting the engine")
        llm = LLM(
            work.model,
            kv_policy=work.kv_policy,
            kv_policy_args=work.kv_policy_args or None,
            kv_trace=str(traces) if work.recall else None,
            logits_processors=[QUALIFIED_NAME] if forced else None,
            **_engine_args(work),
        )
        say(stage="running")
        for start in range(0, len(requests), work.batch):
            batch = requests[start : start + work.batch]
            outputs = llm.generate(
                [{"prompt_token_ids": request.prompt_token_ids} for request in batch],
                [_params(request) for request in batch],
                use_tqdm=False,
            )
            recalls = _take_recalls(traces) if work.recall else {}
            for request, output in zip(batch, outputs, strict=True):
                result = _result(request, output, recalls.get(output.request_id))
                say(key=request.key, result=asdict(result))


def _engine_args(work: Work) -> dict[str, Any]:
    """Defaults under what was asked for: prompts in one chunk if short enough, a small CPU pool."""
    from vllm.platforms import current_platform

    longest = work.engine_args["max_model_len"]
    defaults: dict[str, Any] = {
        "max_num_seqs": work.batch,
        "max_num_batched_tokens": max(2048, min(longest, 16384)),
        "seed": 0,
    }
    if current_platform.is_cpu():
        shape, _ = shape_of_model(work.model, None)
        blocks = (-(-longest // 16) + 1) * shape.num_layers * work.batch
        defaults["kv_cache_memory_bytes"] = blocks * shape.block_bytes(16)
        defaults["enforce_eager"] = True
    return {**defaults, **work.engine_args}


def _params(request: Request) -> Any:
    from vllm import SamplingParams

    from vllm_pyramid.eval.forced import forced_params

    extra: dict[str, object] = {} if request.budget is None else {"kv_budget": request.budget}
    if request.forced:
        return forced_params(request.forced, extra)
    return SamplingParams(temperature=0.0, max_tokens=request.max_tokens, extra_args=extra or None)


def _result(request: Request, output: Any, recall: list[list[float]] | None) -> Result:
    """Read the engine's own report; without one the policy was not in force.

    Raises:
        RuntimeError: there is no report, or a forced continuation was not followed.
    """
    report = output.kv_transfer_params
    if not report:
        raise RuntimeError("the engine returned no report of what was kept: the plugin is inactive")
    completion = output.outputs[0]
    if recall is not None and not np.isfinite(np.concatenate(recall)).all():
        raise RuntimeError("a prompt's last chunk was too short to measure its attention recall")
    nats = None
    if request.forced:
        if list(completion.token_ids) != request.forced:
            raise RuntimeError("the engine did not follow the given continuation")
        # The first token's comes from the prefill, before the eviction.
        chosen = [p[t].logprob for t, p in zip(request.forced, completion.logprobs, strict=True)]
        nats = -float(np.mean(chosen[1:]))
    return Result(
        text=completion.text,
        computed_tokens=report.get("computed_tokens", report["prompt_tokens"]),
        kept_tokens=list(report["kept_tokens"]),
        memory=report["blocks_after"] / report["blocks_before"],
        nats=nats,
        recall=recall,
    )


def _take_recalls(folder: Path) -> dict[str, list[list[float]]]:
    """The recall of every traced request `[layers][KV heads]`, by its external name.

    Ranks that share the KV heads write a file each; their heads are put side by side. Files of
    evictions after the prompt's end have no recall.
    """
    found: dict[str, list[list[float]]] = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as trace:
            if "prompt_len" not in trace:
                path.unlink()
                continue
            # vLLM adds a dash and a random end to the name that it gave the request.
            name = str(trace["request_id"]).rsplit("-", 1)[0]
            layers = sum(key.startswith("recall_") for key in trace.files)
            heads = [trace[f"recall_{layer}"].tolist() for layer in range(layers)]
        before = found.setdefault(name, [[] for _ in heads])
        found[name] = [left + right for left, right in zip(before, heads, strict=True)]
        path.unlink()
    return found


def main() -> None:
    """Entry point of `python -m vllm_pyramid.eval.engine`."""
    task = read_task()
    requests = [Request(**request) for request in task.pop("requests")]
    run(Work(**task, requests=[]), requests)


if __name__ == "__main__":
    main()
