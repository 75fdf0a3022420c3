# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill: tiles of a prompt's queries attend to the tiles of keys that are worth most.

    a chunk of the prompt   ends where a tile does, so that each tile is computed in one step
    a tile of 128 queries   estimates what each tile of keys before it is worth to a KV head's
                            queries, and attends to the best (`attention.py`)
    the lowest layers, and the prompt's last tiles, attend to everything; so does the answer

It saves time before the first token of long prompts. K and V of the layers above are approximate,
though always the same for the same tokens (`policy/prefill.py`). XAttention, arXiv:2503.16428; that
prompts attend sparsely: MInference, arXiv:2407.02490.

    vllm serve MODEL --kv-policy sparse-prefill
    vllm serve MODEL --kv-policy auto --kv-policy-args '{"prefill": "antidiagonal"}'

The worth of a tile is estimated by sums of products over antidiagonals of 16 x 16 tokens, softmaxed
and averaged over the query heads of a KV head. A tile of queries takes the first tile, its own, and
the best of the others until `top_p` is reached. The paper lets query heads choose by themselves.

- **This is not lossless**: K and V above the first sparse layer are approximate, and everything
  that follows. Cost and gain to 8k: lab/results/gates.md#f-sparse-prefill. `dense_last` must cover
  the policy's window, whose queries then see whole attention.
- **Chunks** end at multiples of 128, so a step needs room for 128 prompt tokens next to the
  requests that decode.
- **Prefix caching** finds the sparse part of a prompt, in whole tiles, for requests with the same
  settings. `kv_policy: full` computes exactly and shares nothing with them.
- **A response** has `prefill_tiles_read` and `prefill_tiles_visible` (docs/usage.md).
- **Refused**: CUDA; `h2o`, `scissorhands`, `keyformer`, `schedule: interval` (skipped tiles give no
  scores); `pyramidinfer`; and, not tried: solved lengths, `chunk.tokens`, selected pages, streaming
  heads, V in host memory, sliding windows, states, drafts, pipeline stages,
  turns that resume (`kv_turn_mode: resume`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.plan.tiles import TILE
from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.prefill import Prefill

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import SchedulerHooks, WorkerContext, WorkerHooks

__all__ = ["AntidiagonalTiles"]


class AntidiagonalTiles(Prefill):
    """Attend to the tiles whose antidiagonals have the largest products.

    Attributes:
        top_p: share of the estimated worth that the chosen tiles reach; 1 takes all tiles.
        dense_layers: number of the lowest layers, which attend to everything.
        dense_last: the prompt's last tokens, which do, too, with the rest of their first tile.
    """

    kind: Literal["antidiagonal"] = "antidiagonal"
    top_p: float = Field(default=0.95, gt=0, le=1)
    dense_layers: int = Field(default=2, ge=0, lt=2**31)
    dense_last: int = Field(default=64, ge=1, lt=2**31)

    skips_tiles: ClassVar[bool] = True

    def sparse_tokens(self, prompt_len: int) -> int:
        return max(prompt_len - self.dense_last, 0) // TILE * TILE

    @property
    def works_during_prompt(self) -> bool:
        return True

    @property
    def attends(self) -> bool:
        return True

    @property
    def unsupported(self) -> Unsupported:
        tiles = "its prompts attend to chosen tiles"
        return {
            Feature.CUDA: f"{tiles}, of which no kernels for CUDA read lists",
            Feature.DRAFTS: f"{tiles}, which was not tried with drafts",
            Feature.PIPELINE: f"{tiles}, which was not tried with several stages",
            Feature.OTHER_LAYERS: f"{tiles}, which was not tried with a sliding window or a state",
            Feature.PROMPT_LOGPROBS: f"{tiles}, so they would be approximate",
            Feature.KV_EVENTS: (
                f"{tiles}, and requests without this part do not find them, which no router knows"
            ),
            Feature.KV_TURNS: (
                f"{tiles}, and where a turn ended inside a tile a resumed prompt would not be the "
                "one that is computed again"
            ),
        }

    def check(self, policy: Policy) -> None:
        """Refuse parts with which a sparse prefill cannot work, or was not tried."""
        reason = None
        if any(part.works_in_every_step for part in policy.parts):
            reason = (
                "gathers scores or evicts in every step, and a tile that is skipped gives its keys "
                "no score: choose a policy that evicts at the prompt's end"
            )
        elif policy.allocator.thins_prompts:
            reason = (
                f"shortens prompts between layers (allocator {policy.allocator.kind!r}), by "
                "attention that skipped tiles do not give: choose another allocator"
            )
        elif policy.allocator.defers:
            reason = (
                f"has the allocator {policy.allocator.kind!r}, with which it was not tried: choose "
                "uniform or arithmetic"
            )
        elif policy.chunk.tokens:
            reason = (
                "evicts inside the prompt (chunk.tokens), so tiles would be cut and gone: leave "
                "the section chunk out"
            )
        elif policy.attend.selects:
            reason = "selects pages (attend: pages), with which it was not tried"
        elif policy.heads.splits:
            reason = "gives KV heads lengths of their own (heads), with which it was not tried"
        elif not policy.copies_blocks:
            reason = "keeps V in host memory (values: host), with which it was not tried"
        elif policy.scorer.needs_queries and policy.window > self.dense_last:
            reason = (
                f"scores with the attention of the last {policy.window} tokens, which must be that "
                f"to everything: set prefill.dense_last to at least {policy.window}"
            )
        if reason is not None:
            raise ValueError(
                f"policy {policy.name!r} computes prompts sparsely (prefill: antidiagonal), and it "
                f"{reason}; or leave the section prefill out"
            )

    def check_layers(self, num_layers: int) -> None:
        if self.dense_layers >= num_layers:
            raise ValueError(
                f"prefill: {self.dense_layers} layers attend to everything (dense_layers), and the "
                f"model has {num_layers}: nothing would be sparse; lower `dense_layers`"
            )

    def check_config(self, policy: Policy, config: VllmConfig) -> None:
        """Refuse sizes of steps and blocks with which a prompt cannot be computed in tiles."""
        scheduler, block_size = config.scheduler_config, config.cache_config.block_size
        longest = scheduler.long_prefill_token_threshold
        # Decoding requests come first; a prompt needs a whole tile of what they leave.
        needed = TILE + scheduler.max_num_seqs
        reason = None
        if TILE % block_size:
            reason = (
                f"a tile of {TILE} tokens is not a number of blocks of {block_size}: set "
                "--block-size to 8, 16, 32, 64 or 128"
            )
        elif scheduler.max_num_batched_tokens < needed:
            reason = (
                f"a step of {scheduler.max_num_batched_tokens} tokens may have no room for a tile "
                f"of {TILE} next to {scheduler.max_num_seqs} requests that decode: set "
                f"--max-num-batched-tokens to at least {needed}, or lower --max-num-seqs"
            )
        elif 0 < longest < TILE:
            reason = (
                f"--long-prefill-token-threshold {longest} is smaller than a tile: set at least "
                f"{TILE}"
            )
        if reason is not None:
            raise ValueError(
                f"policy {policy.name!r} computes prompts sparsely (prefill: antidiagonal), and "
                f"{reason}; or leave the section prefill out"
            )

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks | None:
        from vllm_pyramid.methods.tiles.worker import TileAttention

        return TileAttention(self, context)

    def scheduler_hooks(self, policy: Policy, num_layers: int) -> SchedulerHooks | None:
        from vllm_pyramid.methods.tiles.reads import TileReads

        return TileReads()
