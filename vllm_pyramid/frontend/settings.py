# SPDX-License-Identifier: Apache-2.0
"""Parse and check the settings of an engine (those of a request: `policy/request_keys.py`).

They stand in vLLM's `additional_config`, from the flags or the user's own code. The front end reads
them once (`KVSettings`), with the policy's file, and adds the checked result under `SERVED_KEY` as
data. The engine core and the workers read only that (`ServedSettings`): they open no file and check
nothing again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from vllm_pyramid.frontend.anchor import parse_anchor
from vllm_pyramid.frontend.setting_values import (
    bytes_of,
    check_folder,
    check_shadow,
    parse_gib,
    parse_keep,
    parse_policy_args,
    parse_share,
)
from vllm_pyramid.policy import DEFAULT_MIN_TOKENS, Budget, Policy, load_policy
from vllm_pyramid.policy.capabilities import Feature, refusal_of, refuse
from vllm_pyramid.policy.checks import parse_min_tokens, parse_session_ttl, refuse_unknown
from vllm_pyramid.policy.overrides import OVERRIDES, RequestOverrides, parse_overrides
from vllm_pyramid.policy.request_keys import AUTO_MODE, EXACT, parse_turn_mode
from vllm_pyramid.policy.served_settings import (
    DEFAULT_SESSION_TTL,
    NO_POLICY,
    SERVED_KEY,
    ServedSettings,
    asks_for_policy,
)
from vllm_pyramid.policy.session_sources import parse_session_from

# The flag `--enable-prompt-tokens-details` of a server sets it (`frontend/flags.py`).
REPORT_KEY = "kv_report_cached"
# The flag `--kv-page` of a server: the live page. An engine without a server has none.
PAGE_KEY = "kv_page"
# The flags `--kv-shadow` and `--kv-shadow-floor` of a server.
SHADOW_KEYS = ("kv_shadow", "kv_shadow_floor")
# The flags `--kv-session-from` and `--kv-anchor` of a server.
SESSION_KEY, ANCHOR_KEY = "kv_session_from", "kv_anchor"
_SERVER_KEYS = (REPORT_KEY, PAGE_KEY, SESSION_KEY, ANCHOR_KEY, *SHADOW_KEYS)
# When a waiting prompt is admitted: if the blocks that all requests are expected to hold let it
# run long enough to be worth its prefill, or, as in vLLM, as soon as the prompt fits.
FORECAST, PROMPT = "forecast", "prompt"
ADMISSIONS = (FORECAST, PROMPT)
# When prompts are evicted: as the policy's schedule says, or only if the pool lacks blocks.
ALWAYS, PRESSURE = "always", "pressure"
# What keeping the templates of chats needs.
_KEEPS = dict.fromkeys((Feature.KV_KEEP, Feature.INNER_SPANS), "--kv-keep")


def without_ours(additional_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of other software."""
    return {key: value for key, value in additional_config.items() if key not in _KEYS}


@dataclass(frozen=True)
class KVSettings:
    """The checked settings of an engine, as the flags explain them (`flags.py`); None: the default.

    Attributes:
        kv_policy: a preset's name, the path of a `.yaml` file, or `none` (the plugin stays inert).
        kv_min_tokens: None for the preset's own, or `DEFAULT_MIN_TOKENS`.
        kv_admission: None for `forecast` if the policy evicts, and for `prompt` if it does not.
        kv_report_cached: whether each response says what the cache held for its request.
    """

    kv_policy: str = NO_POLICY
    kv_budget: str | int | None = None
    kv_min_tokens: int | str | None = None
    kv_policy_args: dict[str, Any] = field(default_factory=dict)
    kv_evict: str | None = None
    kv_trace: str | None = None
    kv_swap_space: float | str | None = None
    kv_admission: str | None = None
    kv_request_overrides: Sequence[str] | str | None = None
    kv_max_request_budget: int | str | None = None
    kv_keep: str | None = None
    kv_host_cache: float | str | None = None
    kv_host_cache_dir: str | None = None
    kv_host_cache_dir_gib: float | str | None = None
    kv_turn_mode: str | None = None
    kv_session_ttl: float | str | None = None
    kv_anchor: Sequence[str] | str | None = None
    kv_session_from: Sequence[str] | str | None = None
    kv_report_cached: bool = True
    kv_page: bool = False
    kv_shadow: float | str | None = None
    kv_shadow_floor: float | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kv_policy, str) or not self.kv_policy:
            raise ValueError(
                f"kv_policy must be the name of a policy or a path, not {self.kv_policy!r}"
            )
        if self.kv_evict not in (None, ALWAYS, PRESSURE):
            raise ValueError(f"kv_evict must be {ALWAYS} or {PRESSURE}, not {self.kv_evict!r}")
        if self.kv_trace is not None and not (isinstance(self.kv_trace, str) and self.kv_trace):
            raise ValueError(f"kv_trace must be the path of a folder, not {self.kv_trace!r}")
        if self.kv_admission not in (None, *ADMISSIONS):
            known = " or ".join(ADMISSIONS)
            raise ValueError(f"kv_admission must be {known}, not {self.kv_admission!r}")
        for key in (REPORT_KEY, PAGE_KEY):
            if not isinstance(given := getattr(self, key), bool):
                raise ValueError(f"{key} must be true or false, not {given!r}")
        sources = list(parse_session_from(self.kv_session_from)) or None
        anchor = list(parse_anchor(self.kv_anchor)) or None
        of_servers = {"--kv-page": self.kv_page, "--kv-session-from": sources}
        for flag, value in {**of_servers, "--kv-anchor": anchor}.items():
            if value and self.kv_policy == NO_POLICY:
                raise ValueError(
                    f"{flag} has an effect with a policy alone: choose one with --kv-policy, or "
                    "leave it out"
                )
        parsed: dict[str, object] = {SESSION_KEY: sources, ANCHOR_KEY: anchor}
        parsed |= {key: parse_share(getattr(self, key), key) for key in SHADOW_KEYS}
        if self.kv_request_overrides is not None:
            parsed["kv_request_overrides"] = parse_overrides(self.kv_request_overrides)
        if self.kv_max_request_budget is not None:
            try:
                parsed["kv_max_request_budget"] = Budget.parse(self.kv_max_request_budget).value
            except ValueError as error:
                raise ValueError(f"kv_max_request_budget: {error}") from None
        parsed["kv_min_tokens"] = parse_min_tokens(self.kv_min_tokens, "kv_min_tokens")
        parsed["kv_policy_args"] = parse_policy_args(self.kv_policy_args)
        for key in ("kv_swap_space", "kv_host_cache", "kv_host_cache_dir_gib"):
            parsed[key] = parse_gib(getattr(self, key), key)
        parsed["kv_session_ttl"] = parse_session_ttl(self.kv_session_ttl)
        for key, result in parsed.items():
            object.__setattr__(self, key, result)
        check_folder(self.kv_host_cache_dir, self.kv_host_cache, self.kv_host_cache_dir_gib)
        parse_turn_mode(self.kv_turn_mode, "kv_turn_mode")
        if self.kv_policy == NO_POLICY:
            given = [key for key in CONFIG_KEYS[1:] if getattr(self, key) not in (None, {})]
            if given:
                raise ValueError(
                    f"{' and '.join(given)} without a kv_policy would have no effect: choose a "
                    "policy (vllm-pyramid policies lists them), for example --kv-policy pyramidkv"
                )
        elif self.kv_swap_space is not None and not self._loaded_policy.values.uses_swap_space:
            raise ValueError(
                f"kv_swap_space is memory for V, which policy {self.kv_policy!r} keeps on the "
                "device: leave it out, choose kcache, or add "
                '--kv-policy-args \'{"values": "host"}\''
            )
        else:
            self._overrides.check_policy(self._loaded_policy, keeps_tools=self._keeps_tools)
        share = parse_share(self.kv_shadow, "kv_shadow")
        if share is not None or self.kv_shadow_floor is not None:
            check_shadow(share, self._loaded_policy, self._overrides)
        if parse_keep(self.kv_keep) is not None:
            _check_keep(self._loaded_policy)
        if sources is not None and self._turn_mode != EXACT:
            refuse(self._loaded_policy, {Feature.KV_TURNS: "--kv-session-from"})
        if self.kv_min_tokens and not self._loaded_policy.has_budget:
            own = "gives each KV head a length of its own"
            raise ValueError(
                f"kv_min_tokens is for policies that evict by a budget, and {self.kv_policy!r} "
                f"{own if self._loaded_policy.evicts else 'keeps every token'}: leave it out"
            )

    @classmethod
    def from_additional_config(cls, additional_config: object) -> KVSettings | None:
        """Parse our keys and ignore others; return None if there are none of ours.

        Raises:
            ValueError: a key that looks like one of ours and is none, or a wrong value.
        """
        if not isinstance(additional_config, Mapping):
            return None
        # Without a policy, other software may have keys of its own that begin with `kv`.
        inert = not asks_for_policy(additional_config)
        refuse_unknown(additional_config, _KEYS, "additional_config", similar_only=inert)
        if SERVED_KEY in additional_config:
            raise ValueError(
                f"{SERVED_KEY!r} in additional_config is set by this package: leave it out and "
                "give kv_policy"
            )
        given = {key: additional_config[key] for key in _KEYS if key in additional_config}
        if not given:
            return None
        if given.get("kv_policy", "") is None:
            given["kv_policy"] = NO_POLICY
        return cls(**given)

    def to_additional_config(self) -> dict[str, Any]:
        """Return our keys for `additional_config`, without those that are not set."""
        values = {key: getattr(self, key) for key in CONFIG_KEYS}
        given = {key: value for key, value in values.items() if value not in (None, {})}
        if self.kv_page:
            given[PAGE_KEY] = True
        of_server = {key: getattr(self, key) for key in (SESSION_KEY, ANCHOR_KEY, *SHADOW_KEYS)}
        given |= {key: value for key, value in of_server.items() if value is not None}
        return given if self.kv_report_cached else {**given, REPORT_KEY: False}

    @cached_property
    def _loaded_policy(self) -> Policy:
        policy = load_policy(self.kv_policy, self.kv_budget, self.kv_policy_args)
        if self.kv_evict is not None and _needs_schedule(policy, self.kv_evict):
            changes = {**self.kv_policy_args, "schedule": PRESSURE}
            policy = load_policy(self.kv_policy, self.kv_budget, changes)
        floor = self.kv_min_tokens
        if floor is None and policy.min_tokens is None:
            floor = DEFAULT_MIN_TOKENS
        if floor is None or not policy.has_budget:
            return policy
        return policy.model_copy(update={"min_tokens": floor})

    @property
    def _turn_mode(self) -> str:
        schedule = self._loaded_policy.schedule
        is_exact = schedule.waits_for_orders or schedule.keeps_prompts
        return self.kv_turn_mode or (EXACT if is_exact else AUTO_MODE)

    @cached_property
    def _overrides(self) -> RequestOverrides:
        allowed = self.kv_request_overrides
        limit = self.kv_max_request_budget
        return RequestOverrides(OVERRIDES if allowed is None else tuple(allowed), limit)

    @property
    def _keeps_tools(self) -> bool:
        policy = self._loaded_policy
        return self.kv_keep is None and policy.evicts and not refusal_of(policy, _KEEPS)

    def policy(self) -> Policy | None:
        """Return the served policy, loaded once; None if the plugin stays inert."""
        return None if self.kv_policy == NO_POLICY else self._loaded_policy

    def served(self) -> ServedSettings | None:
        """Return the settings for the other processes; None if the plugin stays inert."""
        policy = self.policy()
        if policy is None:
            return None
        try:
            same = Policy.model_validate(policy.as_data()) == policy
        except ValueError as error:
            raise ValueError(f"policy {policy.name!r} cannot travel as JSON: {error}") from error
        if not same:
            raise ValueError(
                f"policy {policy.name!r} changes when it travels as JSON: use fields of plain "
                "types in your own classes"
            )
        forecasts = policy.evicts
        if self.kv_admission is not None:
            forecasts = self.kv_admission == FORECAST
        return ServedSettings(
            policy,
            self.kv_trace,
            bytes_of(self.kv_swap_space),
            forecasts,
            overrides=self._overrides,
            reports_cached=self.kv_report_cached,
            keep_template=parse_keep(self.kv_keep),
            keep_tools=self._keeps_tools,
            host_cache_bytes=bytes_of(self.kv_host_cache),
            host_cache_dir=self.kv_host_cache_dir,
            host_cache_dir_bytes=bytes_of(self.kv_host_cache_dir_gib),
            turn_mode=self._turn_mode,
            session_from=tuple(self.kv_session_from or ()),
            session_ttl_s=float(self.kv_session_ttl or DEFAULT_SESSION_TTL),
            page=self.kv_page,
            shadow=parse_share(self.kv_shadow, "kv_shadow"),
            shadow_floor=parse_share(self.kv_shadow_floor, "kv_shadow_floor"),
        )


# Settings of engines with a server and without, the policy first; and all.
CONFIG_KEYS = tuple(one.name for one in fields(KVSettings) if one.name not in _SERVER_KEYS)
_KEYS = (*CONFIG_KEYS, *_SERVER_KEYS)


def _check_keep(policy: Policy) -> None:
    """Raise ValueError unless chats' templates can be kept with the policy."""
    if not policy.evicts:
        raise ValueError(f"policy {policy.name!r} keeps every token: leave --kv-keep out")
    refuse(policy, _KEEPS)


def _needs_schedule(policy: Policy, evict: str) -> bool:
    """Return whether a policy needs the schedule `pressure` to evict as `kv_evict` says.

    Raises:
        ValueError: it has a schedule that does not go with it.
    """
    waits = policy.schedule.waits_for_orders
    if evict == ALWAYS and waits:
        raise ValueError(
            f"policy {policy.name!r} has the schedule {policy.schedule.kind!r}, so it does not "
            "always evict: leave kv_evict out, or the schedule"
        )
    if evict == PRESSURE and policy.schedule.every:
        raise ValueError(
            f"policy {policy.name!r} evicts by its schedule {policy.schedule.kind!r}, also while "
            "it generates: choose a policy that evicts prompts, such as auto, or leave kv_evict out"
        )
    return evict == PRESSURE and not waits
