# SPDX-License-Identifier: Apache-2.0
"""Between two layers of vLLM's models, rows leave.

Target: the class of a model's inner module (`model.model`), its `layers`, `norm` and
`embed_input_ids`. Why: the loop over the layers is inside `forward`, which is compiled as a whole
for every number of tokens that enter it, and has no hook between two layers. In steps in which a
prompt is thinned the loop below takes its place, uncompiled; all other steps go vLLM's way. Remove
when models call a hook between layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm_pyramid.step.step import Step, StepLayout

logger = init_logger(f"vllm.{__name__}")

# The inner modules whose `forward` is: embed, layers(positions, hidden states, residual), norm.
_INNER = {
    "vllm.model_executor.models.llama.LlamaModel": "Llama",
    "vllm.model_executor.models.mistral.MistralModel": "Mistral",
    "vllm.model_executor.models.qwen2.Qwen2Model": "Qwen2",
    "vllm.model_executor.models.qwen3.Qwen3Model": "Qwen3",
}
# Architectures of checkpoints that vLLM serves with them.
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
    """Goes in front of an inner module's class.

    Attributes:
        kv_step: gives the current step.
        kv_is_profiled: whether vLLM is measuring what its largest step takes.
    """

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
            _forward(self, *_all_survive(positions), input_ids, positions, inputs_embeds)
        if layout is None:
            return super().__call__(  # type: ignore[misc]
                input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds, **kwargs
            )
        assert intermediate_tensors is None and not kwargs, "refused at start-up"
        tokens = int(layout.query_starts[0, -1])
        return _forward(self, tokens, partial(_take, layout), input_ids, positions, inputs_embeds)


def _take(layout: StepLayout) -> torch.Tensor | None:
    """What survives the layer that has just run, once."""
    survivors, layout.survivors = layout.survivors, None
    return survivors


def _all_survive(positions: torch.Tensor) -> tuple[int, Callable[[], torch.Tensor]]:
    """Of a step that takes as much memory as any: all rows of all layers are gathered."""
    tokens = len(positions)
    return tokens, partial(torch.arange, tokens, device=positions.device)


def _forward(
    model: Any,
    tokens: int,
    survivors_of_layer: Callable[[], torch.Tensor | None],
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    inputs_embeds: torch.Tensor | None,
) -> torch.Tensor:
    """Hidden states of the step's tokens; zeros for those that left on the way, and for padding.

    Logits are taken of each request's last token alone, which never leaves.

    Args:
        tokens: of the step; what is behind them in the inputs is padding.
        survivors_of_layer: called behind each layer; see `StepLayout.survivors`.
    """
    hidden = model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
    entered = len(hidden)
    hidden, positions, residual = hidden[:tokens], positions[:tokens], None
    rows = torch.arange(tokens, device=hidden.device)
    for layer in model.layers:
        hidden, residual = layer(positions, hidden, residual)
        if (survivors := survivors_of_layer()) is not None:
            hidden, residual, positions, rows = (
                of_all.index_select(0, survivors) for of_all in (hidden, residual, positions, rows)
            )
    hidden, _ = model.norm(hidden, residual)
    result = hidden.new_zeros(entered, hidden.shape[1])
    return result.index_copy_(0, rows, hidden)


def thin_between_layers(
    model: Any, step: Callable[[], Step], policy: str, *, is_profiled: bool = False
) -> None:
    """Let rows leave the forward pass of `model` as the step's layout says. Idempotent.

    Args:
        step: gives the current step. policy: its name, for messages.
        is_profiled: until the next call every forward pass, whose memory vLLM measures, is
            preceded by one of the same tokens through the loop here.

    Raises:
        ValueError: vLLM's code for this model has another loop over its layers.
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
        logger.info(
            "kv-policy %s: steps that thin a prompt run without torch.compile, all others with it",
            policy,
        )


def refusal(policy: str, model: str) -> str:
    """Why a model cannot be served with a policy that thins prompts between layers."""
    return (
        f"policy {policy!r} lets tokens leave the forward pass between layers, which is built for "
        f"vLLM's {', '.join(_INNER.values())} models; this one is {model}: choose another policy, "
        "such as pyramidkv"
    )
