# SPDX-License-Identifier: Apache-2.0
"""Plan what a request keeps when it arrives, or say with which error it ends."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.request import Request

from vllm_pyramid.compat.input_processor import check_images, check_whole
from vllm_pyramid.kv_cache.cache_store import RequestTerms
from vllm_pyramid.kv_cache.evicted_names import EvictedNames
from vllm_pyramid.kv_cache.layer_blocks import LayerBlocks
from vllm_pyramid.plan import Plan
from vllm_pyramid.policy import Policy
from vllm_pyramid.policy.fit import Pool, check_fit, tokens_that_fit
from vllm_pyramid.policy.kept_spans import check_spans
from vllm_pyramid.policy.overrides import Layers
from vllm_pyramid.policy.planning import reusable_tokens, shareable_tokens
from vllm_pyramid.policy.request import (
    ALLOCATOR_KEY,
    KEEP_EVERYTHING,
    ServedRequest,
    check_request,
    for_request,
    hashable,
    with_allocator,
)
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.step.failures import METHOD, Failure
from vllm_pyramid.step.hooks import SchedulerHooks

logger = init_logger(f"vllm.{__name__}")


class RequestPlanner:
    """Checks and plans the requests of one scheduler, which share `pool`."""

    def __init__(
        self,
        settings: ServedSettings,
        model_config: ModelConfig,
        layer_blocks: LayerBlocks,
        pool: Pool,
        hooks: Sequence[SchedulerHooks],
        *,
        shares_prefixes: bool,
    ) -> None:
        self._settings, self._policy = settings, settings.policy
        self._model_config = model_config
        self._layer_blocks, self._pool = layer_blocks, pool
        self._hooks = hooks
        self.shares_prefixes = shares_prefixes
        self._traced: set[type[Exception]] = set()

    def terms(self, request: Request) -> tuple[RequestTerms, str | Failure | None]:
        """Return what a request keeps and shares, and its mistake or a method's failure, if any.

        Its parameters are replaced where the workers have to follow others. After a failure the
        terms ask no method.
        """
        try:
            served = self._check(request)
            return self._terms(request, served, asks_hooks=served.error is None), served.error
        except Exception as error:
            text = f"the plan of the policy {self._policy.name!r}: {type(error).__name__}: {error}"
            if type(error) not in self._traced:
                self._traced.add(type(error))
                logger.exception("request %s: %s", request.request_id, text)
            whole = _keeping_everything(request, self._policy)
            return self._terms(request, whole, asks_hooks=False), Failure(METHOD, text)

    def _terms(self, request: Request, served: ServedRequest, *, asks_hooks: bool) -> RequestTerms:
        layer_blocks, shares = self._layer_blocks, self.shares_prefixes
        plan = served.plan(request.num_prompt_tokens, layer_blocks.num_tables, layer_blocks.largest)
        for hooks in self._hooks if asks_hooks else ():
            if fields := hooks.on_request_added(
                request.request_id, request.cache_salt or "", served.application, plan
            ):
                plan = _replan(request, served, plan, fields)
        return RequestTerms(
            plan,
            served,
            shareable_tokens(served.policy, plan) if shares else 0,
            reusable_tokens(served.policy, plan) if shares else 0,
            EvictedNames.of(served, plan) if shares else None,
        )

    def with_turns(
        self, request: Request, served: ServedRequest, turns: tuple[int, ...]
    ) -> RequestTerms | None:
        """Return the terms of a planned request with fewer of its turns.

        None if it would keep more than the operator allows, or hold more than the pool has.
        """
        served = served._replace(turns=turns)
        length, most = request.num_prompt_tokens, request.max_tokens
        try:
            self._check_kept(request, served)
        except ValueError:
            return None
        if tokens_that_fit(served, length, self._pool, most) < most:
            return None
        return self._terms(request, served, asks_hooks=False)

    def _check_kept(self, request: Request, served: ServedRequest) -> None:
        """Raise ValueError if a request keeps more than the operator allows."""
        layers = Layers(self._layer_blocks.num_tables, self._layer_blocks.largest)
        length, most = request.num_prompt_tokens, request.max_tokens
        self._settings.overrides.check_kept(served, self._policy, length, most, layers)

    def _check(self, request: Request) -> ServedRequest:
        """Return the policy and budget of a request, or the error with which it ends.

        Front ends check requests first (compat/input_processor.py), so a wrong request has come by
        another way. It ends with an error; raising would end the engine.
        """
        params, policy, overrides = request.sampling_params, self._policy, self._settings.overrides
        try:
            check_whole(request.resumable)
            check_images(self._model_config, request)
            if params is None:
                return ServedRequest(policy)
            overrides.check_keys(params.extra_args)
            settings = self._settings
            served = check_request(policy, params, settings.why_no_turns, settings.turn_mode)
            served.check_turns(request.num_prompt_tokens)
            length = request.num_prompt_tokens
            check_spans(served.keep, length)
            self._check_kept(request, served)
            if policy.inner_policy is not None:
                limited = copy.copy(params)
                # The front end was strict; its pool may be the mean of several.
                check_fit(served, length, limited, self._pool, strict=False)
                assert limited.max_tokens is not None, "vLLM sets it when a request arrives"
                request.max_tokens = limited.max_tokens
            return served
        except (ValueError, VLLMValidationError) as reason:
            if params is not None:
                request.sampling_params = copy.copy(params)
                request.sampling_params.extra_args = None  # the worker would follow it
            request.mm_features = []  # a step may still run before the request ends
            return ServedRequest(policy, error=str(reason))


def _keeping_everything(request: Request, policy: Policy) -> ServedRequest:
    """Let the workers keep all of a request that is about to end, and return how it is served."""
    params = copy.copy(request.sampling_params)
    if params is not None:
        params.extra_args = dict(KEEP_EVERYTHING)
    request.sampling_params = params
    return for_request(policy, KEEP_EVERYTHING)


def _replan(request: Request, served: ServedRequest, plan: Plan, fields: dict[str, Any]) -> Plan:
    """Plan with another allocator for this request, and tell the workers of it."""
    params = request.sampling_params
    if params is None:
        return plan
    request.sampling_params = copy.copy(params)  # the object may be the client's
    request.sampling_params.extra_args = {
        **(params.extra_args or {}),
        ALLOCATOR_KEY: {
            key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()
        },
    }
    replanned = served._replace(policy=with_allocator(served.policy, hashable(fields)))
    return replanned.plan(plan.prompt_len, plan.num_layers, plan.block_size)
