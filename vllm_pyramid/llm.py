# SPDX-License-Identifier: Apache-2.0
"""`vllm_pyramid.LLM`: vLLM's `LLM` with the policy as keyword arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import vllm

from vllm_pyramid.frontend.settings import CONFIG_KEYS, PAGE_KEY, SHADOW_KEYS, KVSettings
from vllm_pyramid.plugin import register


class LLM(vllm.LLM):
    """vLLM's offline engine with a KV budget per layer.

    The same as `vllm.LLM(model, additional_config={"kv_policy": ..., "kv_budget": ...})`, which
    needs no import of ours.

    Args:
        model: as for `vllm.LLM`.
        kv_policy: a preset's name or the path of a `.yaml` file; `"none"` leaves vLLM as it is.
        kv_budget: prompt tokens kept, averaged over layers and KV heads: `512` or `"12%"`.
        kv_min_tokens: the floor of percentage budgets (256): shorter prompts are kept whole.
        kv_policy_args: changes to the policy's parameters, such as `{"beta": 14}`.
        kv_evict: when prompts are evicted: `"always"` (the default), at their ends, or
            `"pressure"`, only when the pool lacks blocks.
        kv_trace: folder for the kept positions of every request.
        kv_swap_space: GiB of host memory for V, for policies that keep it there (`kcache`).
        kv_admission: when a waiting prompt is admitted: `"forecast"` (if it is expected to run long
            enough to be worth its prefill; the default if the policy evicts) or `"prompt"` (as soon
            as it fits).
        kv_request_overrides: settings that requests may give, such as `["budget", "turns"]`, or
            `"none"`; by default all.
        kv_max_request_budget: the most that a request may have its prompt keep: `2048` or `"25%"`.
        kv_keep: what of every chat stays in every layer and head: `"template"` or `"template+16"`;
            by default the template of chats with tools, and `"none"` for no chat.
        kv_host_cache: GiB of host memory for prefixes and sessions that leave the device's cache.
        kv_host_cache_dir: folder in which these survive a restart.
        kv_host_cache_dir_gib: the most GiB of its files; by default as many as `kv_host_cache`.
        kv_turn_mode: how later turns of conversations continue: `"auto"` (the default), `"resume"`
            or `"exact"`.
        kv_session_ttl: seconds after which a session that is not used is forgotten.
        **kwargs: as for `vllm.LLM`.

    Raises:
        ValueError: a setting is wrong, or cannot work with another argument.
    """

    def __init__(
        self,
        model: str,
        *args: Any,
        kv_policy: str | None = None,
        kv_budget: int | str | None = None,
        kv_min_tokens: int | None = None,
        kv_policy_args: dict[str, Any] | None = None,
        kv_evict: str | None = None,
        kv_trace: str | None = None,
        kv_swap_space: float | None = None,
        kv_admission: str | None = None,
        kv_request_overrides: Sequence[str] | str | None = None,
        kv_max_request_budget: int | str | None = None,
        kv_keep: str | None = None,
        kv_host_cache: float | None = None,
        kv_host_cache_dir: str | None = None,
        kv_host_cache_dir_gib: float | None = None,
        kv_turn_mode: str | None = None,
        kv_session_ttl: float | None = None,
        additional_config: dict[str, Any] | str | None = None,
        **kwargs: Any,
    ) -> None:
        register()
        own = locals()
        given = {key: own[key] for key in CONFIG_KEYS if own[key] is not None}
        base = (
            json.loads(additional_config)
            if isinstance(additional_config, str)
            else additional_config or {}
        )
        if not isinstance(base, dict):
            raise ValueError(
                "vllm_pyramid.LLM puts the policy into additional_config, which must then be a "
                f"dictionary, not a {type(base).__name__}"
            )
        merged = {**base, **given}
        if merged.get(PAGE_KEY):
            raise ValueError(f"{PAGE_KEY} is a page of the API server, which LLM has not")
        if any(merged.get(key) is not None for key in SHADOW_KEYS):
            raise ValueError(f"{' and '.join(SHADOW_KEYS)} are for servers, which LLM is not")
        KVSettings.from_additional_config(merged)  # refuse wrong values before anything is loaded
        super().__init__(model, *args, additional_config=merged, **kwargs)
