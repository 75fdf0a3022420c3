# SPDX-License-Identifier: Apache-2.0
"""Check the settings of `--kv-shadow` and `--kv-shadow-floor`."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from vllm_pyramid.plan.quoted import quoted
from vllm_pyramid.policy import Policy
from vllm_pyramid.policy.capabilities import Feature, asked, refuse
from vllm_pyramid.policy.overrides import RequestOverrides

if TYPE_CHECKING:
    from vllm_pyramid.frontend.settings import KVSettings

# Settings with which the scheduler is told to keep everything.
_FALLBACK = ("policy", "turn_mode")


def parse_share(value: object, name: str) -> float | None:
    """Parse a share: `5%`, or a number above 0 and at most 1; None is none. Else ValueError."""
    if value is None:
        return None
    number = math.nan
    if isinstance(value, str) and value.endswith("%"):
        with suppress(ValueError):
            number = float(value[:-1]) / 100
    elif isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not 0 < number <= 1:
        raise ValueError(f"{name} must be a share such as 5% or 0.05, not {quoted(value)}")
    return number


def check_shadow(settings: KVSettings, policy: Policy, overrides: RequestOverrides) -> None:
    """Raise ValueError where comparing has no effect, or where the whole cache is not allowed."""
    reason = None
    if settings.kv_shadow is None:
        reason = "kv_shadow_floor is the floor of kv_shadow, which is not given"
    elif not policy.evicts:
        reason = f"kv_shadow compares what a policy evicts, and {policy.name!r} keeps every token"
    elif overrides.max_budget is not None or not set(_FALLBACK) <= set(overrides.allowed):
        reason = (
            "kv_shadow lets requests of an application keep everything, and kv_request_overrides "
            "(without policy or turn_mode) or kv_max_request_budget forbids it"
        )
    if reason is not None:
        raise ValueError(f"{reason}: leave it out")
    refuse(policy, asked(Feature.SHADOW))
