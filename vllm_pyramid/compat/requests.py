# SPDX-License-Identifier: Apache-2.0
"""A request's own settings are checked in the front end, where a mistake can be answered.

Target: `InputProcessor.process_inputs`. Why: what is wrong with `vllm_xargs` would otherwise be
found in the engine core, where an exception ends the engine instead of the request. The same goes
for one that would not fit into the pool by itself, and for images that attend both ways.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import ModelConfig
from vllm.distributed.utils import get_pp_indices
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine.input_processor import InputProcessor

from vllm_pyramid.config import ServedSettings
from vllm_pyramid.model_shape import has_companions
from vllm_pyramid.policy.base import Policy
from vllm_pyramid.request_config import ServedRequest, check_request
from vllm_pyramid.request_fit import Pool, check_fit


def _served_settings(processor: InputProcessor) -> ServedSettings | None:
    """The engine's settings, read from its configuration once."""
    if "kv_settings" not in vars(processor):
        vars(processor)["kv_settings"] = ServedSettings.of(processor.vllm_config)
    settings: ServedSettings | None = vars(processor)["kv_settings"]
    return settings


def _check(settings: ServedSettings, params: object, resumable: bool) -> ServedRequest | None:
    if resumable:
        raise VLLMValidationError(
            "streaming input does not work with a KV policy: the prompt would grow after its "
            "cache was evicted; send the prompt whole",
            parameter="resumable",
        )
    if not isinstance(params, SamplingParams):
        return None
    try:
        return check_request(settings.policy, params, settings.no_turns)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


def check_images(model_config: ModelConfig, request: Any) -> None:
    """Refuse images, and the like, of models in which their tokens attend both ways.

    Attention to what comes later does not go by chunks that end where an eviction is due, and the
    CPU has no kernel for it.

    Raises:
        VLLMValidationError: the request has some.
    """
    if request.mm_features and model_config.is_mm_prefix_lm:
        raise VLLMValidationError(
            "a KV policy does not work with the images of this model yet, whose tokens attend to "
            "each other in both directions: send text, or start the server with --kv-policy none",
            parameter="messages",
        )


def _pool_of(processor: InputProcessor) -> Pool | None:
    """What all requests share, worked out once; None where only the scheduler knows it."""
    known = vars(processor)
    config = processor.vllm_config
    cache, model, parallel = config.cache_config, config.model_config, config.parallel_config
    if "kv_pool" in known or not cache.num_gpu_blocks:
        return known.get("kv_pool")
    known["kv_pool"] = None
    # How many layers of a hybrid model evict, and what others hold, the scheduler knows.
    speculation = processor.vllm_config.speculative_config
    drafts = speculation is not None and speculation.uses_draft_kv_cache()
    if not drafts and not has_companions(model.hf_text_config, model.max_model_len):
        # Summed over the engines of this front end, of which each has a pool of its own.
        engines = parallel.data_parallel_size
        if parallel.local_engines_only:
            engines = parallel.data_parallel_size_local
        if parallel.data_parallel_rank_local is not None:
            engines = 1
        count, stages = model.get_total_num_hidden_layers(), parallel.pipeline_parallel_size
        bounds = [get_pp_indices(count, stage, stages) for stage in range(stages)]
        known["kv_pool"] = Pool(
            count,
            cache.block_size,
            cache.num_gpu_blocks // engines - 1,
            model.max_model_len,
            stages=tuple(end - start for start, end in bounds),
        )
    return known.get("kv_pool")


def _check_length(
    processor: InputProcessor, policy: Policy, served: ServedRequest, request: Any
) -> None:
    """Of a request whose prompt has been tokenised."""
    length = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    try:
        served.check_turns(length)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
    if policy.inside is None or request.sampling_params is None:
        return
    if (pool := _pool_of(processor)) is None:
        return  # the scheduler looks, too
    try:
        check_fit(served, length, request.sampling_params, pool)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="prompt") from None


def install() -> None:
    """Put the wrapper in place. Idempotent; engines without a policy are not affected."""
    if getattr(InputProcessor, "_vllm_pyramid", False):
        return
    process_inputs = InputProcessor.process_inputs

    @functools.wraps(process_inputs)
    def process_checked_inputs(
        self: InputProcessor,
        request_id: str,
        prompt: Any,
        params: Any,
        *args: Any,
        resumable: bool = False,
        **kwargs: Any,
    ) -> Any:
        settings = _served_settings(self)
        served = None if settings is None else _check(settings, params, resumable)
        request = process_inputs(
            self, request_id, prompt, params, *args, resumable=resumable, **kwargs
        )
        if settings is not None:
            check_images(self.model_config, request)
            if served is not None:
                _check_length(self, settings.policy, served, request)
        return request

    InputProcessor.process_inputs = process_checked_inputs  # type: ignore[method-assign]
    InputProcessor._vllm_pyramid = True  # type: ignore[attr-defined]
