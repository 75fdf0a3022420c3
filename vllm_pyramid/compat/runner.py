# SPDX-License-Identifier: Apache-2.0
"""An adapter in front of the class of vLLM's model runner, and the layers that it binds.

Workers create their runner themselves and choose between three classes. A subclass of the adapter
and the runner's class, assigned to the finished object, overrides methods without copying any
constructor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_pyramid.compat.side_channel import StepReport, attach_report
from vllm_pyramid.step.failures import StepFailures
from vllm_pyramid.step.rotary import Rotary

Adapter = TypeVar("Adapter")


def extend_runner(runner: Any, adapter: type[Adapter]) -> Adapter:
    """Let the methods of the class `adapter` precede the runner's own; return the runner."""
    cls = type(runner)
    runner.__class__ = type(f"{adapter.__name__}{cls.__name__}", (adapter, cls), {})
    extended: Adapter = runner
    return extended


def attention_layer(config: VllmConfig, name: str) -> Any:
    """Return the attention module that vLLM registered under `name`."""
    return config.compilation_config.static_forward_context[name]


def rotary_of_layer(model: torch.nn.Module, name: str) -> Rotary | None:
    """Return the rotary embedding of the attention layer `name`; None where it has none.

    ValueError: its rotation is not known to be a function of a token's position alone.
    """
    modules = dict(model.named_modules())
    parent = modules.get(name.rpartition(".")[0])
    rotary = getattr(parent, "rotary_emb", None)
    if rotary is None:
        if parent is None or any(other.endswith("rotary_emb") for other in modules):
            raise ValueError(f"layer {name} has none next to its attention, where it is expected")
        return None
    if getattr(parent, "use_rope", True) is False or getattr(parent, "nope", False) is True:
        return None  # the module exists and is not applied
    cache = getattr(rotary, "cos_sin_cache", None)
    if not isinstance(cache, torch.Tensor) or getattr(rotary, "mrope_section", None):
        raise ValueError(f"layer {name} has a {type(rotary).__name__}, which is not supported")
    return Rotary(cache, halves=bool(rotary.is_neox_style))


def send_report(output: Any, report: StepReport, failures: StepFailures) -> Any:
    """Attach a step's report to what `sample_tokens` returns, finished or still in flight.

    Failures that the device still computes are waited for when the step's tokens are, in the thread
    that waits for these.
    """
    if not any(report) and not failures.known and failures.copied is None:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        for name in ("_model_runner_output", "model_runner_output"):
            inner = getattr(output, name, None)
            if isinstance(inner, ModelRunnerOutput):
                setattr(output, name, attach_report(inner, report))
                output.get_output = partial(  # type: ignore[method-assign]
                    _with_failures, output.get_output, report, failures
                )
                return output
        raise RuntimeError(f"{type(output).__name__} of this vLLM carries no output to attach to")
    if not isinstance(output, ModelRunnerOutput):
        raise RuntimeError(f"a model runner of this vLLM returned a {type(output).__name__}")
    report.failures.update(failures.wait())
    return attach_report(output, report)


def _with_failures(
    get_output: Callable[[], ModelRunnerOutput], report: StepReport, failures: StepFailures
) -> ModelRunnerOutput:
    output = get_output()
    report.failures.update(failures.wait())
    return output
