# SPDX-License-Identifier: Apache-2.0
"""Parse and check single values of an engine's settings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vllm_pyramid.plan.quoted import quoted
from vllm_pyramid.policy import Policy
from vllm_pyramid.policy.capabilities import Feature, asked, refuse
from vllm_pyramid.policy.overrides import RequestOverrides

NO_SPANS = "none"
# Settings with which the scheduler is told to keep everything, for `kv_shadow`.
_FALLBACK = ("policy", "turn_mode")


def parse_policy_args(value: object) -> dict[str, Any]:
    """Parse `kv_policy_args`: a mapping, the text of a JSON object, or None for an empty one.

    Raises:
        ValueError: malformed JSON (with its line and column), a key given twice, or not an
            object.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(
                value, object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant
            )
        except json.JSONDecodeError as error:
            raise ValueError(
                f"kv_policy_args is not valid JSON: {error.msg} at line {error.lineno}, column "
                f"{error.colno} of {error.doc!r}; write for example '{{\"beta\": 14}}'"
            ) from None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f'kv_policy_args must be a JSON object such as {{"beta": 14}}, not {value!r}'
        )
    return dict(value)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"kv_policy_args gives {key!r} twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"kv_policy_args holds {text}, which is not a JSON number")


def parse_gib(value: object, name: str) -> float | None:
    """Parse a setting in GiB, a number above 0 or its text; None is none. Else raise ValueError."""
    if value is None:
        return None
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError):
            number = float(value)
    if not 0 < number < 2**20:
        raise ValueError(f"{name} must be a number of GiB above 0, such as 4 or 0.5, not {value!r}")
    return number


def parse_keep(value: object) -> int | None:
    """Parse `kv_keep`: `template` or `template+N`, with N tokens of each message; None: not all."""
    if value in (None, NO_SPANS):
        return None
    match = re.fullmatch(r"template(?:\+([0-9]{1,6}))?", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(
            "kv_keep must be template, template+N for the first N tokens of each message too, such "
            f"as template+16, or {NO_SPANS}, not {value!r}"
        )
    return int(match[1] or 0)


def check_folder(folder: object, cache: object, size: object) -> None:
    """Raise ValueError unless the settings of the host cache's folder go together."""
    if folder is not None and not (isinstance(folder, str) and folder):
        raise ValueError(f"kv_host_cache_dir must be the path of a folder, not {folder!r}")
    if folder is not None and cache is None:
        raise ValueError(
            "kv_host_cache_dir keeps what the host cache finds, and its files are read into host "
            "memory: give kv_host_cache, too"
        )
    if folder is None and size is not None:
        raise ValueError("kv_host_cache_dir_gib without a kv_host_cache_dir has no effect")


def bytes_of(gib: float | str | None) -> int | None:
    """Return the bytes of a number of GiB, or of its text; None is none."""
    return None if gib is None else int(float(gib) * 2**30)


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


def check_shadow(share: float | None, policy: Policy, overrides: RequestOverrides) -> None:
    """Raise ValueError where comparing has no effect, or where the whole cache is not allowed."""
    reason = None
    if share is None:
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
