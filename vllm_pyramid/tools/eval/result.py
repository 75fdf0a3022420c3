# SPDX-License-Identifier: Apache-2.0
"""What comes back for a prompt: the engine's own report of the eviction, and the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# Likeliest tokens of a place that a reference holds; all others count as one.
REFERENCE_TOKENS = 64


class EvictionReport(BaseModel):
    """What a request kept, as the engine says in `RequestOutput.kv_transfer_params`.

    Attributes:
        computed_tokens: tokens computed when the last eviction happened: those of the prompt, or
            more where the policy evicts during generation.
        kept_tokens: how many of these were kept, one number a layer, or `kv_heads` numbers.
        evicted_tokens: how many were evicted, summed over the layers.
        blocks_before, blocks_after: blocks held over all layers around that eviction.
        kv_heads: KV heads of a layer, where they have lengths of their own.
        kv_turns: where the conversation's turns ended, this one's last; None if it was not said.
        inner_evictions: how often the prompt was evicted before its end; None where it cannot be.
        pages_read, pages_visible: pages that generated tokens read and saw, over all layers; None
            where the policy selects none.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    kv_policy: str
    prompt_tokens: int
    computed_tokens: int
    kept_tokens: Annotated[list[int], Field(min_length=1)]
    evicted_tokens: int
    blocks_before: int
    blocks_after: int
    kv_heads: int | None = None
    kv_turns: list[int] | None = None
    inner_evictions: int | None = None
    pages_read: int | None = None
    pages_visible: int | None = None

    @classmethod
    def checked(cls, parameters: Mapping[str, Any] | None, policy: str) -> EvictionReport:
        """Read the report of a request under `policy`.

        RuntimeError: the report is absent, incomplete, contradicts itself or is about another
        policy. Then the plugin did not do what it was told, and no figure may be shown.
        """
        if not parameters:
            raise RuntimeError(
                f"the engine returned no report of what {policy!r} kept: the plugin is not active"
            )
        # Only policies that evict during generation say how many tokens were computed.
        computed = {"computed_tokens": parameters.get("prompt_tokens")}
        try:
            report = cls.model_validate({**computed, **parameters})
        except ValidationError as error:
            raise RuntimeError(f"the report of what {policy!r} kept is wrong: {error}") from error
        if report.kv_policy != policy:
            raise RuntimeError(f"the engine ran {report.kv_policy!r} instead of {policy!r}")
        layers, kept = len(report.kept_tokens), sum(report.kept_tokens)
        if report.computed_tokens * layers - kept != report.evicted_tokens:
            raise RuntimeError(
                f"the report of what {policy!r} kept contradicts itself: {report.computed_tokens} "
                f"tokens in {layers} layers, {kept} kept, yet {report.evicted_tokens} evicted"
            )
        return report

    @property
    def memory(self) -> float:
        """Return the blocks held after the eviction, as a share of those that all tokens take."""
        return self.blocks_after / self.blocks_before

    @property
    def read(self) -> float | None:
        """Return the share of the pages that generated tokens saw which they read; None for all."""
        if self.pages_read is None or not self.pages_visible:
            return None
        return self.pages_read / self.pages_visible


class Reference(BaseModel):
    """What the whole cache says greedily, and how sure it is of it.

    Attributes:
        token_ids: `[n]`, its answer.
        likeliest: `[n][REFERENCE_TOKENS]` token ids, the most likely first. logprobs: in nats.
    """

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    likeliest: list[list[int]]
    logprobs: list[list[float]]

    @classmethod
    def of(cls, completion: Any) -> Reference:
        """Read a completion that was generated with `REFERENCE_TOKENS` log probabilities."""
        places = [
            sorted(place.items(), key=lambda item: item[1].rank)[:REFERENCE_TOKENS]
            for place in completion.logprobs
        ]
        return cls(
            token_ids=list(completion.token_ids),
            likeliest=[[token for token, _ in place] for place in places],
            logprobs=[[round(found.logprob, 5) for _, found in place] for place in places],
        )


class Result(BaseModel):
    """What the engine returned for a prompt.

    Attributes:
        text: the generated text.
        nats: mean negative log probability a token of a forced continuation but its first, else
            None.
        request_id: the engine's name of the request, as in its traces.
        agreement, divergence: along a reference but for its first token, which comes from the
            prefill: the share of its tokens that are the likeliest ones here too, and the mean
            KL(reference || this) of the next token in nats. None without a reference.
        reference: what other policies are compared with, where it was asked for.
        prefill_seconds: from the start of the prefill to the first token; None if not timed.
        decode_tokens_per_second: of the tokens after the first; None if not timed.
    """

    model_config = ConfigDict(frozen=True)

    text: str
    eviction: EvictionReport
    request_id: str = ""
    nats: float | None = None
    agreement: float | None = None
    divergence: float | None = None
    reference: Reference | None = None
    prefill_seconds: float | None = None
    decode_tokens_per_second: float | None = None
