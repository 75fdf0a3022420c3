# SPDX-License-Identifier: Apache-2.0
"""The settings of an engine as its processes go by them: plain data that travels as JSON.

The front end reads and checks the flags once and puts the result under `SERVED_KEY` into vLLM's
`additional_config`. The engine core and the workers read `ServedSettings` from there: they open no
file and check nothing again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from vllm_pyramid.policy.policy import Policy

NO_POLICY = "none"
SERVED_KEY = "vllm_pyramid"


def asks_for_policy(additional_config: object) -> bool:
    """Whether a policy is to be served, before anything is read or checked."""
    if not isinstance(additional_config, Mapping):
        return False
    return additional_config.get("kv_policy", NO_POLICY) not in (None, NO_POLICY)


@dataclass(frozen=True)
class ServedSettings:
    """The settings of an engine as its processes go by them.

    Attributes:
        policy: what is served. trace: folder for traces, or None.
        swap_space_bytes: host memory for V of each worker; None: as much as the device's cache.
        forecasts: whether prompts start by what all requests will hold, not by what they hold now.
        backend: of the attention, where there is a choice.
        num_drafts: tokens that are drafted for a request in a step; 0 without speculation.
        asks_prefix_caching: whether the user did, and it is not only vLLM's default.
        no_turns: why this engine cannot evict where a conversation's turns ended; None: it can, if
            the policy can.
    """

    policy: Policy
    trace: str | None = None
    swap_space_bytes: int | None = None
    forecasts: bool = False
    backend: str | None = None
    num_drafts: int = 0
    asks_prefix_caching: bool = False
    no_turns: str | None = None

    def as_data(self) -> dict[str, Any]:
        """As JSON has it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "policy": self.policy.as_data()}

    @classmethod
    def of(cls, config: Any) -> ServedSettings | None:
        """From vLLM's finished configuration; None where no policy is served."""
        found = config.additional_config
        if not isinstance(found, Mapping) or SERVED_KEY not in found:
            return None
        return _read_settings(json.dumps(found[SERVED_KEY]))

    @property
    def min_last_chunk(self) -> int:
        """Prompt tokens that the prefill's last chunk must have.

        A trace wants a window of them. As many as a token and its drafts look like a decode step,
        which captured graphs replay without coming by any eviction.
        """
        least = self._behind_drafts(self.policy.min_last_chunk)
        return max(least, self.policy.trace_window) if self.trace is not None else least

    @property
    def min_inner_chunk(self) -> int:
        """The same of a chunk that ends at an eviction inside the prompt."""
        inside = self.policy.inside or self.policy
        return self._behind_drafts(inside.min_last_chunk)

    def _behind_drafts(self, tokens: int) -> int:
        return max(tokens, self.num_drafts + 2) if self.num_drafts else tokens


@lru_cache(maxsize=4)
def _read_settings(data: str) -> ServedSettings:
    """From JSON. vLLM asks again and again while it looks for the length that fits."""
    values = json.loads(data)
    return ServedSettings(policy=Policy.model_validate(values.pop("policy")), **values)
