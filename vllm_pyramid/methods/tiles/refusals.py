# SPDX-License-Identifier: Apache-2.0
"""What does not work with a sparse prefill, each with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from vllm_pyramid.plan.tiles import TILE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pyramid.policy.policy import Policy


def check_config(policy: Policy, config: VllmConfig) -> None:
    """Refuse devices, flags and sizes of steps with which a prompt cannot be computed in tiles.

    Raises:
        ValueError: naming the flag to change.
    """
    scheduler, block_size = config.scheduler_config, config.cache_config.block_size
    longest = scheduler.long_prefill_token_threshold
    # Decoding requests come first; a prompt needs a whole tile of what they leave.
    needed = TILE + scheduler.max_num_seqs
    reason = None
    if current_platform.device_type != "cpu":
        reason = (
            "there are kernels for lists of tiles on CPUs alone: on CUDA stock attention reads "
            "the whole prompt. Serve on a CPU"
        )
    elif config.speculative_config is not None:
        reason = "it was not tried with drafts (--speculative-config): leave the flag out"
    elif config.parallel_config.pipeline_parallel_size > 1:
        reason = "it was not tried with several stages: leave --pipeline-parallel-size out"
    elif TILE % block_size:
        reason = (
            f"a tile of {TILE} tokens is not a number of blocks of {block_size}: set --block-size "
            "to 8, 16, 32, 64 or 128"
        )
    elif scheduler.max_num_batched_tokens < needed:
        reason = (
            f"a step of {scheduler.max_num_batched_tokens} tokens may have no room for a tile of "
            f"{TILE} next to {scheduler.max_num_seqs} requests that decode: set "
            f"--max-num-batched-tokens to at least {needed}, or lower --max-num-seqs"
        )
    elif 0 < longest < TILE:
        reason = (
            f"--long-prefill-token-threshold {longest} is smaller than a tile: set at least {TILE}"
        )
    if reason is not None:
        raise ValueError(
            f"policy {policy.name!r} computes prompts sparsely (prefill: antidiagonal), and "
            f"{reason}; or leave the section prefill out"
        )
