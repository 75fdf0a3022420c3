# SPDX-License-Identifier: Apache-2.0
"""Lengths of layers from an offline profile of what their tokens are worth later (LU-KV).

LU-KV (arXiv:2602.08585) measures, on answers over the whole cache, what each token gave to the
attention's output, adds that up in the order of the scorer that will evict, and divides a budget by
marginal gains. It keeps the result as a table: for each whole percent of the budget, what each head
keeps. Here heads of a layer keep equally many tokens, so a row has a number for each layer.
`vllm-pyramid calibrate --utility` writes the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from vllm_pyramid.methods.curves import share_out
from vllm_pyramid.policy.allocator import CurveAllocator, Reals

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pyramid.policy.policy import Policy

# Rows of a profile: budgets of 1, 2, ..., 99 %.
PERCENTS = 99
# How far the mean of a row may be from its budget, of which it is the mean but for rounding.
_TOLERANCE = 0.002


class UtilityAllocator(CurveAllocator):
    """Give each layer what a profile says for the budget: k_l = C * p_l(B / C).

    p_l is linear between the profile's rows; with a budget of 0 a layer keeps none of the C tokens,
    with all of them every one.

    Attributes:
        keep: `[99][m]`, in row i the share of its C tokens that each layer keeps with a budget of
            i + 1 %; a row's mean is that budget. kvpress's `LUKVPress` has the same table upside
            down, as shares to drop with a compression ratio of 1, 2, ..., 99 %.
        model: what `shape_of` says of the model whose profile it is; None: any model with as many
            layers.
    """

    kind: Literal["utility"] = "utility"
    keep: tuple[tuple[float, ...], ...]
    model: str | None = Field(default=None, min_length=1)

    @field_validator("keep", mode="before")
    @classmethod
    def _from_lists(cls, value: object) -> object:
        """Turn lists, as YAML and JSON have them, into tuples of floats."""
        if not isinstance(value, list | tuple):
            return value
        return tuple(
            tuple(float(share) if type(share) in (int, float) else share for share in row)
            if isinstance(row, list | tuple)
            else row
            for row in value
        )

    @field_validator("keep")
    @classmethod
    def _usable(cls, value: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        if len(value) != PERCENTS or len({len(row) for row in value}) != 1 or not value[0]:
            raise ValueError(
                f"keep must have {PERCENTS} rows, for budgets of 1 to {PERCENTS} %, of equally "
                "many numbers"
            )
        shares = np.array(value)
        if not ((shares >= 0) & (shares <= 1)).all():
            raise ValueError("keep must have shares of 0 to 1")
        means = shares.mean(axis=1)
        wrong = np.flatnonzero(np.abs(means - np.arange(1, PERCENTS + 1) / 100) > _TOLERANCE)
        if wrong.size:
            raise ValueError(
                f"row {wrong[0] + 1} of keep is for a budget of {wrong[0] + 1} % and keeps "
                f"{100 * means[wrong[0]]:.1f} % of the tokens"
            )
        return value

    def check_layers(self, num_layers: int) -> None:
        if len(self.keep[0]) != num_layers:
            raise ValueError(
                f"the allocator has a profile of {len(self.keep[0])} layers, but this model has "
                f"{num_layers}: calibrate for this model (vllm-pyramid calibrate --utility)"
            )

    def check_config(self, policy: Policy, config: VllmConfig) -> None:
        """Refuse a model of another shape than the one that was profiled."""
        found = shape_of(config.model_config.hf_text_config)
        if self.model is not None and found != self.model:
            raise ValueError(
                f"policy {policy.name!r} has the profile of another model ({self.model}; this one: "
                f"{found}): calibrate for this model (vllm-pyramid calibrate --utility)"
            )

    def curve(self, mean: int, num_layers: int, capacity: int) -> Reals:
        layers = len(self.keep[0])
        rows = np.vstack([np.zeros(layers), np.array(self.keep), np.ones(layers)])
        percent = 100 * mean / capacity
        row = min(int(percent), PERCENTS)
        shares = rows[row] + (percent - row) * (rows[row + 1] - rows[row])
        # The rows' means are their budgets but for the digits that a file has.
        return share_out(shares, mean, capacity)


def shape_of(config: Any) -> str:
    """Return a model's sizes in words, from its text configuration of Transformers."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    inner = getattr(config, "intermediate_size", None)
    return (
        f"{config.num_hidden_layers} layers, {heads} and {kv_heads} heads of {size}, width "
        f"{config.hidden_size} and {inner}, {config.vocab_size} token ids"
    )
