# SPDX-License-Identifier: Apache-2.0
"""What all kinds of `heads` that give KV heads lengths of their own have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from vllm_pyramid.methods.observation_window import ObservationWindowScorer
from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.heads import Heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pyramid.policy.policy import Policy


RANKS = (Feature.TENSOR_PARALLEL, Feature.PIPELINE, Feature.DATA_PARALLEL)


class HeadLengths(Heads):
    """Base class of kinds that give each KV head a block table and a length of its own.

    Class attributes:
        plain: kinds that other sections must have, with which lengths of heads were tried.
        on_cuda: whether it was rehearsed with the attention of CUDA devices, and is served there.
    """

    splits: ClassVar[bool] = True
    on_cuda: ClassVar[bool] = False
    plain: ClassVar[Mapping[str, str]] = {
        "allocator": "uniform",
        "selector": "top_k",
        "schedule": "prompt_end",
        "values": "device",
        "attend": "all",
    }

    def check_parts(self, policy: Policy) -> None:
        for section, kind in self.plain.items():
            if (found := getattr(policy, section).kind) != kind:
                raise ValueError(
                    f"policy {policy.name!r} has heads of kind {self.kind!r}, which go with "
                    f"{section} {kind!r} alone so far, not {found!r}: leave {section} out"
                    + (f", but for scorer: {kind}" if section == "scorer" else "")
                )

    def check_scorer(self, policy: Policy) -> None:
        scorer, reason = policy.scorer, None
        if not scorer.evicts:
            reason = "ranks nothing"
        elif scorer.works_in_every_step or scorer.gathers(policy):
            reason = "gathers numbers in every step, which have one place for each layer"
        elif scorer.asks_ranks:
            reason = "looks at all KV heads of a layer together"
        elif not (scorer.in_parts or isinstance(scorer, ObservationWindowScorer)):
            reason = "does not say that it looks at each KV head by itself (`in_parts`)"
        if reason is not None:
            raise ValueError(
                f"policy {policy.name!r} gives each KV head a length of its own (heads), and its "
                f"scorer {scorer.kind!r} {reason}: choose another, such as observation_window"
            )

    @property
    def unsupported(self) -> Unsupported:
        untried = "it was not tried with KV heads that have lengths of their own"
        alone = (*RANKS, Feature.DRAFTS, Feature.TRACE)
        places = (Feature.CUDA, Feature.SECOND_RUNNER)
        return {
            Feature.OTHER_LAYERS: (
                "each KV head has a length of its own, which goes with models of which every layer "
                "has full attention and a cache of its own alone so far"
            ),
            Feature.DRAFT_MODEL: untried,
            Feature.CACHE_OF_8_BITS: untried,
            **{(one, place): untried for place in places for one in alone},
            **({} if self.on_cuda else {Feature.CUDA: "it was not rehearsed there"}),
        }

    def check_config(self, policy: Policy, config: VllmConfig) -> None:
        model, parallel = config.model_config, config.parallel_config
        self.check_shape(
            model.get_total_num_hidden_layers(),
            model.get_total_num_kv_heads(),
            model.get_num_attention_heads(parallel) * parallel.tensor_parallel_size,
        )
