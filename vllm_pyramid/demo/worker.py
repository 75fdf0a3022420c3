# SPDX-License-Identifier: Apache-2.0
"""One run of the demonstration in a process of its own: one policy, one engine, one prompt.

It reads a `Task`, and sends `{"stage": ...}` messages for the progress display and last an
`{"answer": ...}` (see `vllm_pyramid.child_process`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_pyramid.child_process import read_task, say

# Fields of `RequestOutput.kv_transfer_params` that prove what was evicted.
PROOF_KEYS = (
    "kv_policy",
    "prompt_tokens",
    "kept_tokens",
    "evicted_tokens",
    "blocks_before",
    "blocks_after",
)


@dataclass(frozen=True)
class Task:
    """What to run. `kv_budget` is None for policies that evict nothing; lengths in tokens."""

    model: str
    prompt: str
    max_tokens: int
    max_model_len: int
    kv_policy: str
    kv_budget: str | None
    kv_policy_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came back, all of it as the engine reported it.

    Attributes:
        text: the generated text.
        prompt_tokens: length of the prompt.
        kept_tokens: tokens kept of the prompt, one number a layer.
        evicted_tokens: tokens evicted, summed over the layers.
        blocks_before, blocks_after: blocks held over all layers at the prompt's end, before and
            after the eviction.
        prefill_seconds: from the start of the prefill to the first token.
        decode_tokens_per_second: of the tokens after the first.
    """

    kv_policy: str
    text: str
    prompt_tokens: int
    kept_tokens: list[int]
    evicted_tokens: int
    blocks_before: int
    blocks_after: int
    prefill_seconds: float
    decode_tokens_per_second: float


def proof_of(kv_transfer_params: Mapping[str, Any] | None, kv_policy: str) -> dict[str, Any]:
    """The engine's own report about the eviction, checked.

    Raises:
        RuntimeError: the report is absent, incomplete, inconsistent or about another policy: then
            the plugin did not do what was asked, and the demonstration must not pretend it did.
    """
    if not kv_transfer_params:
        raise RuntimeError(
            f"the engine returned no report of what {kv_policy!r} kept: the plugin is not active"
        )
    missing = [key for key in PROOF_KEYS if key not in kv_transfer_params]
    if missing:
        raise RuntimeError(
            f"the engine's report of what {kv_policy!r} kept lacks {', '.join(missing)}"
        )
    proof = {key: kv_transfer_params[key] for key in PROOF_KEYS}
    if proof["kv_policy"] != kv_policy:
        raise RuntimeError(f"the engine ran {proof['kv_policy']!r} where {kv_policy!r} was asked")
    kept = [int(tokens) for tokens in proof["kept_tokens"]]
    evicted = proof["prompt_tokens"] * len(kept) - sum(kept)
    if not kept or evicted != proof["evicted_tokens"]:
        raise RuntimeError(
            f"the engine's report contradicts itself: {proof['prompt_tokens']} tokens in "
            f"{len(kept)} layers, {sum(kept)} kept, yet {proof['evicted_tokens']} evicted"
        )
    return proof | {"kept_tokens": kept}


def run(task: Task) -> Answer:
    """Start an engine, generate once to warm it up and once to measure, and report."""
    # First the package's own LLM: nothing here works without vLLM, and its import takes seconds.
    say(stage="loading vLLM")
    from vllm import SamplingParams

    from vllm_pyramid import LLM

    say(stage="starting the engine")
    policy: dict[str, Any] = {"kv_policy": task.kv_policy}
    if task.kv_budget is not None:
        policy["kv_budget"] = task.kv_budget
        policy["kv_policy_args"] = task.kv_policy_args
    llm = LLM(
        task.model,
        max_model_len=task.max_model_len,
        max_num_seqs=4,
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=False,  # the time stamps below come with the statistics
        seed=0,
        **policy,
    )

    def generate(max_tokens: int) -> Any:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return llm.generate([task.prompt], sampling, use_tqdm=False)[0]

    say(stage="warming up")
    generate(2)
    say(stage="generating")
    output = generate(task.max_tokens)
    times, completion = output.metrics, output.outputs[0]
    if times is None:
        raise RuntimeError("the engine returned no time stamps although statistics are on")
    return Answer(
        text=completion.text,
        prefill_seconds=times.first_token_ts - times.scheduled_ts,
        decode_tokens_per_second=(len(completion.token_ids) - 1)
        / (times.last_token_ts - times.first_token_ts),
        **proof_of(output.kv_transfer_params, task.kv_policy),
    )


def main() -> None:
    """Entry point of `python -m vllm_pyramid.demo.worker`."""
    task = Task(**read_task())
    say(answer=asdict(run(task)))


if __name__ == "__main__":
    main()
