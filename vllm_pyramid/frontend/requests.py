# SPDX-License-Identifier: Apache-2.0
"""Check a request's settings in the front end, which answers mistakes with status 400."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm.distributed.utils import get_pp_indices
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds

from vllm_pyramid.compat.chat_renderer import Template
from vllm_pyramid.compat.input_processor import check_images, check_whole
from vllm_pyramid.frontend.features import is_ours
from vllm_pyramid.frontend.follow_sessions import SessionFollower
from vllm_pyramid.frontend.http_settings import with_headers, with_session
from vllm_pyramid.frontend.layer_kinds import BOTH, FULL, has_other_layers, layer_kinds
from vllm_pyramid.frontend.shadow import Shadow
from vllm_pyramid.policy.fit import Pool, check_fit
from vllm_pyramid.policy.heads import Heads
from vllm_pyramid.policy.kept_spans import check_spans
from vllm_pyramid.policy.overrides import Layers
from vllm_pyramid.policy.request import TEMPLATE_KEY, ServedRequest, check_request
from vllm_pyramid.policy.resumed import WHY_KEY
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.transfer.states import check_params

if TYPE_CHECKING:
    from vllm.v1.engine.input_processor import InputProcessor

_logger = init_logger(f"vllm.{__name__}")


@dataclass
class _Engine:
    """What the front end knows about an engine.

    Attributes:
        settings: None if no policy is served.
        shadow: None if it was not asked for.
        pool: None if only the scheduler knows it, or before `has_pool`.
    """

    settings: ServedSettings | None
    sessions: SessionFollower
    shadow: Shadow | None
    pool: Pool | None = None
    has_pool: bool = False


class PolicyRequestChecks:
    """Checks requests of engines with a policy (`compat.input_processor.RequestChecks`)."""

    def __init__(self) -> None:
        self._engines: WeakKeyDictionary[InputProcessor, _Engine] = WeakKeyDictionary()

    def _engine(self, processor: InputProcessor) -> _Engine:
        if (engine := self._engines.get(processor)) is None:
            settings = ServedSettings.of(processor.vllm_config)
            sessions = SessionFollower.of(processor, settings)
            engine = _Engine(settings, sessions, Shadow.of(processor, settings))
            self._engines[processor] = engine
        return engine

    def before(
        self, processor: InputProcessor, params: Any, template: Template | None, *, resumable: bool
    ) -> tuple[ServedRequest | None, Any]:
        """Check the request's own settings, and add the spans of its template.

        Spans that are kept without `--kv-keep` are left out where they exceed the operator's limit.

        Returns:
            The policy and budget of the request, or None if it has no policy; and its parameters.

        Raises:
            VLLMValidationError: a wrong setting, or streaming input.
        """
        engine = self._engine(processor)
        settings = engine.settings
        if settings is None:
            return None, params
        check_whole(resumable)
        if not isinstance(params, SamplingParams):
            return None, params
        try:
            for key in (TEMPLATE_KEY, WHY_KEY):
                if params.extra_args and key in params.extra_args:
                    raise ValueError(f"{key} cannot be set by requests: leave it out")
            if is_ours(processor.vllm_config.kv_transfer_config):
                check_params(params)
            params = with_headers(params)
            settings.overrides.check_keys(params.extra_args)
            params = with_session(params, settings.session_from)
            params = engine.sessions.begin(params)
            if engine.shadow is not None:
                params = engine.shadow.begin(params)
            if template is not None:
                params = copy.copy(params)  # the object may be the client's
                params.extra_args = {**(params.extra_args or {}), TEMPLATE_KEY: template.spans}
            policy, reason, mode = settings.policy, settings.why_no_turns, settings.turn_mode
            found = check_request(policy, params, reason, mode)
            if (
                template is not None
                and settings.keep_template is None
                and settings.overrides.lacks_room(found, policy, template.prompt_tokens)
            ):
                params.extra_args[TEMPLATE_KEY] = None
                found = check_request(policy, params, reason, mode)
                _logger.warning_once(
                    "a chat with tools does not keep its template, with which it would exceed "
                    "--kv-max-request-budget %s; --kv-keep template keeps it beside the limit",
                    settings.overrides.max_budget,
                )
            return found, params
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter="vllm_xargs") from None

    def after(self, processor: InputProcessor, request: Any, found: ServedRequest | None) -> None:
        """Check what depends on the tokenised prompt: images, turns, budget, and whether it fits.

        Raises:
            VLLMValidationError: the request cannot be served.
        """
        engine = self._engine(processor)
        if engine.settings is None:
            return
        check_images(processor.model_config, request)
        if found is None:
            return
        turn = None
        if found.session is not None:
            try:
                turn = engine.sessions.follow(request, found.session)
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
            found = turn.served
        if engine.shadow is not None:
            found = engine.shadow.choose(request, found)
        self._check_prompt(processor, engine, engine.settings, request, found)
        if turn is not None:
            engine.sessions.record(turn)

    def _check_prompt(
        self,
        processor: InputProcessor,
        engine: _Engine,
        settings: ServedSettings,
        request: Any,
        found: ServedRequest,
    ) -> None:
        """Check turns, budget and room, as `after` says."""
        length = length_from_prompt_token_ids_or_embeds(
            request.prompt_token_ids, request.prompt_embeds
        )
        params = request.sampling_params
        try:
            found.check_turns(length)
            check_spans(found.keep, length)
            layers = None
            if found.resumed_turns and settings.overrides.max_budget is not None:
                layers = _layers_of(processor.vllm_config)
            overrides, policy = settings.overrides, settings.policy
            overrides.check_kept(found, policy, length, params.max_tokens, layers)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
        if settings.policy.inner_policy is None:
            return
        if not engine.has_pool and processor.vllm_config.cache_config.num_gpu_blocks:
            engine.pool = pool_of(processor.vllm_config, settings.policy.heads)
            engine.has_pool = True
        if engine.pool is None:
            return  # the scheduler checks it
        try:
            check_fit(found, length, params, engine.pool)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter="prompt") from None


def _layers_of(config: Any) -> Layers | None:
    """Return the layers that evict; None where only the scheduler knows them."""
    model = config.model_config
    text = model.hf_text_config
    if getattr(text, "num_kv_shared_layers", 0):
        return None
    count = int(model.get_total_num_hidden_layers())
    if has_other_layers(text, model.max_model_len):
        kinds = layer_kinds(text, model.max_model_len)
        count = sum(kind in (FULL, BOTH) for kind in kinds)
    return Layers(count, config.cache_config.block_size)


def pool_of(config: Any, heads: Heads) -> Pool | None:
    """Return the pool of blocks, from vLLM's finished configuration.

    Args:
        heads: the policy's; KV heads with block tables of their own count as layers, and vLLM's
            block size is then that of their blocks.

    Returns:
        None if only the scheduler knows how many layers evict and what the others hold: for hybrid
        models, and for drafts with a KV cache.
    """
    cache, model, parallel = config.cache_config, config.model_config, config.parallel_config
    speculation = config.speculative_config
    drafts = speculation is not None and speculation.uses_draft_kv_cache()
    if drafts or has_other_layers(model.hf_text_config, model.max_model_len):
        return None
    # vLLM sums the blocks over the engines of this front end, each of which has its own pool.
    engines = parallel.data_parallel_size
    if parallel.local_engines_only:
        engines = parallel.data_parallel_size_local
    if parallel.data_parallel_rank_local is not None:
        engines = 1
    count, stages = model.get_total_num_hidden_layers(), parallel.pipeline_parallel_size
    bounds = [get_pp_indices(count, stage, stages) for stage in range(stages)]
    lanes = heads.lanes(model.get_num_kv_heads(parallel))
    return Pool(
        count * lanes,
        cache.block_size,
        cache.num_gpu_blocks // engines - 1,
        model.max_model_len,
        stages=tuple((end - start) * lanes for start, end in bounds),
    )
