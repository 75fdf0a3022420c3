# SPDX-License-Identifier: Apache-2.0
"""A forward pass of vLLM's models in which tokens are dropped between two layers.

vLLM's loop over the layers is inside `forward`, which is compiled as a whole for every number of
input tokens. In steps in which a prompt is thinned the loop below takes its place, uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_pyramid.step.step import Step, StepLayout

logger = init_logger(f"vllm.{__name__}")

# Inner modules whose `forward` calls embed, layers(positions, hidden states, residual) and norm.
_INNER = {
    "vllm.model_executor.models.llama.LlamaModel": "Llama",
    "vllm.model_executor.models.mistral.MistralModel": "Mistral",
    "vllm.model_executor.models.qwen2.Qwen2Model": "Qwen2",
    "vllm.model_executor.models.qwen3.Qwen3Model": "Qwen3",
}
# The architectures of checkpoints that vLLM serves with these modules.
ARCHITECTURES = (
    "InternLM3ForCausalLM",
    "LLaMAForCausalLM",
    "LlamaForCausalLM",
    "Ministral3ForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


class _ThinnedLayers:
    """Precedes an inner module's class. `kv_is_profiled`: vLLM measures its largest step."""

    kv_step: Callable[[], Step]
    kv_is_profiled: bool

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        layout = self.kv_step().layout
        if self.kv_is_profiled:
            # The largest step: all rows stay in all layers.
            stay = partial(torch.arange, len(positions), device=positions.device)
            _forward(self, len(positions), stay, input_ids, positions, inputs_embeds)
        if layout is None:
            return super().__call__(  # type: ignore[misc]
                input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds, **kwargs
            )
        assert intermediate_tensors is None and not kwargs, "refused at start-up"
        tokens = int(layout.query_starts[0, -1])
        return _forward(self, tokens, partial(_take, layout), input_ids, positions, inputs_embeds)


def _take(layout: StepLayout) -> torch.Tensor | None:
    """Take the survivors of the layer that has just run out of the layout."""
    survivors, layout.survivors = layout.survivors, None
    return survivors


def _forward(
    model: Any,
    tokens: int,
    survivors_of_layer: Callable[[], torch.Tensor | None],
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    inputs_embeds: torch.Tensor | None,
) -> torch.Tensor:
    """Return the hidden states of the step's tokens; zeros for dropped tokens and for padding.

    Logits are computed of each request's last token alone, which is never dropped.

    Args:
        tokens: tokens of the step; the inputs behind them are padding.
        survivors_of_layer: called after each layer; see `StepLayout.survivors`.
    """
    hidden = model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
    num_inputs = len(hidden)
    hidden, positions, residual = hidden[:tokens], positions[:tokens], None
    rows = torch.arange(tokens, device=hidden.device)
    for layer in model.layers:
        hidden, residual = layer(positions, hidden, residual)
        if (survivors := survivors_of_layer()) is not None:
            hidden, residual, positions, rows = (
                tensor.index_select(0, survivors) for tensor in (hidden, residual, positions, rows)
            )
    hidden, _ = model.norm(hidden, residual)
    result = hidden.new_zeros(num_inputs, hidden.shape[1])
    return result.index_copy_(0, rows, hidden)


def thin_between_layers(
    model: Any, step: Callable[[], Step], policy: str, *, is_profiled: bool = False
) -> None:
    """Let the forward pass of `model` drop the tokens that the step's layout names. Idempotent.

    Args:
        step: returns the current step. policy: the policy's name, for messages.
        is_profiled: whether every forward pass, while vLLM measures its memory, is preceded by one
            of the same tokens through the loop here, until the next call.

    Raises:
        ValueError: the loop over the layers is not known for this model.
    """
    inner: Any = getattr(model, "model", None)
    if isinstance(inner, _ThinnedLayers):
        inner.kv_step, inner.kv_is_profiled = step, is_profiled
        return
    cls = type(inner)
    if f"{cls.__module__}.{cls.__qualname__}" not in _INNER:
        raise ValueError(refusal(policy, type(model).__name__))
    inner.__class__ = type(f"Thinned{cls.__name__}", (_ThinnedLayers, cls), {})
    inner.kv_step, inner.kv_is_profiled = step, is_profiled
    if not getattr(inner, "do_not_compile", True):
        logger.info("kv-policy %s: steps that thin a prompt run without torch.compile", policy)


def refusal(policy: str, model: str) -> str:
    """Return why a model cannot be served with a policy that thins prompts between layers."""
    return (
        f"policy {policy!r} drops tokens between layers of the forward pass, which is supported "
        f"for vLLM's {', '.join(_INNER.values())} models; this one is {model}: choose another "
        "policy, such as pyramidkv"
    )
