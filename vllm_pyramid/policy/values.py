# SPDX-License-Identifier: Apache-2.0
"""The part of a policy that places V: by default in the device's pages, with K."""

from __future__ import annotations

from typing import ClassVar, Literal

from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.component import Component


class Values(Component):
    """Base class. Blocks without V have twice the tokens (`KeyOnlyKVCacheSpec`).

    `uses_swap_space`: `--kv-swap-space` has an effect.
    """

    section: ClassVar[str] = "values"
    uses_swap_space: ClassVar[bool] = False

    @property
    def unsupported(self) -> Unsupported:
        if self.copies_blocks:
            return {}
        away = "V lies in host memory"
        return {
            Feature.PIPELINE: f"{away}, in a pool that is made for all layers",
            Feature.HOST_CACHE: f"{away}, and does not follow its block to another place there",
            Feature.SCALED_CACHE: f"{away}, and vLLM has no such layout for rows of K alone",
        }

    def on_device(self, layer: int) -> bool:
        """Return whether the device's pages hold V of this layer, counted from the bottom."""
        return True


class DeviceValues(Values):
    """Keep V in the page of its K."""

    kind: Literal["device"] = "device"
