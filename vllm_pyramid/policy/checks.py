# SPDX-License-Identifier: Apache-2.0
"""Checks of values that flags and requests share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_pyramid.policy.kinds import did_you_mean


def refuse_misspelt(keys: Mapping[str, Any], valid: tuple[str, ...], where: str) -> None:
    """Raise ValueError for keys that nearly match ours; other keys are left to other software."""
    for key in keys:
        if isinstance(key, str) and key.startswith("kv_") and key not in valid:
            hint = did_you_mean(key, valid, cutoff=0.75)
            if hint:
                raise ValueError(
                    f"unknown key {key!r} in {where}{hint}; the keys of vllm-pyramid there are: "
                    f"{', '.join(valid)}"
                )


def parse_min_tokens(value: object, where: str) -> int | None:
    """Parse the floor of shares, a whole number of tokens or its text; None if it is not given.

    Raises:
        ValueError: for anything else; `where` names the key.
    """
    if value is None:
        return None
    text = str(value) if type(value) in (int, str) else ""
    if not (text.isascii() and text.isdigit() and len(text) < 11 and int(text) < 2**31):
        raise ValueError(
            f"{where} must be a number of tokens such as 256, or 0 for no floor, not {value!r}"
        )
    return int(text)
