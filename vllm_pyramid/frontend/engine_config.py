# SPDX-License-Identifier: Apache-2.0
"""What a KV policy asks of the rest of vLLM's configuration, and what it cannot live with.

Two moments: `prepare_args` before vLLM resolves its defaults (so that what vLLM would switch on by
itself is switched off with one line, and what the user asked for is refused), `finish_config`
after. Whatever is not mentioned here works or fails with vLLM's own message.
"""

from __future__ import annotations

from dataclasses import replace

from vllm import envs
from vllm.config import CUDAGraphMode, ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_pyramid.compat.backend_names import BACKENDS, CPU_BACKEND
from vllm_pyramid.frontend.model_shape import has_states
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
    _check_backend(args.attention_backend or args.attention_config.backend)
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


def _check_backend(chosen: AttentionBackendEnum | str | None) -> None:
    on_cuda = current_platform.device_type == "cuda"
    name = chosen.name if isinstance(chosen, AttentionBackendEnum) else chosen
    if name is not None and (not on_cuda or name.upper() not in BACKENDS):
        why = "on the CPU vllm-pyramid's own kernels run; leave the flag out"
        if on_cuda:
            why = f"per-layer tables are built for {' and '.join(BACKENDS)} here"
        raise ValueError(f"a KV policy does not work with --attention-backend {name} yet: {why}")


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
    served = replace(served, why_no_turns=_why_no_turns(config, served))
    _check_chunks(config, policy, max(served.min_last_chunk, served.min_inner_chunk))
    for part in policy.parts:
        part.check_config(policy, config)
    _check_graphs(config, policy)
    _probe(config, policy)
    if current_platform.device_type == "cuda":
        served = replace(served, backend=_take_backend(config, policy))
    else:
        _take_cpu_backend(config)
    _take_draft_backend(config)
    config.additional_config = {**config.additional_config, SERVED_KEY: served.as_data()}
    config.parallel_config.worker_cls = _WORKERS[current_platform.device_type]
    config.scheduler_config.scheduler_cls = "vllm_pyramid.scheduler.scheduler." + (
        "PyramidAsyncScheduler" if config.scheduler_config.async_scheduling else "PyramidScheduler"
    )
    _install_front_end()


def _why_no_turns(config: VllmConfig, served: ServedSettings) -> str | None:
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


def _take_backend(config: VllmConfig, policy: Policy) -> str:
    """On CUDA, put our backend in front: vLLM's kernels, reading per-layer tables. Its name."""
    if policy.evicts and not policy.fill_blocks:
        raise ValueError(
            f"policy {policy.name!r} sets fill_blocks: false, which leaves a partly filled first "
            "block that the attention kernels for CUDA cannot mask: set fill_blocks to true"
        )
    chosen = config.attention_config.backend
    name = _default_backend(config) if chosen is None else chosen.name
    if reasons := _reasons_against(name, config):
        raise ValueError(
            f"a KV policy cannot serve this model with the attention backend {name} here: "
            f"{', '.join(reasons)}"
        )
    if name == "FLASH_ATTN" and _capability().major == 10:
        logger.info(
            "kv-policy: FlashAttention runs on this device, where vLLM alone prefers FlashInfer; "
            "compare with --attention-backend FLASH_ATTN on both sides"
        )
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    register_backend(AttentionBackendEnum.CUSTOM, BACKENDS[name])
    return name


def _take_cpu_backend(config: VllmConfig) -> None:
    """On the CPU, name our backend, which our platform then answers with."""
    from vllm_pyramid.compat.platform.cpu_platform import PyramidCpuPlatform

    if not isinstance(current_platform, PyramidCpuPlatform):
        raise ValueError(
            "a KV policy needs vllm-pyramid's CPU platform, and vLLM chose "
            f"{type(current_platform).__name__}: unset VLLM_TARGET_DEVICE, let VLLM_PLUGINS name "
            "vllm_pyramid_cpu too (or unset it), and uninstall other platform plugins"
        )
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    register_backend(AttentionBackendEnum.CUSTOM, CPU_BACKEND)


def _take_draft_backend(config: VllmConfig) -> None:
    """A draft model's blocks come from the same pool, so its attention is ours, too."""
    speculation = config.speculative_config
    if speculation is None or not speculation.uses_draft_kv_cache():
        return
    if (chosen := speculation.attention_backend) is not None:
        raise ValueError(
            f"a KV policy does not work with attention_backend {chosen.name} of a draft model "
            "(--speculative-config) yet: its layers take the backend of the model; leave it out"
        )
    speculation.attention_backend = AttentionBackendEnum.CUSTOM


def _default_backend(config: VllmConfig) -> str:
    """The first backend that this device, this vLLM, the model and the cache allow.

    If none does it is the last one, whose reasons the user is told.
    """
    for name in BACKENDS:
        if not (reasons := _reasons_against(name, config)):
            return name
        logger.debug("no %s under a KV policy: %s", name, ", ".join(reasons))
    return name


def _reasons_against(name: str, config: VllmConfig) -> list[str]:
    """What vLLM would say against a backend of ours when it builds the layers of a model."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available
    from vllm.v1.attention.selector import AttentionSelectorConfig

    if name == "FLASH_ATTN" and not is_flash_attn_varlen_func_available():
        return ["this vLLM was built without FlashAttention"]
    backend = resolve_obj_by_qualname(BACKENDS[name])
    model, cache = config.model_config, config.cache_config
    text = model.hf_text_config
    sizes = {model.get_head_size()}
    # Gemma 4 has larger heads where attention is full.
    if (of_layers := getattr(text, "per_layer_config", None)) is not None:
        layers = (of_layers[layer] for layer in range(text.num_hidden_layers))
        sizes |= {getattr(layer, "head_dim", None) for layer in layers} - {None}
    found: dict[str, None] = {}  # a set that keeps its order
    with set_current_vllm_config(config):
        for size in sorted(sizes):
            wanted = AttentionSelectorConfig(
                head_size=size,
                dtype=model.dtype,
                kv_cache_dtype=cache.cache_dtype,
                block_size=cache.block_size if cache.user_specified_block_size else None,
                has_sink=text.model_type == "gpt_oss" or bool(getattr(text, "attention_sinks", 0)),
                use_mm_prefix=bool(model.is_mm_prefix_lm),
                use_batch_invariant=envs.VLLM_BATCH_INVARIANT,
            )
            against = backend.validate_configuration(
                device_capability=_capability(), **wanted._asdict()
            )
            found |= dict.fromkeys(against)
    return list(found)


def _capability() -> DeviceCapability:
    found = current_platform.get_device_capability()
    assert found is not None, "asked of CUDA devices alone"
    return found


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


def _check_graphs(config: VllmConfig, policy: Policy) -> None:
    """A graph that covers prefill would replay attention without ever calling the eviction."""
    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is not None and policy.attends:
        _leave_attention_out(config, policy, mode)
        return
    if mode is None or not policy.evicts:
        return
    if mode.mixed_mode() == CUDAGraphMode.FULL:
        raise ValueError(
            f"compilation_config.cudagraph_mode {mode.name} captures prefill in a full graph, "
            "which would skip the eviction: use FULL_AND_PIECEWISE, FULL_DECODE_ONLY, PIECEWISE "
            "or NONE"
        )


def _leave_attention_out(config: VllmConfig, policy: Policy, mode: CUDAGraphMode) -> None:
    """Graphs between the layers' attention alone: vLLM's default becomes that, others are refused.

    Raises:
        ValueError: graphs were asked for that cover attention.
    """
    compilation = config.compilation_config
    if mode == CUDAGraphMode.NONE:
        return
    if mode.decode_mode() == CUDAGraphMode.FULL and mode != CUDAGraphMode.FULL_AND_PIECEWISE:
        raise ValueError(
            f"compilation_config.cudagraph_mode {mode.name} captures whole decode steps, and "
            f"policy {policy.name!r} attends in some layers by what only the host knows in each "
            "step: use PIECEWISE or NONE"
        )
    if compilation.use_inductor_graph_partition:
        raise ValueError(
            f"policy {policy.name!r} does not work with "
            "compilation_config.use_inductor_graph_partition and CUDA graphs: they would cover the "
            "writing of V; leave one of them out"
        )
    if mode != CUDAGraphMode.PIECEWISE:
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        logger.info(
            "kv-policy %s: cudagraph_mode is PIECEWISE, not %s: which rows of V a step fetches is "
            "known to the host alone, so attention runs between the graphs",
            policy.name,
            mode.name,
        )


def _install_front_end() -> None:
    from vllm_pyramid.compat import input_processor, stats
    from vllm_pyramid.frontend import metrics
    from vllm_pyramid.frontend.requests import PolicyRequestChecks

    input_processor.install(PolicyRequestChecks())
    stats.install(metrics.observe)
