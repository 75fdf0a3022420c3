# SPDX-License-Identifier: Apache-2.0
"""The functions of vLLM's engine, model runner and model that make up the parts of a step.

Target: methods of the objects of a finished engine whose core is in this process, replaced on the
objects themselves, and only while a step is profiled. Why: vLLM's own timers (`record_function`
scopes) see neither single operators nor our kernels, and PyTorch's profiler costs more than the
small operators that it would measure. Remove when vLLM reports the parts of a step.

On the CPU an operator has finished when it returns; on other devices these times mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import CompilationMode
from vllm.model_executor.layers.linear import LinearBase

__all__ = ["step_functions"]

Function = tuple[str, Any, str]  # part, object, name of its method

# Parts of a step by the package of vLLM whose modules are a single operation.
_LAYERS = "vllm.model_executor.layers."
_KINDS = {
    "layernorm": "norm",
    "rotary_embedding": "rotary",
    "activation": "activation",
    "vocab_parallel_embedding": "embedding",
}


def step_functions(client: Any) -> list[Function]:
    """Return the functions of a step of `client`, each with its part and its object.

    Functions call one another: a part's time is that of its functions, without the functions of
    other parts that they call. Layers share objects; each function is listed once.

    Args:
        client: vLLM's `LLMEngine`, with its core in this process.

    Raises:
        ValueError: the parts of this engine's steps cannot be measured; the message says what to
            change.
    """
    core = client.engine_core.engine_core
    runner = _runner(core)
    found: list[Function] = [
        ("rest", client, "step"),
        ("scheduling", core.scheduler, "schedule"),
        ("outputs", core.scheduler, "update_from_output"),
        ("outputs", client.output_processor, "process_outputs"),
        ("inputs", runner, "execute_model"),
        ("outputs", runner, "sample_tokens"),
        ("between", runner, "_model_forward"),
        ("between", runner.model, "compute_logits"),
        ("sampling", runner, "_sample"),
        *_attention(runner),
    ]
    found += [*_linear(runner.model), *_operators(runner.model)]
    return list({(id(owner), name): (part, owner, name) for part, owner, name in found}.values())


def _runner(core: Any) -> Any:
    worker = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
    if worker is None:
        raise ValueError(
            "--profile looks into the one process of an engine: leave tensor and pipeline "
            "parallelism and distributed_executor_backend out of --engine-args"
        )
    runner = worker.model_runner
    if runner.device.type != "cpu":
        raise ValueError(
            f"--profile times operators as they return, which means nothing on {runner.device}: "
            "use vLLM's own profiler there (--profiler-config), or leave --profile out"
        )
    if not hasattr(runner, "_model_forward"):
        raise ValueError(
            f"--profile does not know the model runner {type(runner).__name__}: unset "
            "VLLM_USE_V2_MODEL_RUNNER"
        )
    if runner.vllm_config.compilation_config.mode != CompilationMode.NONE:
        raise ValueError(
            "--profile cannot measure single operators that were compiled together: leave "
            "enforce_eager out of --engine-args"
        )
    if core.async_scheduling:
        raise ValueError(
            "--profile needs steps that do not overlap: set async_scheduling to false in "
            "--engine-args"
        )
    return runner


def _attention(runner: Any) -> Iterator[Function]:
    """Yield the functions of our attention, and those of the policy."""
    for layer in runner.vllm_config.compilation_config.static_forward_context.values():
        if (impl := getattr(layer, "impl", None)) is None:
            continue
        yield "attention", impl, "forward"
        yield "cache_write", impl, "do_kv_cache_update"
        context = getattr(impl, "context", None)
        if context is None:
            continue
        yield "eviction", context, "evict"
        for hooks in context.hooks.after_write:
            yield "eviction", hooks, "after_write"
        for hooks in context.hooks.after_attention:
            yield "eviction", hooks, "after_attention"
        yield "policy", context.tracker, "begin_step"
        yield "policy", context.tracker, "end_step"
    for groups in runner.attn_groups:
        for group in groups:
            for builder in group.metadata_builders:
                yield "policy", builder, "build"


def _linear(model: torch.nn.Module) -> Iterator[Function]:
    """Yield the products with weights, that of the output layer included.

    Raises:
        ValueError: the product of a layer is not known.
    """
    for name, module in model.named_modules():
        if hasattr(module, "cpu_linear"):
            yield "linear", module, "cpu_linear"
        elif isinstance(module, LinearBase):
            raise ValueError(
                f"--profile does not know how {name} multiplies ({type(module).__name__}, perhaps "
                "quantised): leave --profile out"
            )


def _operators(model: torch.nn.Module) -> Iterator[Function]:
    """Yield the small operators of the layers, and the look-up of embeddings."""
    for module in model.modules():
        origin = type(module).__module__
        kind = origin.removeprefix(_LAYERS).split(".")[0] if origin.startswith(_LAYERS) else ""
        if kind in _KINDS:
            yield _KINDS[kind], module, "forward"
