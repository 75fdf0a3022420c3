# SPDX-License-Identifier: Apache-2.0
"""What a KV policy asks of the rest of vLLM's configuration, and what it cannot live with.

Two moments: `prepare_args` before vLLM resolves its defaults (so that what vLLM would switch on by
itself is switched off with one line, and what the user asked for is refused), `finish_config`
after. Whatever is not mentioned here works or fails with vLLM's own message.
"""

from __future__ import annotations

from dataclasses import replace

from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_pyramid.frontend.backends import (
    check_backend,
    take_backend,
    take_cpu_backend,
    take_draft_backend,
)
from vllm_pyramid.frontend.graphs import check_graphs
from vllm_pyramid.frontend.layer_kinds import has_states
from vllm_pyramid.frontend.refusals import OF_ARGUMENTS, OF_CONFIGURATION, refuse
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.policy import AUTO, Policy
from vllm_pyramid.policy.served_settings import SERVED_KEY, ServedSettings

logger = init_logger(f"vllm.{__name__}")

_WORKERS = {
    "cpu": "vllm_pyramid.worker.cpu_worker.PyramidCpuWorker",
    "cuda": "vllm_pyramid.worker.gpu_worker.PyramidGpuWorker",
}


def prepare_args(args: EngineArgs, settings: KVSettings) -> None:
    """Refuse what the user asked for and eviction cannot do; switch off vLLM's own defaults.

    Raises:
        ValueError: naming the flag to change.
    """
    policy = settings.policy()
    assert policy is not None
    if settings.kv_policy == AUTO:
        logger.info("kv-policy auto: %s (%s), budget %s", policy.name, policy.paper, policy.budget)
    if current_platform.device_type not in _WORKERS:
        raise ValueError(
            f"a KV policy runs on CUDA devices and on CPUs; this is {current_platform.device_type}"
        )
    if (reason := policy.why_not_shareable) is not None:
        if args.enable_prefix_caching:
            raise ValueError(
                f"policy {policy.name!r} does not work with --enable-prefix-caching: {reason}; "
                "leave the flag out"
            )
        if args.enable_prefix_caching is None:
            args.enable_prefix_caching = False
            logger.info("kv-policy %s: prefix caching is off: %s", policy.name, reason)
    refuse(OF_ARGUMENTS, args, policy)
    for part in policy.parts:
        part.prepare_args(policy, args)
    check_backend(args.attention_backend or args.attention_config.backend)
    if envs.VLLM_USE_RUST_FRONTEND:
        raise ValueError(
            "a KV policy does not work with VLLM_USE_RUST_FRONTEND yet: requests would not be "
            "checked and counters not shown; unset it"
        )
    if current_platform.device_type == "cpu":
        from vllm_pyramid.compat.platform import defaults

        defaults.choose(args)


def prepare_for_model(args: EngineArgs, model_config: ModelConfig, settings: KVSettings) -> None:
    """The same where the model matters: called when its configuration has been read.

    Raises:
        ValueError: naming the flag to change.
    """
    if not has_states(model_config.hf_text_config, model_config.max_model_len):
        return
    if args.enable_prefix_caching:
        raise ValueError(
            "a KV policy does not work with --enable-prefix-caching and this model yet: some of "
            "its layers keep a state, which would have to be kept at each point where another "
            "prompt may leave this one; leave the flag out"
        )
    if args.enable_prefix_caching is None:
        args.enable_prefix_caching = False
        logger.info(
            "kv-policy %s: prefix caching is off: layers of this model keep a state",
            settings.kv_policy,
        )


def finish_config(
    config: VllmConfig, settings: KVSettings, *, asks_prefix_caching: bool = False
) -> None:
    """Check what vLLM made of the rest, and put our scheduler, worker and backend in place.

    Args:
        asks_prefix_caching: whether the user did: some models show only later that they cannot.

    Raises:
        ValueError: naming the flag to change.
    """
    served = settings.served()
    assert served is not None
    served = replace(
        served,
        num_drafts=config.num_speculative_tokens,
        asks_prefix_caching=asks_prefix_caching,
    )
    policy = served.policy
    refuse(OF_CONFIGURATION, config, policy)
    served = replace(served, why_no_turns=why_no_turns(config, served))
    _check_chunks(config, policy, max(served.min_last_chunk, served.min_inner_chunk))
    for part in policy.parts:
        part.check_config(policy, config)
    check_graphs(config, policy)
    _probe(config, policy)
    if current_platform.device_type == "cuda":
        served = replace(served, backend=take_backend(config, policy))
    else:
        take_cpu_backend(config)
    take_draft_backend(config)
    config.additional_config = {**config.additional_config, SERVED_KEY: served.as_data()}
    config.parallel_config.worker_cls = _WORKERS[current_platform.device_type]
    config.scheduler_config.scheduler_cls = "vllm_pyramid.scheduler.scheduler." + (
        "PyramidAsyncScheduler" if config.scheduler_config.async_scheduling else "PyramidScheduler"
    )
    _install_front_end()


def why_no_turns(config: VllmConfig, served: ServedSettings) -> str | None:
    """See `ServedSettings.why_no_turns`."""
    model = config.model_config
    if config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline stages have block pools of their own, in which no state is kept yet"
    if has_states(model.hf_text_config, model.max_model_len):
        return "the states that layers of this model have at the end of a turn are not kept yet"
    if served.min_last_chunk > served.policy.min_turn:
        return (
            f"for the drafts of a step, or its trace, the last chunk of a prompt has "
            f"{served.min_last_chunk} tokens, more than a short turn"
        )
    return None


def _probe(config: VllmConfig, policy: Policy) -> None:
    """Try what the user's own classes score and select with, in the shape of this model."""
    inside = policy.inner_policy
    if inside is not None:
        _probe(config, inside)
    if not any(":" in part.kind for part in (policy.scorer, policy.selector)):
        return
    from vllm_pyramid.step.probe import probe

    model, parallel = config.model_config, config.parallel_config
    heads = model.get_num_attention_heads(parallel)
    probe(policy, heads, model.get_num_kv_heads(parallel), model.get_head_size())


def _check_chunks(config: VllmConfig, policy: Policy, least: int) -> None:
    """The last chunk of a prompt must be able to carry the observation window."""
    if not policy.evicts:
        return
    scheduler = config.scheduler_config
    for flag, tokens in (
        ("--max-num-batched-tokens", scheduler.max_num_batched_tokens),
        ("--max-num-scheduled-tokens", scheduler.max_num_scheduled_tokens),
        ("--long-prefill-token-threshold", scheduler.long_prefill_token_threshold),
    ):
        if tokens and tokens <= least:
            raise ValueError(
                f"{flag} {tokens} is too small for policy {policy.name!r}: the last chunk of a "
                f"prompt carries at least {least} tokens (the observation "
                f"window), so prompts could stop short of it for ever; raise it above "
                f"{least}"
            )


def _install_front_end() -> None:
    from vllm_pyramid.compat import input_processor, stats
    from vllm_pyramid.frontend import metrics
    from vllm_pyramid.frontend.requests import PolicyRequestChecks

    input_processor.install(PolicyRequestChecks())
    stats.install(metrics.observe)
