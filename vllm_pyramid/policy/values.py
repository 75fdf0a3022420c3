# SPDX-License-Identifier: Apache-2.0
"""The contract of the part that says where V lies; by default beside K, in the device's pages."""

from __future__ import annotations

from typing import ClassVar, Literal

from vllm_pyramid.policy.component import Component


class Values(Component):
    """Base. Blocks of layers without V on the device have twice the tokens (`KeyOnlyKVCacheSpec`).

    Class attributes:
        uses_swap_space: whether `--kv-swap-space` has a meaning.
    """

    section: ClassVar[str] = "values"
    uses_swap_space: ClassVar[bool] = False

    def on_device(self, layer: int) -> bool:
        """Whether the device's pages hold V of this layer, counted from the bottom, beside K."""
        return True

    def most_rows(self, layer: int) -> int | None:
        """Rows of V that a query head of a generated token reads at most; None: of all keys."""
        return None


class DeviceValues(Values):
    """Beside K, in the same page."""

    kind: Literal["device"] = "device"
