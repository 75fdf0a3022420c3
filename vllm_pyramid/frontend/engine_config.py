# SPDX-License-Identifier: Apache-2.0
"""Fit vLLM's configuration to a KV policy, and refuse what does not work with one.

`prepare_args` runs before vLLM resolves its defaults, `finish_config` afterwards. Options that are
not mentioned here work, or fail with vLLM's own message. Errors name the flag to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_pyramid.compat import config_hash, page_server
from vllm_pyramid.compat.cpu_resources import available_host_memory
from vllm_pyramid.compat.input_processor import api_servers
from vllm_pyramid.compat.step_limits import step_limits
from vllm_pyramid.frontend import features
from vllm_pyramid.frontend.backends import take_backend, take_cpu_backend, take_draft_backend
from vllm_pyramid.frontend.follow_sessions import why_no_sessions
from vllm_pyramid.frontend.gpu_runs import warn_unless_run
from vllm_pyramid.frontend.graphs import check_graphs
from vllm_pyramid.frontend.layer_kinds import has_states
from vllm_pyramid.frontend.refusals import EVERY_POLICY
from vllm_pyramid.frontend.settings import KVSettings, without_ours
from vllm_pyramid.policy import AUTO, Policy
from vllm_pyramid.policy.capabilities import Feature, Used, asked, refuse, why_not
from vllm_pyramid.policy.request_keys import EXACT
from vllm_pyramid.policy.served_settings import SERVED_KEY, ServedSettings
from vllm_pyramid.step.probe import probe
from vllm_pyramid.transfer.settings import TransferSettings

logger = init_logger(f"vllm.{__name__}")

_WORKERS = {
    "cpu": "vllm_pyramid.worker.cpu_worker.PyramidCpuWorker",
    "cuda": "vllm_pyramid.worker.gpu_worker.PyramidGpuWorker",
}


def prepare_args(args: EngineArgs, settings: KVSettings) -> Used:
    """Refuse arguments that do not work with a policy; switch off such defaults of vLLM.

    Returns:
        The features that the user asks for.
    """
    policy = settings.policy()
    assert policy is not None
    if settings.kv_policy == AUTO:
        logger.info("kv-policy auto: %s (%s), budget %s", policy.name, policy.paper, policy.budget)
    if current_platform.device_type not in _WORKERS:
        raise ValueError(
            f"a KV policy runs on CUDA devices and on CPUs; this is {current_platform.device_type}"
        )
    used = features.of_args(args)
    refuse(policy, used, EVERY_POLICY)
    reason = policy.why_not(Feature.PREFIX_CACHING)
    if reason is not None and args.enable_prefix_caching is None:
        args.enable_prefix_caching = False
        logger.info("kv-policy %s: prefix caching is off: %s", policy.name, reason)
    if args.pipeline_parallel_size > 1:
        args.async_scheduling = False  # vLLM's default on GPUs, not tried with stages
    for part in policy.parts:
        part.prepare_args(policy, args)
    if current_platform.device_type == "cpu":
        from vllm_pyramid.compat.platform import defaults

        defaults.choose(args)
    return used


def prepare_for_model(args: EngineArgs, model_config: ModelConfig, settings: KVSettings) -> bool:
    """Do the same for what depends on the model, when its configuration has been read.

    Returns:
        Whether `args` say something else of the model now than they did.
    """
    changed = False
    if current_platform.device_type == "cpu":
        from vllm_pyramid.frontend.weights import choose_weights

        changed = choose_weights(args, model_config)
    if not has_states(model_config.hf_text_config, model_config.max_model_len):
        return changed
    if args.enable_prefix_caching and (policy := settings.policy()) is not None:
        refuse(policy, asked(Feature.PREFIX_CACHING, Feature.STATES), EVERY_POLICY)
    if args.enable_prefix_caching is None:
        args.enable_prefix_caching = False
        logger.info(
            "kv-policy %s: prefix caching is off: this model has state layers",
            settings.kv_policy,
        )
    return changed


def finish_config(config: VllmConfig, settings: KVSettings, of_args: Used) -> None:
    """Check the finished configuration; set our scheduler, worker and attention backend.

    Args:
        of_args: what `prepare_args` returned.
    """
    served = settings.served()
    assert served is not None
    served = replace(
        served,
        num_drafts=config.num_speculative_tokens,
        # Some models turn out only later not to support it.
        asks_prefix_caching=Feature.PREFIX_CACHING in of_args,
    )
    policy, used = served.policy, {**of_args, **features.of_config(config)}
    refuse(policy, used, EVERY_POLICY)
    served = replace(served, why_no_turns=why_no_turns(used, served))
    if served.session_from:
        _check_sessions(config, served)
    if served.keep_template is not None or served.keep_tools:
        from vllm_pyramid.compat import chat_renderer
        from vllm_pyramid.frontend.chat_template import TemplateSpans

        reason = chat_renderer.why_no_renderer(config.model_config)
        if reason is not None and served.keep_template is not None:
            raise ValueError(f"--kv-keep does not work here: {reason}; leave the flag out")
        served = replace(served, keep_tools=served.keep_tools and reason is None)
        chat_renderer.install(TemplateSpans())
    served = replace(served, host_cache_bytes=_host_share(config, served))
    _check_chunks(config, policy, max(served.min_last_chunk, served.min_inner_chunk))
    for part in policy.parts:
        part.check_config(policy, config)
    if Feature.HANDOVER in used:
        assert config.kv_transfer_config is not None
        transfer = TransferSettings.of(config.kv_transfer_config)  # refuses wrong ones
        if transfer.sends and policy.schedule.waits_for_orders:
            raise ValueError(
                "--kv-evict pressure does not work in an engine that sends states (kv_role "
                f"{config.kv_transfer_config.kv_role}): its prompts are whole when they would be "
                "sent; leave the flag out there, or set kv_role to kv_consumer"
            )
        # A request whose state cannot be read computes its prompt.
        config.kv_transfer_config.kv_load_failure_policy = "recompute"
    served = replace(served, policy=_on_ranks(policy, config))
    check_graphs(config, policy)
    _probe(config, policy)
    if current_platform.device_type == "cuda":
        served = replace(served, backend=take_backend(config))
        warn_unless_run(current_platform.get_device_name())
    else:
        take_cpu_backend(config)
    take_draft_backend(config)
    given = config.additional_config
    assert isinstance(given, Mapping), "the settings were read from it"
    config_hash.install()
    config.additional_config = config_hash.SettingsWithKey(
        {**given, SERVED_KEY: served.as_data()},
        of_graph={**without_ours(given), SERVED_KEY: served.of_graph},
    )
    config.parallel_config.worker_cls = _WORKERS[current_platform.device_type]
    config.scheduler_config.scheduler_cls = "vllm_pyramid.scheduler.scheduler." + (
        "PyramidAsyncScheduler" if config.scheduler_config.async_scheduling else "PyramidScheduler"
    )
    _install_front_end()
    if page_server.is_server():
        from vllm_pyramid.compat import request_bodies, stream_reports
        from vllm_pyramid.frontend.http_settings import check_body

        request_bodies.install(check_body)
        stream_reports.install()
    elif settings.kv_anchor:
        raise ValueError("--kv-anchor changes HTTP bodies, so it is for vllm serve: leave it out")
    if served.shadow is not None:
        _check_shadow(config, is_server=page_server.is_server())
    if served.page or page_server.is_server():
        from vllm_pyramid.frontend.server import attach

        page_server.install(attach)


def _on_ranks(policy: Policy, config: VllmConfig) -> Policy:
    """Return the policy for the tensor-parallel ranks; ValueError if it would evict nothing."""
    if not policy.heads.splits:
        return policy
    num_kv_heads = config.model_config.get_total_num_kv_heads()
    # Where there are more ranks than KV heads, some have copies of the same.
    ranks = num_kv_heads // config.model_config.get_num_kv_heads(config.parallel_config)
    heads = policy.heads.on_ranks(policy, ranks, num_kv_heads)
    return policy.model_copy(update={"heads": heads.model_dump()})


def _check_sessions(config: VllmConfig, served: ServedSettings) -> None:
    """Raise ValueError unless requests can have the sessions that --kv-session-from gives them."""
    reason = why_no_sessions(config.parallel_config)
    if reason is None and served.turn_mode != EXACT:
        reason = served.why_no_turns
    if reason is not None:
        raise ValueError(f"--kv-session-from does not work here: {reason}; leave it out")


def _check_shadow(config: VllmConfig, *, is_server: bool) -> None:
    """Raise ValueError unless an engine's answers can be compared with the whole cache's."""
    parallel, reason = config.parallel_config, None
    if not is_server:
        reason = "it is for vllm serve, which replays answers while it is idle"
    elif (servers := api_servers(parallel)) > 1 or parallel.data_parallel_size > 1:
        reason = (
            f"one front end has to see all requests of one engine; there are {servers} API servers "
            f"and {parallel.data_parallel_size} replicas"
        )
    if reason is not None:
        raise ValueError(f"--kv-shadow does not work here: {reason}; leave it out")


def why_no_turns(used: Used, served: ServedSettings) -> str | None:
    """Return why the engine cannot resume conversations; see `ServedSettings.why_no_turns`."""
    if (reason := why_not(EVERY_POLICY, Feature.KV_TURNS, used)) is not None:
        return reason
    if served.min_last_chunk > served.policy.min_turn:
        return (
            "drafts or a trace make the last chunk of a prompt "
            f"{served.min_last_chunk} tokens long, more than a short turn has"
        )
    return None


def _host_share(config: VllmConfig, served: ServedSettings) -> int | None:
    """Return each rank's bytes of the host cache, or None; ValueError if the host has less."""
    wanted, parallel = served.host_cache_bytes, config.parallel_config
    if wanted is None:
        return None
    free = available_host_memory()
    here = parallel.nnodes == 1 and parallel.distributed_executor_backend != "ray"
    if here and wanted > free:
        raise ValueError(
            f"--kv-host-cache {wanted / 2**30:.4g} (GiB) does not fit into the "
            f"{free / 2**30:.4g} GiB of free memory: lower it"
        )
    return wanted // parallel.tensor_parallel_size


def _probe(config: VllmConfig, policy: Policy) -> None:
    """Run the user's own scorer and selector once, in the shape of this model."""
    if policy.inner_policy is not None:
        _probe(config, policy.inner_policy)
    if not any(":" in part.kind for part in (policy.scorer, policy.selector)):
        return
    model, parallel = config.model_config, config.parallel_config
    heads = model.get_num_attention_heads(parallel)
    probe(policy, heads, model.get_num_kv_heads(parallel), model.get_head_size())


def _check_chunks(config: VllmConfig, policy: Policy, min_last_chunk: int) -> None:
    """Raise ValueError if a step is too small for the last chunk of a prompt."""
    if not policy.evicts:
        return
    for flag, value, tokens in step_limits(config):
        if tokens is not None and tokens <= min_last_chunk:
            raise ValueError(
                f"{flag} {value} is too small for policy {policy.name!r}: the last chunk of a "
                f"prompt has at least {min_last_chunk} tokens (the observation window), so a "
                f"prompt might never be finished; raise it above {min_last_chunk}"
            )


def _install_front_end() -> None:
    from vllm_pyramid.compat import input_processor, output_processor, stats
    from vllm_pyramid.frontend import metrics
    from vllm_pyramid.frontend.requests import PolicyRequestChecks

    input_processor.install(PolicyRequestChecks())
    output_processor.install()
    stats.install(metrics.observe)
