# SPDX-License-Identifier: Apache-2.0
"""One policy's engine in a process, which answers all requests of a run.

The process sends `{"stage": ...}` for the progress display and `{"key": ..., "result": {...}}` for
every request.
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
from vllm_pyramid.policy.request_keys import RESUME
from vllm_pyramid.tools.child_process import read_task, run_child, say
from vllm_pyramid.tools.eval.result import REFERENCE_TOKENS, EvictionReport, Reference, Result


class Request(BaseModel):
    """One prompt to be answered.

    Attributes:
        key: comes back with the result.
        budget: the request's own, None for a policy that evicts nothing.
        policy: the request's own, None for the engine's.
        max_tokens: to generate; no text stops it before, since vLLM then returns no report.
        forced: tokens to decode first, or empty; their probability is measured if no others follow.
        reference: whose tokens they are, to be compared with.
        is_reference: the answer becomes a reference for others.
        ignore_eos: generate all of `max_tokens`.
        turns: where the conversation's earlier turns ended, in tokens; empty: not said.
    """

    model_config = ConfigDict(frozen=True)

    key: str
    prompt_token_ids: list[int]
    budget: str | None
    max_tokens: int
    policy: str | None = None
    forced: list[int] = []
    reference: Reference | None = None
    is_reference: bool = False
    ignore_eos: bool = False
    turns: list[int] = []

    @property
    def answer_tokens(self) -> int:
        """Return how many tokens the answer can take."""
        return self.max_tokens + len(self.forced)

    def params(self, findings: Path) -> Any:
        """Return vLLM's sampling parameters; a worker writes comparisons to `findings`."""
        from vllm import SamplingParams

        from vllm_pyramid.tools.eval.forced import FINDINGS_KEY, REFERENCE_KEY, forced_params

        extra: dict[str, object] = {} if self.budget is None else {"kv_budget": self.budget}
        if self.policy is not None:
            extra["kv_policy"] = self.policy
        if self.turns:
            extra |= {"kv_turns": self.turns, "kv_turn_mode": RESUME}
        if self.reference is not None:
            extra |= {REFERENCE_KEY: self.reference.model_dump(), FINDINGS_KEY: str(findings)}
        if self.forced:
            return forced_params(self.forced, extra, self.max_tokens)
        return SamplingParams(
            logprobs=REFERENCE_TOKENS if self.is_reference else None,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            extra_args=extra or None,
        )


class Work(BaseModel):
    """What one engine is to do.

    Attributes:
        label: names it in messages. policy_name: as the engine reports it.
        engine_args: further arguments of `LLM`. batch: requests given to the engine at a time.
        timed: warm up, then measure the speed.
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
    timed: bool = False

    def llm_args(self) -> dict[str, Any]:
        """Return `engine_args` over defaults: prompts in one chunk, a small pool on the CPU."""
        from vllm.platforms import current_platform

        longest = self.engine_args["max_model_len"]
        defaults: dict[str, Any] = {
            "max_num_seqs": self.batch,
            "max_num_batched_tokens": max(2048, min(longest, 16384)),
            "seed": 0,
            "enable_prefix_caching": False,  # other chunks round otherwise, and runs are compared
        }
        if current_platform.is_cpu():
            shape, _ = shape_of_model(self.model, None)
            layers = shape.num_layers + sum(kind.layers for kind in shape.other_layers)
            blocks = (-(-longest // 16) + 1) * layers * self.batch  # as if all attend to everything
            size = blocks * shape.page_bytes(16)
            defaults |= {"kv_cache_memory_bytes": size, "enforce_eager": True}
        return {**defaults, **self.engine_args}


def answer_all(
    work: Work, on_stage: Callable[[str], None]
) -> Generator[tuple[str, Result], None, None]:
    """Run an engine in a process; yield each request's key and result as they come.

    Every process that it started has ended when the iterator is closed or exhausted.

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
    """Start the engine, answer everything, and send each result as soon as its batch is done."""
    say(stage="loading vLLM")
    # A core in a process of its own would load vLLM once more.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    forced = any(request.forced for request in work.requests)
    if forced:
        # vLLM's second model runner takes logits processors of another kind.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from vllm.inputs import TokensPrompt

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
            logits_processors=[QUALIFIED_NAME] if forced else None,
            max_logprobs=REFERENCE_TOKENS,
            **work.llm_args(),
        )

        def generate(batch: Sequence[Request]) -> list[Any]:
            prompts = [TokensPrompt(prompt_token_ids=request.prompt_token_ids) for request in batch]
            params = [request.params(files / f"{request.key}.json") for request in batch]
            return llm.generate(prompts, params, use_tqdm=False)

        if work.timed:
            say(stage="warming up")
            generate([work.requests[0].model_copy(update={"max_tokens": 2})])
        say(stage="generating")
        for start in range(0, len(work.requests), work.batch):
            batch = work.requests[start : start + work.batch]
            outputs = generate(batch)
            for request, output in zip(batch, outputs, strict=True):
                measured: dict[str, Any] = {"request_id": output.request_id}
                if request.reference is not None:
                    measured |= _compared(files / f"{request.key}.json")
                if request.forced and request.max_tokens:
                    own = output.outputs[0].token_ids[len(request.forced) :]
                    measured["text"] = llm.get_tokenizer().decode(own, skip_special_tokens=True)
                if work.timed:
                    measured |= _speeds(output)
                result = _result(request, output, work.policy_name, measured)
                say(key=request.key, result=result.model_dump())


def _result(request: Request, output: Any, policy: str, measured: dict[str, Any]) -> Result:
    """Read the engine's output.

    RuntimeError: the report of the eviction is wrong, or a forced continuation was not followed.
    """
    completion = output.outputs[0]
    if request.forced and list(completion.token_ids[: len(request.forced)]) != request.forced:
        raise RuntimeError("the engine did not follow the given continuation")
    if request.forced and not request.max_tokens:
        # The first token's comes from the prefill, before the eviction.
        chosen = [p[t].logprob for t, p in zip(request.forced, completion.logprobs, strict=True)]
        measured["nats"] = -float(np.mean(chosen[1:])) if len(chosen) > 1 else 0.0
    if request.is_reference:
        measured["reference"] = Reference.of(completion)
    eviction = EvictionReport.checked(output.kv_transfer_params, request.policy or policy)
    if request.turns and eviction.kv_turns != [*request.turns, len(request.prompt_token_ids)]:
        raise RuntimeError(f"the engine followed the turns {eviction.kv_turns}, not those given")
    return Result(**{"text": completion.text, "eviction": eviction, **measured})


def _speeds(output: Any) -> dict[str, float]:
    """Return the request's times by the engine's clock."""
    times = output.metrics
    if times is None:
        raise RuntimeError("the engine returned no time stamps although statistics are on")
    decoded = len(output.outputs[0].token_ids) - 1
    return {
        "prefill_seconds": times.first_token_ts - times.scheduled_ts,
        "decode_tokens_per_second": decoded / (times.last_token_ts - times.first_token_ts),
    }


def _compared(findings: Path) -> dict[str, float]:
    """Return what the worker found beside the reference, first token apart; or RuntimeError."""
    if not findings.is_file():
        raise RuntimeError("the worker compared nothing with the whole cache's answer")
    found = json.loads(findings.read_text())[1:]
    findings.unlink(missing_ok=True)
    agrees, nats = zip(*found, strict=True) if found else ((True,), (0.0,))
    return {"agreement": float(np.mean(agrees)), "divergence": float(np.mean(nats))}


if __name__ == "__main__":
    run(Work.model_validate(read_task()))
