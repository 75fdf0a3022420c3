# SPDX-License-Identifier: Apache-2.0
"""Add our flags to `vllm serve` and move them to `additional_config`, which all processes get."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_pyramid.frontend.settings import (
    ANCHOR_KEY,
    PAGE_KEY,
    REPORT_KEY,
    SESSION_KEY,
    KVSettings,
)
from vllm_pyramid.policy.overrides import OVERRIDES
from vllm_pyramid.policy.served_settings import asks_for_policy

_FLAGS: dict[str, dict[str, Any]] = {
    "kv_policy": {
        "metavar": "NAME|PATH.yaml",
        "help": "KV eviction policy with a budget per layer: 'auto' for the recommended one, a "
        "preset ('vllm-pyramid policies' lists them) or a YAML file. 'none' (the default) leaves "
        "vLLM unchanged; 'full' runs vllm-pyramid's per-layer cache without eviction, as a "
        "baseline.",
    },
    "kv_budget": {
        "metavar": "N|P%%",
        "help": "Mean number of prompt tokens kept per layer and KV head: a number, or a "
        "percentage of the prompt such as 12%%. Default: the policy's own.",
    },
    "kv_min_tokens": {
        "metavar": "N",
        "help": "Floor of percentage budgets: prompts of up to N tokens are kept whole. 0 for no "
        "floor. Default: the preset's own, or 256.",
    },
    "kv_policy_args": {
        "metavar": "JSON",
        "help": 'Changes to the policy\'s parameters, for example \'{"beta": 14, "window": 16}\'.',
    },
    "kv_evict": {
        "metavar": "always|pressure",
        "help": "When prompts are evicted: 'always', at their ends, or 'pressure', only when the "
        "pool lacks blocks, and then as little as is needed, down to --kv-budget. Default: always.",
    },
    "kv_trace": {
        "metavar": "DIR",
        "help": "Write the positions that each request keeps to DIR, one .npz file per request.",
    },
    "kv_swap_space": {
        "metavar": "GiB",
        "help": "Host memory that each worker allocates for V at most, with a policy that keeps V "
        "there (kcache, or values: host). A smaller value than the device's KV cache shrinks that "
        "too. Default: as much as the device's KV cache.",
    },
    "kv_admission": {
        "metavar": "forecast|prompt",
        "help": "When a waiting prompt is admitted: 'forecast', if the blocks that all requests "
        "are expected to hold let it run long enough to be worth its prefill (the default if the "
        "policy evicts), or 'prompt', as soon as it fits, which is vLLM's own rule.",
    },
    "kv_request_overrides": {
        "metavar": "none|NAME,NAME,...",
        "help": "Settings that single requests may give in vllm_xargs, each as kv_NAME. Others are "
        f"answered with status 400. Default: all, which is {','.join(OVERRIDES)}.",
    },
    "kv_max_request_budget": {
        "metavar": "N|P%%",
        "help": "The most that a request's kv_budget, kv_min_tokens, kv_policy or kv_keep may have "
        "its prompt keep: a number of tokens, or a percentage of the prompt. What the server's "
        "policy keeps of it is always allowed. Chats with tools keep their templates only within "
        "the limit; what --kv-keep template protects counts beside it. Default: no limit.",
    },
    "kv_keep": {
        "metavar": "template[+N]|none",
        "help": "Keep the system prompt, the tools and the template's own tokens of every chat in "
        "every layer and KV head, with the first N tokens of each message, beside the budget. "
        "Default: those of chats with tools, where policy and model allow it; `none`: of no chat.",
    },
    "kv_host_cache": {
        "metavar": "GiB",
        "help": "Host memory of the engine, all tensor-parallel ranks together, for prefixes and "
        "sessions that leave the device's cache: they are copied back in place of being computed "
        "again. Default: none.",
    },
    "kv_host_cache_dir": {
        "metavar": "DIR",
        "help": "Folder in which what the host cache finds survives a restart, readable by its "
        "owner only. Default: none.",
    },
    "kv_host_cache_dir_gib": {
        "metavar": "GiB",
        "help": "The most that the files in --kv-host-cache-dir may take; the least recently used "
        "go first. Default: as much as --kv-host-cache.",
    },
    "kv_turn_mode": {
        "metavar": "auto|resume|exact",
        "help": "How a request with kv_turns continues that does not say it (kv_turn_mode): "
        "'resume' with what the turns before kept, or 'exact' with the whole prompt, which is "
        "evicted as if it had no earlier turns; 'auto' as it computes fewer tokens. Default: auto.",
    },
    "kv_session_ttl": {
        "metavar": "SECONDS",
        "help": "How long the server remembers a session (kv_session) that is not used: where its "
        "turns ended. Default: 3600.",
    },
    "kv_shadow": {
        "metavar": "P%%",
        "help": "Share of the greedy requests whose answers are compared with those of the whole "
        "cache, while the engine is idle, such as 1%%. Default: none.",
    },
    "kv_shadow_floor": {
        "metavar": "P%%",
        "help": "With --kv-shadow: an application (kv_application) of whose answers fewer tokens "
        "agree runs with policy 'full' until they do again. Default: none does.",
    },
    SESSION_KEY: {
        "metavar": "NAME,NAME,...",
        "help": "What names a request's session besides kv_session, the first that it has: "
        "session_id for vLLM's own (the body's key, or X-Session-ID), prompt_cache_key for the "
        "body's, or a header such as x-claude-code-session-id. Default: nothing.",
    },
    ANCHOR_KEY: {
        "metavar": "PATTERN,PATTERN,...",
        "help": "Lines that change with every request, such as 'Request id: *', or 'billing' for "
        "x-anthropic-billing-header: left out of the first lines of system prompts, so the model "
        "does not see them. Default: none.",
    },
    PAGE_KEY: {
        "action": "store_true",
        "help": "Serve a live page at /pyramid: the pool, and what each running request keeps "
        "layer by layer. Its data need the API key, if the server has one. It costs nothing while "
        "it is closed.",
    },
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group with our flags to a parser of engine arguments."""
    group = parser.add_argument_group(
        "KV policy (vllm-pyramid)",
        "A KV cache budget for every layer, and eviction at the end of a prompt or later.",
    )
    for key, options in _FLAGS.items():
        group.add_argument("--" + key.replace("_", "-"), dest=key, default=None, **options)


def take_flags(namespace: argparse.Namespace) -> None:
    """Move the flags that were given into `additional_config` and check them together.

    They are moved while the parser runs, not in `EngineArgs.from_cli_args`, because processes that
    get the finished namespace (`--api-server-count 2`) call that before plugins are loaded.

    A server says how much of a prompt was cached only with vLLM's `--enable-prompt-tokens-details`;
    without it, the reports of a policy leave that out, too.

    Raises:
        ValueError: a wrong value, or a flag that `--additional-config` also gives.
    """
    _move_flags(namespace)
    config = namespace.additional_config
    # Only the parsers of servers have this flag.
    hides_cached = getattr(namespace, "enable_prompt_tokens_details", None) is False
    if hides_cached and asks_for_policy(config):
        namespace.additional_config = {REPORT_KEY: False, **config}
    KVSettings.from_additional_config(namespace.additional_config)


def _move_flags(namespace: argparse.Namespace) -> None:
    """Put the flags that were given into `additional_config`, and set them back to None."""
    given = {key: value for key in _FLAGS if (value := getattr(namespace, key)) is not None}
    if not given:
        return
    base = namespace.additional_config or {}
    if not isinstance(base, dict):
        raise ValueError(f"--additional-config must be a JSON object, not {base!r}")
    both = [f"--{key.replace('_', '-')}" for key in given if key in base]
    if both:
        raise ValueError(
            f"{', '.join(both)} given both as a flag and in --additional-config: leave one out"
        )
    namespace.additional_config = {**base, **given}
    for key in given:
        setattr(namespace, key, None)
