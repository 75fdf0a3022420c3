# SPDX-License-Identifier: Apache-2.0
"""Why a request with a ticket computes its prompt itself; labels of a metric, and words."""

from __future__ import annotations

from vllm.v1.request import Request

from vllm_pyramid.policy.request import ServedRequest

LOADED, PREEMPTED = "loaded", "preempted"
TICKET, ABSENT, UNREACHABLE, UNREAD = "ticket", "absent", "unreachable", "unread"
DIFFERS, SHORT = "differs", "short"
WORDS = {
    TICKET: (
        "its ticket cannot be read or names an engine that is not among the peers, or this engine "
        "fetches no states (kv_role kv_producer)"
    ),
    ABSENT: "there is no such state: another request has fetched it, or its time is over",
    UNREACHABLE: "the engine that has the state cannot be reached",
    UNREAD: "the state is damaged, or its blocks did not come in time",
    DIFFERS: "the state is of another model, version, prompt, policy or budget",
    SHORT: "its answer has one token, or ends with the first",
    PREEMPTED: "it was preempted, and its prompt was computed again",
    "logprobs": "log probabilities are not handed over",
    "grammar": "its first token has to follow a grammar",
    "seed": "its tokens follow a seed, of which the first was drawn elsewhere",
    "thinking": "it has a budget of tokens for thinking",
    "inputs": "it has images or embeddings",
    "turns": "it is a turn of a conversation that resumes (kv_turn_mode is not exact)",
    "uncached": "it asks for nothing from a cache",
}
# Of a request that ended before it began.
ABORTED = "aborted"


def why_itself(request: Request, served: ServedRequest, max_model_len: int) -> str | None:
    """Return why a request cannot begin behind a first token that another engine has sampled.

    Everything else that looks at earlier tokens of an answer (penalties, `min_tokens`, bad words,
    stop strings) sees the first token as its own. The result is a label of `WORDS`; None if it can.
    """
    params = request.sampling_params
    if params is None:
        return "inputs"
    is_text = request.prompt_token_ids is not None and request.prompt_embeds is None
    of_tokens = params.logprobs, params.prompt_logprobs, params.logprob_token_ids
    is_short = request.max_tokens <= 1 or request.num_prompt_tokens + 1 >= max_model_len
    found = {
        "inputs": not is_text or request.mm_features,
        "logprobs": any(one is not None for one in of_tokens),
        "grammar": request.use_structured_output,
        "seed": params.seed is not None and params.temperature > 0,
        "thinking": params.thinking_token_budget is not None,
        "turns": served.resumed_turns is not None,
        "uncached": request.skip_reading_prefix_cache,
        SHORT: is_short,
    }
    return next((label for label, holds in found.items() if holds), None)


def ends_answer(request: Request, token: int) -> bool:
    """Return whether a first token ends the answer, or would if it were long enough."""
    params = request.sampling_params
    assert params is not None, "checked by `why_itself`"
    return token == params.eos_token_id or token in (params.stop_token_ids or ())
