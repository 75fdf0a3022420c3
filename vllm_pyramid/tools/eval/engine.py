# SPDX-License-Identifier: Apache-2.0
"""One policy's engine in a process of its own: answers all requests of a run, budget by budget.

`answer_all` starts the process and `main` is what it runs. The process sends `{"stage": ...}` for
the progress display and `{"key": ..., "result": {...}}` for every request.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from vllm_pyramid.frontend.model_shape import shape_of_model
from vllm_pyramid.policy import load_policy
from vllm_pyramid.tools.child_process import (
    ChildError,
    orderly_termination,
    read_task,
    run_child,
    say,
)
from vllm_pyramid.tools.eval.result import REFERENCE_TOKENS, EvictionReport, Reference, Result

__all__ = ["ChildError", "Request", "Work", "answer_all", "orderly_termination"]


class Request(BaseModel):
    """One prompt to be answered.

    Attributes:
        key: comes back with the result.
        budget: the request's own, None for a policy that evicts nothing.
        max_tokens: to generate; no text stops it before, since vLLM then returns no report.
        forced: tokens to decode first, or empty; their probability is measured if no others follow.
        reference: of which they are the tokens, to be compared with.
        is_reference: the answer becomes a reference for others.
        ignore_eos: generate all of `max_tokens`.
        turns: where the conversation's earlier turns ended, in tokens; empty: not said.
    """

    model_config = ConfigDict(frozen=True)

    key: str
    prompt_token_ids: list[int]
    budget: str | None
    max_tokens: int
    forced: list[int] = []
    reference: Reference | None = None
    is_reference: bool = False
    ignore_eos: bool = False
    turns: list[int] = []

    @property
    def answer_tokens(self) -> int:
        """Tokens that the answer can take."""
        return self.max_tokens + len(self.forced)


class Work(BaseModel):
    """What one engine is to do.

    Attributes:
        label: names it in messages. model: folder or name.
        kv_policy, kv_policy_args: as for `LLM`. policy_name: as the engine reports it.
        engine_args: further arguments of `LLM`. batch: requests given to the engine at a time.
        recall: measure the attention recall. timed: warm up, then measure the speed.
    """

    model_config = ConfigDict(frozen=True)

    label: str
    model: str
    kv_policy: str
    kv_policy_args: dict[str, Any]
    policy_name: str
    engine_args: dict[str, Any]
    requests: list[Request]
    batch: int = 16
    recall: bool = False
    timed: bool = False


def answer_all(
    work: Work, on_stage: Callable[[str], None]
) -> Generator[tuple[str, Result], None, None]:
    """Run an engine in a process of its own; yields each request's key and result as they come.

    Close the iterator, or let it run out: then every process that it started has ended.

    Raises:
        ChildError: the engine failed; the message has the end of its log.
    """
    what = f"the engine with {work.label!r}"
    offline = Path(work.model).is_dir()
    with closing(run_child(__name__, work.model_dump(), what, offline=offline)) as messages:
        for message in messages:
            if "stage" in message:
                on_stage(f"{work.label}: {message['stage']}")
            else:
                yield message["key"], Result.model_validate(message["result"])


def run(work: Work) -> None:
    """Start the engine, answer everything, send each result as soon as its batch is done."""
    say(stage="loading vLLM")
    forced = any(request.forced for request in work.requests)
    if forced:
        # vLLM's second model runner takes logits processors of another kind.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from vllm_pyramid import LLM
    from vllm_pyramid.tools.eval.forced import QUALIFIED_NAME

    # Budgets are measured as they are given, but for a floor that the policy itself has.
    floor = load_policy(work.kv_policy, None, work.kv_policy_args).min_tokens or 0
    with tempfile.TemporaryDirectory(prefix="vllm-pyramid-") as folder:
        files = Path(folder)
        say(stage="starting the engine")
        llm = LLM(
            work.model,
            kv_policy=work.kv_policy,
            kv_policy_args=work.kv_policy_args or None,
            kv_min_tokens=floor,
            kv_trace=folder if work.recall else None,
            logits_processors=[QUALIFIED_NAME] if forced else None,
            max_logprobs=REFERENCE_TOKENS,
            **_engine_args(work),
        )

        def generate(batch: Sequence[Request]) -> list[Any]:
            prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in batch]
            return llm.generate(prompts, [_params(r, files) for r in batch], use_tqdm=False)

        if work.timed:
            say(stage="warming up")
            generate([work.requests[0].model_copy(update={"max_tokens": 2})])
        say(stage="generating")
        for start in range(0, len(work.requests), work.batch):
            batch = work.requests[start : start + work.batch]
            outputs = generate(batch)
            recalls = _take_recalls(files) if work.recall else {}
            for request, output in zip(batch, outputs, strict=True):
                result = _result(work, request, output, recalls.get(output.request_id))
                if request.reference is not None:
                    result = _compared(request, result, files)
                if request.forced and request.max_tokens:
                    own = output.outputs[0].token_ids[len(request.forced) :]
                    text = llm.get_tokenizer().decode(own, skip_special_tokens=True)
                    result = result.model_copy(update={"text": text})
                say(key=request.key, result=result.model_dump())


def _engine_args(work: Work) -> dict[str, Any]:
    """The work's own over defaults: prompts in one chunk if short enough, a small CPU pool."""
    from vllm.platforms import current_platform

    longest = work.engine_args["max_model_len"]
    defaults: dict[str, Any] = {
        "max_num_seqs": work.batch,
        "max_num_batched_tokens": max(2048, min(longest, 16384)),
        "seed": 0,
        "enable_prefix_caching": False,  # other chunks round otherwise, and runs are compared
    }
    if current_platform.is_cpu():
        shape, _ = shape_of_model(work.model, None)
        layers = shape.num_layers + sum(kind.layers for kind in shape.other_layers)
        blocks = (-(-longest // 16) + 1) * layers * work.batch  # as if all had full attention
        size = blocks * shape.page_bytes(16)
        defaults |= {"kv_cache_memory_bytes": size, "enforce_eager": True}
    return {**defaults, **work.engine_args}


def _findings(request: Request, files: Path) -> Path:
    """Where a worker writes what it found beside a reference."""
    return files / f"{request.key}.json"


def _params(request: Request, files: Path) -> Any:
    from vllm import SamplingParams

    from vllm_pyramid.tools.eval.forced import FINDINGS_KEY, REFERENCE_KEY, forced_params

    extra: dict[str, object] = {} if request.budget is None else {"kv_budget": request.budget}
    if request.turns:
        extra["kv_turns"] = request.turns
    if request.reference is not None:
        extra[REFERENCE_KEY] = request.reference.model_dump()
        extra[FINDINGS_KEY] = str(_findings(request, files))
    if request.forced:
        return forced_params(request.forced, extra, request.max_tokens)
    return SamplingParams(
        logprobs=REFERENCE_TOKENS if request.is_reference else None,
        temperature=0.0,
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
        extra_args=extra or None,
    )


def _result(work: Work, request: Request, output: Any, recall: list[list[float]] | None) -> Result:
    """Read the engine's output.

    Raises:
        RuntimeError: the report of the eviction is wrong, a forced continuation was not followed,
            or something that was to be measured is missing.
    """
    completion = output.outputs[0]
    if recall is not None and not np.isfinite(np.concatenate(recall)).all():
        raise RuntimeError("a prompt's last chunk was too short to measure its attention recall")
    nats = prefill = speed = None
    reference = Reference.of(completion) if request.is_reference else None
    if request.forced and list(completion.token_ids[: len(request.forced)]) != request.forced:
        raise RuntimeError("the engine did not follow the given continuation")
    if request.forced and not request.max_tokens:
        # The first token's comes from the prefill, before the eviction.
        chosen = [p[t].logprob for t, p in zip(request.forced, completion.logprobs, strict=True)]
        nats = -float(np.mean(chosen[1:])) if len(chosen) > 1 else 0.0
    eviction = EvictionReport.checked(output.kv_transfer_params, work.policy_name)
    if request.turns and eviction.kv_turns != [*request.turns, len(request.prompt_token_ids)]:
        raise RuntimeError(f"the engine followed the turns {eviction.kv_turns}, not those given")
    if work.timed:
        times = output.metrics
        if times is None:
            raise RuntimeError("the engine returned no time stamps although statistics are on")
        prefill = times.first_token_ts - times.scheduled_ts
        decoding = times.last_token_ts - times.first_token_ts
        speed = (len(completion.token_ids) - 1) / decoding
    return Result(
        text=completion.text,
        eviction=eviction,
        nats=nats,
        recall=recall,
        reference=reference,
        prefill_seconds=prefill,
        decode_tokens_per_second=speed,
    )


def _compared(request: Request, result: Result, files: Path) -> Result:
    """The result with what the worker found beside the reference, but for the first token.

    Raises:
        RuntimeError: it found nothing.
    """
    path = _findings(request, files)
    if not path.is_file():
        raise RuntimeError("the worker compared nothing with the whole cache's answer")
    found = json.loads(path.read_text())[1:]
    path.unlink(missing_ok=True)
    agrees, nats = zip(*found, strict=True) if found else ((True,), (0.0,))
    update = {"agreement": float(np.mean(agrees)), "divergence": float(np.mean(nats))}
    return result.model_copy(update=update)


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


if __name__ == "__main__":
    run(Work.model_validate(read_task()))
