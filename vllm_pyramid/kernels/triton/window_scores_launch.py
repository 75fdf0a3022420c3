# SPDX-License-Identifier: Apache-2.0
"""Launchers of the window scores, a part of `functions.py`: checks, scratch memory, launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from vllm_pyramid.kernels.log_sum_exp import check_lse, check_some_requests
from vllm_pyramid.kernels.records import Reduction, Softmax, WindowBatch
from vllm_pyramid.kernels.triton.checks import check_keys, check_query, check_table
from vllm_pyramid.kernels.triton.tiles import score_config
from vllm_pyramid.kernels.triton.window_scores import (
    join_log_sum_exp_kernel,
    pool_kernel,
    window_mass_kernel,
    window_max_sum_kernel,
)

LOG2_E = 1.4426950408889634
KEYS_PER_SPLIT = 512


def window_scores(
    batch: WindowBatch,
    softmax: Softmax,
    reduction: Reduction,
    *,
    log_sum_exp: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score by the mass kernels, then pool; `log_sum_exp` may have any strides."""
    launch = WindowLaunch.of(batch, softmax)
    if log_sum_exp is not None:
        check_lse(log_sum_exp, batch.query)
    num_columns = launch.longest - batch.window
    if num_columns < 1:
        raise ValueError(
            f"prompts of {launch.longest} tokens have none before a window of {batch.window}"
        )
    if log_sum_exp is not None:
        mass = launch.mass(log_sum_exp, num_columns, reduction.gqa_reduce, by_token=True)
    else:
        partials = launch.partials(launch.num_rows)
        launch.max_sum(partials)
        mass = launch.mass(launch.joined(partials), num_columns, reduction.gqa_reduce)
    if reduction.pooling == "none" or reduction.kernel_size == 1:
        return mass
    average = reduction.pooling == "avg"
    return pool(mass, batch.prompt_lens, batch.window, reduction.kernel_size, average=average)


@dataclass(frozen=True)
class WindowLaunch:
    """The launches over one batch, and the arguments that its kernels share.

    `num_rows` are the softmaxes of the batch, `R * H * window`; `splits` are of the keys, for the
    first pass over K.
    """

    batch: WindowBatch
    softmax: Softmax
    longest: int
    group: int
    num_rows: int
    splits: int
    config: dict[str, int]
    inputs: tuple[torch.Tensor, ...]
    scalars: tuple[float, ...]
    strides: tuple[int, ...]
    switches: dict[str, Any]

    @classmethod
    def of(cls, batch: WindowBatch, softmax: Softmax) -> WindowLaunch:
        """Check a batch, and read its longest prompt back if the host does not know it."""
        query, key_cache, block_table = batch.query, batch.key_cache, batch.block_table
        scales, scale_strides = check_keys(key_cache, batch.key_scales)
        num_kv_heads, block_size, head_size = key_cache.shape[1:]
        group = check_query(query, key_cache)
        num_requests = batch.prompt_lens.shape[0]
        check_some_requests(num_requests)
        check_table(block_table, num_requests)
        if batch.window < 1:
            raise ValueError(f"window {batch.window} must be positive")
        longest = batch.max_prompt_len
        if longest is None:
            longest = int(batch.prompt_lens.max().item())
        config = score_config(head_size, query.element_size(), group, batch.window)
        table_stride = block_table.stride(0)
        return cls(
            batch=batch,
            softmax=softmax,
            longest=longest,
            group=group,
            num_rows=num_requests * num_kv_heads * group * batch.window,
            splits=triton.cdiv(longest, KEYS_PER_SPLIT),
            config=config,
            inputs=(query, key_cache, scales, block_table, batch.query_ends, batch.prompt_lens),
            scalars=(softmax.scale * batch.key_scale * LOG2_E, softmax.soft_cap * LOG2_E),
            strides=(*query.stride()[:2], *key_cache.stride()[:3], *scale_strides, table_stride),
            switches={
                "NUM_KV_HEADS": num_kv_heads,
                "GROUP": group,
                "WINDOW": batch.window,
                "HEAD_SIZE": head_size,
                "BLOCK_SIZE": block_size,
                "HAS_KEY_SCALES": batch.key_scales is not None,
                "HAS_SOFT_CAP": softmax.soft_cap != 0,
                **config,
            },
        )

    @property
    def pairs(self) -> int:
        return self.batch.prompt_lens.shape[0] * self.batch.key_cache.shape[1]

    def partials(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate the maxima and sums of softmaxes over the splits, `[num_rows, splits]` each."""
        # Two tensors: the second half of one tensor could be unaligned, which is another variant.
        shape, device = (num_rows, self.splits), self.batch.query.device
        return (
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    def max_sum(
        self, partials: tuple[torch.Tensor, torch.Tensor], starts: torch.Tensor | None = None
    ) -> None:
        """Write the first `num_rows` rows of the partials, `[R, H, W]`: the first pass over K.

        `starts`, `[R]` int32, is the first token of each request; None: 0.
        """
        tile, window = self.config, self.batch.window
        row_tiles = triton.cdiv(self.group, tile["HEADS"])
        row_tiles *= triton.cdiv(window, tile["WINDOW_TILE"])
        window_max_sum_kernel[(self.pairs, row_tiles, self.splits)](
            *partials,
            *self.inputs,
            # Without starts the kernel needs a pointer that it does not read.
            self.batch.prompt_lens if starts is None else starts,
            *self.scalars,
            self.splits,
            *self.strides,
            TILES_PER_SPLIT=KEYS_PER_SPLIT // tile["BLOCK_K"],
            HAS_STARTS=starts is not None,
            **self.switches,
        )

    def joined(self, partials: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the log-sum-exp of each row of the partials, without sinks: `[rows]` float32."""
        num_rows = partials[0].shape[0]
        found = torch.empty(num_rows, dtype=torch.float32, device=self.batch.query.device)
        join_log_sum_exp_kernel[(triton.cdiv(num_rows, 64),)](
            found, *partials, num_rows, self.splits, ROWS=64, SPLITS_TILE=16, num_warps=4
        )
        return found

    def mass(
        self,
        log_sum_exp: torch.Tensor,
        num_columns: int,
        gqa_reduce: str,
        *,
        by_token: bool = False,
    ) -> torch.Tensor:
        """Return what the window gives each key before it: the second pass over K.

        `log_sum_exp` is `[T, H]` if `by_token`; else it begins with `[R, H, W]` and is contiguous.
        The result is `[R, G, num_columns]` float32, -inf behind the keys before the window.
        """
        device, sinks = self.batch.query.device, self.softmax.sinks
        shape = (*self.batch.prompt_lens.shape, self.batch.key_cache.shape[1], num_columns)
        mass = torch.empty(shape, dtype=torch.float32, device=device)
        window_mass_kernel[(self.pairs, triton.cdiv(num_columns, self.config["BLOCK_K"]))](
            mass,
            log_sum_exp,
            # Without sinks the kernel needs a pointer that it does not read.
            self.batch.prompt_lens if sinks is None else sinks,
            *self.inputs,
            *self.scalars,
            num_columns,
            *(log_sum_exp.stride() if by_token else (1, self.batch.window)),
            *self.strides,
            LSE_BY_TOKEN=by_token,
            REDUCE=gqa_reduce,
            HAS_SINKS=sinks is not None,
            **self.switches,
        )
        return mass


def pool(
    mass: torch.Tensor, prompt_lens: torch.Tensor, window: int, kernel_size: int, *, average: bool
) -> torch.Tensor:
    """Pool the mass `[R, G, columns]` along the positions, with stride 1 and the same width."""
    num_requests, num_kv_heads, num_columns = mass.shape
    pooled = torch.empty_like(mass)
    block = min(1024, max(128, triton.next_power_of_2(num_columns)))
    pool_kernel[(num_requests * num_kv_heads, triton.cdiv(num_columns, block))](
        pooled,
        mass,
        prompt_lens,
        num_columns,
        NUM_KV_HEADS=num_kv_heads,
        WINDOW=window,
        KERNEL_SIZE=kernel_size,
        AVERAGE=average,
        BLOCK=block,
        num_warps=4,
    )
    return pooled
