# SPDX-License-Identifier: Apache-2.0
"""Run a prompt and its answer by Transformers, and measure what each token gave to the answer.

Shape legend: T tokens of the prompt, N of the answer, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vllm_pyramid.methods.utility_profile import shape_of
from vllm_pyramid.policy import Policy
from vllm_pyramid.policy.allocator import Reals
from vllm_pyramid.step.output_factors import output_factors
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.step.scorer_inputs import ScorerInputs
from vllm_pyramid.tools.heads.model import HeadModel

_FUTURE = 1024  # positions beyond the model's own that scorers may rotate to


class _Layer:
    """What is kept of a layer while the model runs.

    Attributes:
        window: `[W, H, D]` queries of the prompt's last tokens. later: `[H, 1, D]` of each token of
            the answer. keys, values: `[G, T + N, D]`.
    """

    window: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        self.later: list[torch.Tensor] = []


class UtilityModel(HeadModel):
    """A model of Transformers whose layers all have plain attention and an output projection.

    Attributes:
        shape: its sizes in words.

    Raises:
        ValueError: it cannot be loaded, or its layers do not all have plain attention.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        config = self._model.config
        self.shape = shape_of(config.get_text_config())
        projections: list[Any] = [getattr(module, "o_proj", None) for module in self._attentions]
        if None in projections:
            raise ValueError(f"{name}: the output projections of its layers were not found")
        shape = (self.heads, -1)
        self._scale = 1.0
        self._turns: Rotary | None = None
        with torch.inference_mode():
            self._outputs = [
                output_factors(linear.weight.unflatten(1, shape).transpose(0, 1))
                for linear in projections
            ]

    def prepare(self, policy: Policy) -> None:
        """Find what the policy's scorer needs of the model, before `gains`.

        Raises:
            ValueError: it needs the rotary embedding, which was not found.
        """
        if not policy.scorer.needs_rotary:
            return
        try:
            turns = self._rotary(self.longest + _FUTURE)
        except ValueError as error:
            raise ValueError(
                f"policy {policy.name!r} has the scorer {policy.scorer.kind!r}, which needs the "
                "rotary embedding, and this model's was not found: choose another policy"
            ) from error
        self._turns = replace(turns, cos_sin=turns.cos_sin.to(self._model.device))

    @torch.inference_mode()
    def gains(self, ids: Sequence[int], policy: Policy, horizon: int) -> Reals:
        """Return the utilities of each layer's tokens in the scorer's order: `[L, C]` float64.

        Place i has the sum over the KV heads of what the token in place i of each was worth, since
        a layer's heads keep equally many tokens.

        Call `prepare` with the policy first.

        Args:
            ids: the prompt; longer than the policy's window and sinks.
            horizon: tokens of the answer at most, which the model itself continues with.
        """
        layers = self._answered(ids, max(policy.window, 1), horizon)
        return np.stack([self._gains_of(i, layer, policy, len(ids)) for i, layer in layers.items()])

    def _gains_of(self, index: int, layer: _Layer, policy: Policy, tokens: int) -> Reals:
        keys, values = layer.keys.float(), layer.values.float()
        later = torch.cat(layer.later, dim=1).float()
        worth = utilities(later, keys, values, self._outputs[index], self._scale, tokens)
        inputs = self._inputs(index, layer.window, keys[:, :tokens], values[:, :tokens], policy)
        scores = policy.scorer.score_parts(inputs)
        context = slice(policy.sinks, tokens - policy.window)
        order = scores[:, context].sort(dim=1, descending=True, stable=True).indices
        gains: Reals = worth[:, context].gather(1, order).sum(dim=0).cpu().double().numpy()
        return gains

    def _answered(self, ids: Sequence[int], window: int, horizon: int) -> dict[int, _Layer]:
        """Let the model answer a prompt over its whole cache."""
        layers: dict[int, _Layer] = {index: _Layer() for index in range(self.layers)}

        def attend(
            index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
        ) -> torch.Tensor:
            layer, self._scale = layers[index], float(scale)
            if q.shape[2] > 1:
                layer.window = q[0, :, -window:].transpose(0, 1)
            else:
                layer.later.append(q[0])
            layer.keys, layer.values = k[0], v[0]
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=True
            )

        ends = self._model.generation_config.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        self._attend = attend
        cache, step = None, list(ids)
        try:
            for _ in range(horizon + 1):
                output = self._model(
                    input_ids=torch.tensor([step], device=self._model.device),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                if len(step) == 1 and step[0] in ends:
                    break
                cache, step = output.past_key_values, [int(output.logits[0, -1].argmax())]
        finally:
            self._attend = None
        return layers

    def _inputs(
        self,
        index: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        policy: Policy,
    ) -> ScorerInputs:
        """Return what a scorer gets in the engine at the prompt's end."""
        return ScorerInputs.of_tensors(
            queries.float(),
            keys,
            values,
            window=policy.window,
            sinks=policy.sinks,
            layer=index,
            num_layers=self.layers,
            scale=self._scale,
            rotary=self._turns,
            knows_rotary=policy.scorer.needs_rotary,
            output=self._outputs[index] if policy.scorer.needs_output else None,
            asks_ranks=policy.scorer.asks_ranks,
        )


def utilities(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    outputs: torch.Tensor,
    scale: float,
    tokens: int,
) -> torch.Tensor:
    """Return LU-KV's oracle importance of each token of a prompt: `[G, T]`.

    For a query head that is `max_k A[k, j] ||v_j W_O||` over the answer's tokens k: the most that
    token j gave to the output in any of its steps, over the whole cache. A KV head has the sum over
    its query heads.

    Args:
        queries: `[H, N, D]` of the answer. keys, values: `[G, T + N, D]`.
        outputs: `[H, K, D]`, see `output_factors`. scale: of the logits. tokens: T.
    """
    heads, steps, _ = queries.shape
    grouped = queries.unflatten(0, (len(keys), -1))
    logits = torch.einsum("gqnd,gtd->gqnt", grouped, keys) * scale
    own = torch.arange(tokens, tokens + steps, device=keys.device)[:, None]
    hidden = torch.arange(keys.shape[1], device=keys.device) > own
    most = logits.masked_fill_(hidden, -torch.inf).softmax(dim=-1)[..., :tokens].amax(dim=2)
    per_head = outputs.unflatten(0, (len(keys), -1))
    sizes = torch.stack(
        [
            torch.einsum("qkd,td->qtk", factors, own_values).norm(dim=-1)
            for factors, own_values in zip(per_head, values[:, :tokens], strict=True)
        ]
    )
    assert sizes.shape == most.shape == (len(keys), heads // len(keys), tokens)
    return (most * sizes).sum(dim=1)
