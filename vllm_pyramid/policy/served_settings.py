# SPDX-License-Identifier: Apache-2.0
"""The checked settings of an engine: plain data that travels to its processes as JSON.

The front end puts them under `SERVED_KEY` into vLLM's `additional_config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

from vllm_pyramid.policy.overrides import RequestOverrides
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.policy.request_keys import AUTO_MODE
from vllm_pyramid.version import __version__

NO_POLICY = "none"
SERVED_KEY = "vllm_pyramid"
# Seconds for which a session that is not used is remembered.
DEFAULT_SESSION_TTL = 3600.0


def asks_for_policy(additional_config: object) -> bool:
    """Return whether the user asks for a policy; nothing is checked yet."""
    if not isinstance(additional_config, Mapping):
        return False
    return additional_config.get("kv_policy", NO_POLICY) not in (None, NO_POLICY)


@dataclass(frozen=True)
class ServedSettings:
    """The settings of an engine with a policy.

    Attributes:
        trace: folder for traces, or None.
        swap_space_bytes: host memory for V of each worker; None: as much as the device's cache.
        forecasts: whether prompts are admitted by what all requests will hold, not by what they
            hold now.
        num_drafts: tokens that are drafted for a request in a step; 0 without speculation.
        asks_prefix_caching: whether the user asked for prefix caching, not only vLLM's default.
        why_no_turns: why this engine cannot resume conversations, whatever the policy; None if it
            can.
        reports_cached: whether each response says what the cache held for its request; if not, only
            those of requests with a `cache_salt` do.
        keep_template: how many first tokens of each message stay with a chat's template; None: the
            template is not kept. keep_tools: whether it stays in chats with tools, where it can be
            found.
        host_cache_bytes: host memory of each tensor-parallel rank, all pipeline stages together;
            None without a host cache. host_cache_dir: folder in which its content survives a
            restart.
        host_cache_dir_bytes: the most bytes of its files; None: as many as `host_cache_bytes`.
        turn_mode: how requests with `kv_turns` continue that do not say it (`TURN_MODES`).
        session_ttl_s: seconds after which a session that is not used is forgotten.
        session_from: what names a request's session besides `kv_session` (`parse_session_from`).
        shadow: the share of requests whose answers are compared with the whole cache's; None: none.
        shadow_floor: the agreement below which an application runs with the whole cache; None: none
            does.
        page: whether the API server shows the live page.
    """

    policy: Policy
    trace: str | None = None
    swap_space_bytes: int | None = None
    forecasts: bool = False
    backend: str | None = None
    num_drafts: int = 0
    asks_prefix_caching: bool = False
    why_no_turns: str | None = None
    overrides: RequestOverrides = field(default_factory=RequestOverrides)
    reports_cached: bool = True
    keep_template: int | None = None
    keep_tools: bool = False
    host_cache_bytes: int | None = None
    host_cache_dir: str | None = None
    host_cache_dir_bytes: int | None = None
    turn_mode: str = AUTO_MODE
    session_ttl_s: float = DEFAULT_SESSION_TTL
    session_from: tuple[str, ...] = ()
    shadow: float | None = None
    shadow_floor: float | None = None
    page: bool = False

    def as_data(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        overrides = {**asdict(self.overrides), "allowed": list(self.overrides.allowed)}
        values["session_from"] = list(self.session_from)
        return {**values, "policy": self.policy.as_data(), "overrides": overrides}

    @property
    def of_graph(self) -> dict[str, Any]:
        """What a compiled graph of the model depends on, as JSON values.

        vLLM names our backend CUSTOM, whatever kernels it runs; a back end decides what the graph
        quantises and writes.
        """
        parts = [found for part in self.policy.parts if (found := part.of_graph) is not None]
        return {"version": __version__, "backend": self.backend, "parts": parts}

    @classmethod
    def of(cls, config: Any) -> ServedSettings | None:
        """Read the settings from vLLM's finished configuration; None if no policy is served."""
        found = config.additional_config
        if not isinstance(found, Mapping) or SERVED_KEY not in found:
            return None
        return _read_settings(json.dumps(found[SERVED_KEY]))

    @property
    def min_last_chunk(self) -> int:
        """Prompt tokens that the prefill's last chunk must have.

        A trace needs a window of them. A chunk with no more tokens than a decode step and its
        drafts looks like one, and captured graphs replay decode steps without any eviction.
        """
        tokens = self._more_than_drafts(self.policy.min_last_chunk)
        return max(tokens, self.policy.trace_window) if self.trace is not None else tokens

    @property
    def min_inner_chunk(self) -> int:
        """Tokens that a chunk must have if it ends at an eviction inside the prompt."""
        policy = self.policy.inner_policy or self.policy
        return self._more_than_drafts(policy.min_last_chunk)

    @property
    def max_prompt_logits(self) -> int | None:
        """Tokens in a chunk of a request that asks for a prompt's log probabilities and keeps all.

        vLLM's first model runner makes logits of all of them at once. Workers reserve these for
        replays, which are such requests. None: the engine makes none, so any number.
        """
        return None if self.shadow is None else 256

    def _more_than_drafts(self, tokens: int) -> int:
        return max(tokens, self.num_drafts + 2) if self.num_drafts else tokens


@lru_cache(maxsize=4)
def _read_settings(data: str) -> ServedSettings:
    """Parse JSON. Cached, because vLLM reads its configuration many times at start-up."""
    values = json.loads(data)
    policy, overrides = Policy.model_validate(values.pop("policy")), values.pop("overrides")
    overrides["allowed"] = tuple(overrides["allowed"])
    values["session_from"] = tuple(values.get("session_from", ()))
    return ServedSettings(policy, overrides=RequestOverrides(**overrides), **values)
