# SPDX-License-Identifier: Apache-2.0
"""Streaming heads: some KV heads keep everything, the others the first and the recent tokens.

    retrieval head    [ everything ........................................... ][ generated ]
    streaming head    [ sinks ]                                      [ recent  ][ generated ]

DuoAttention (arXiv:2410.10819) and RazorAttention (arXiv:2407.15891, without its compensation
token): the heads that look far back are found once for a model, by a mask that is trained or by a
probe (`python -m lab.heads`). Nothing depends on the prompt, so a later question loses
nothing that a streaming head would have been asked for.

Streaming heads see the whole prompt while it is processed, and evict at its end. With
`chunk.tokens` they evict after each chunk of that many tokens, as DuoAttention does where it
pre-fills in chunks: a chunk sees the sinks, the recent tokens before it, and itself, so
prefill takes less time and memory.

    tokens of the prompt     0 ............. E .............. 2 E .............. 3 E
    retrieval head           [ everything ..........................................
    streaming head in 3rd    [ sinks ]                [ recent ][ the chunk so far ]

Behind the prompt all heads keep what is generated, as other methods here do; the papers let the
window slide on.

The mask is measured once for a model, in a checkout:

    python -m lab.heads --model MODEL -o heads --share 0.5
    vllm serve MODEL --kv-policy duoattention --kv-policy-args '{"mask": "heads", "share": 0.5}'

The command loads the model in Transformers and repeats random tokens four times. A KV head's score
is the share of its attention that falls on earlier copies of a token (echo) or on what followed
them (induction), whichever is larger. The probe refuses sliding windows, capped logits, learned
sinks and latent attention. `mask` also takes published scores: DuoAttention's folder, or the
`.json` file of HeadKV (arXiv:2410.19258). In a checkout `python -m lab.heads` tries a mask next to
random ones of as many heads, and has kvpress's probe over texts.

- **Memory.** Each KV head has a block table of its own. A block has as many bytes as one of all
  heads: 16 tokens of 8 heads are 128 tokens of one. A streaming head's tokens are rounded up to
  such blocks. By arithmetic half of the heads of Llama-3.1-8B, with 128 + 256 tokens, take 52 % of
  the blocks at 8,192 tokens. There is no budget. A prompt needs all its blocks until its end.
- **Prefix caching.** A request finds what others have computed, up to the block in which its own
  streaming heads' survivors begin. With inner evictions it finds prefixes up to the first of them.
- **RazorAttention's masks** take the best 1 % of the heads by echo and 14 % by induction; this
  probe takes the larger of both scores.
- **Limits**: docs/limits.md#of-this-version. With tensor-parallel ranks fewer heads stream:
  docs/parallel.md#lengths-of-single-heads.
- **Measured**: lab/results/single-heads.md, and decode rates in lab/results/benchmarks.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from vllm_pyramid.methods.streaming_heads.score_files import (
    Scores,
    check_heads,
    check_lanes,
    check_scores,
    of_kv_heads,
    read_scores,
)
from vllm_pyramid.methods.streaming_heads.split import HeadLengths
from vllm_pyramid.plan import Budget, EvictionPoint, RetentionPlan
from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.chunk import EvictionPoints

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.policy.policy import Policy

logger = logging.getLogger(f"vllm.{__name__}")

# As DuoAttention evaluates them, and lab/heads does.
SINKS, RECENT = 128, 256


class StreamingHeads(HeadLengths):
    """Let a share of the KV heads keep everything, and the others sinks and recent tokens.

    Attributes:
        mask: `[L][G]` scores of the KV heads, those that keep everything highest, or `[L][H]` of
            the query heads, of which the best counts for its KV head. In a preset and on the
            command line: a folder with `full_attention_heads.tsv` and `config.json`, as
            DuoAttention publishes and `python -m lab.heads` writes them, or HeadKV's `.json` file.
            None: only plans can be made, for which it does not matter which heads stream.
        share: of the KV heads that keep everything; of equal scores the lower layer's and head's.
        sinks: the first tokens, that a streaming head keeps. None: the folder's, else 128.
        recent: the last tokens of the prompt, that it keeps. None: the folder's, else 256.
        recent_share: of the prompt, in [0, 1]: that many last tokens stay, if they are more.
        ranks: tensor-parallel ranks with KV heads of their own; the engine sets it. They have one
            block table for the heads at the same place, as long as the longest of these needs it.
    """

    has_budget: ClassVar[bool] = False
    on_cuda: ClassVar[bool] = True
    plain: ClassVar[Mapping[str, str]] = {"scorer": "recency", **HeadLengths.plain}
    kind: Literal["streaming"] = "streaming"
    ranks: int = Field(default=1, ge=1)
    mask: Scores | None = None
    share: float = Field(default=0.5, ge=0, le=1)
    sinks: int | None = Field(default=None, ge=0, lt=2**31)
    recent: int | None = Field(default=None, ge=1, lt=2**31)
    recent_share: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _read_folder(cls, data: Any) -> Any:
        """Replace a path by what it holds: other processes open no file. Lists become tuples."""
        mask = data.get("mask") if isinstance(data, Mapping) else None
        if isinstance(mask, list):
            return {**data, "mask": tuple(tuple(r) if isinstance(r, list) else r for r in mask)}
        if not isinstance(mask, str):
            return data
        found = read_scores(Path(mask).expanduser())
        given = {key: value for key, value in data.items() if value is not None}
        return {"sinks": found.sinks, "recent": found.recent, **given, "mask": found.scores}

    @model_validator(mode="after")
    def _check_mask(self) -> StreamingHeads:
        if self.mask is not None:
            check_scores("heads.mask", self.mask)
        return self

    @property
    def kept_tokens(self) -> tuple[int, int]:
        """The first and the least last tokens of a prompt that a streaming head keeps."""
        return (
            SINKS if self.sinks is None else self.sinks,
            RECENT if self.recent is None else self.recent,
        )

    def keeps_everything(self, num_lanes: int) -> npt.NDArray[np.bool_]:
        """Return which lanes keep everything, `[num_lanes]`: the share with the highest scores.

        A lane of several ranks does if the head of any of them does; without a mask they spread
        evenly.
        """
        if self.mask is None:
            count = round(self.share * num_lanes)
            return np.diff(np.arange(num_lanes + 1) * count // num_lanes) > 0
        num_heads = num_lanes * self.ranks
        chosen = np.zeros(num_heads, bool)
        scores = of_kv_heads(self.mask, num_heads // len(self.mask)).ravel()
        count = round(self.share * num_heads)
        chosen[np.argsort(-scores, kind="stable")[:count]] = True
        by_rank = chosen.reshape(len(self.mask), self.ranks, -1)  # `[layers, ranks, lanes]`
        return by_rank.any(axis=1).ravel()

    def plan(
        self, policy: Policy, prompt_len: int, num_lanes: int, block_size: int, budget: Budget
    ) -> RetentionPlan:
        sinks, recent = self.kept_tokens
        recent = max(recent, int(self.recent_share * prompt_len))
        whole = self.keeps_everything(num_lanes)

        def point(computed: int, fill_blocks: bool) -> EvictionPoint:
            keep = np.where(whole, computed, min(computed, sinks + recent))
            mean = -(-int(keep.sum()) // num_lanes)
            return EvictionPoint.of(
                *(computed, block_size, mean, keep, fill_blocks), front=sinks, recent=recent
            )

        plan = RetentionPlan((point(prompt_len, policy.fill_blocks),), whole=whole)
        if not plan.evicts:
            return plan
        # Points fill blocks: the kernels score whole ones.
        return plan.with_inner(
            [point(computed, True) for computed in policy.chunk.points(policy, prompt_len)]
        )

    def on_ranks(self, policy: Policy, ranks: int, num_kv_heads: int) -> StreamingHeads:
        """Return this part for several ranks; ValueError: no head streams, as the policy asks."""
        if self.ranks not in (1, ranks):
            raise ValueError(
                f"heads.ranks is {self.ranks}, and {ranks} tensor-parallel ranks have KV heads of "
                "their own: leave it out, the engine sets it"
            )
        found = self.model_copy(update={"ranks": ranks})
        if ranks == 1 or self.mask is None:
            return found
        num_heads = len(self.mask) * num_kv_heads
        streams = 1 - float(found.keeps_everything(num_heads // ranks).mean())
        wanted = 1 - round(self.share * num_heads) / num_heads
        if wanted and not streams:
            raise ValueError(
                f"policy {policy.name!r} lets {wanted:.0%} of the KV heads stream, and with "
                f"{ranks} tensor-parallel ranks none would: ranks share block tables, so a head "
                "streams where the heads at its place of all ranks do; lower heads.share or "
                "--tensor-parallel-size"
            )
        logger.info(
            "kv-policy %s: %.0f %% of the KV heads stream instead of the mask's %.0f %%: %d "
            "tensor-parallel ranks share block tables, so a head streams only if its counterparts "
            "in all ranks do",
            *(policy.name, 100 * streams, 100 * wanted, ranks),
        )
        return found

    # Answers of a part --------------------------------------------------------------------------

    @property
    def unsupported(self) -> Unsupported:
        return {Feature.KV_TURNS: ("states whose KV heads differ in length are not saved yet")}

    def check_layers(self, num_layers: int) -> None:
        if self.mask is not None:
            check_lanes("heads.mask", self.mask, num_layers * self.ranks)

    def check_shape(self, num_layers: int, num_kv_heads: int, num_heads: int | None = None) -> None:
        if self.mask is not None:
            check_heads("heads.mask", self.mask, num_layers, num_kv_heads, num_heads)

    def check(self, policy: Policy) -> None:
        self.check_parts(policy)
        if policy.chunk != EvictionPoints(tokens=policy.chunk.tokens):
            raise ValueError(
                f"policy {policy.name!r} has streaming heads, of which heads.sinks and "
                "heads.recent say what they keep inside the prompt, too: of chunk, set tokens alone"
            )
        if policy.sinks or policy.window:
            raise ValueError(
                f"policy {policy.name!r} has streaming heads, of which heads.sinks and "
                "heads.recent say what they keep: leave sinks and window out"
            )

    def check_budget(self, policy: Policy, budget: Budget) -> None:
        if budget.percent != 100:
            raise ValueError(
                f"policy {policy.name!r} has streaming heads, so a budget of {budget} has no "
                "effect: leave it out; heads.share, heads.sinks, heads.recent and "
                "heads.recent_share say what is kept"
            )

    def prepare_args(self, policy: Policy, args: EngineArgs) -> None:
        if self.mask is None and 0 < self.share < 1:
            raise ValueError(
                f"policy {policy.name!r} does not know which heads stream: measure it in a "
                "checkout with python -m lab.heads --model MODEL -o FOLDER, or take a folder "
                "that DuoAttention publishes for the model, and add --kv-policy-args "
                '\'{"mask": "FOLDER"}\''
            )
