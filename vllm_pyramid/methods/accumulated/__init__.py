# SPDX-License-Identifier: Apache-2.0
"""Scorers whose evidence is gathered in every step, so that they can evict at any time.

`gather.py` keeps a pool of what the queries so far gave each key: 4 bytes a token, layer and KV
head. A scorer says what one step's queries add (`observe`), or names a kernel that adds it.

With the schedule `interval` the cache of a request stays bounded however long the answer gets:

    computed tokens   n ........ n + i ........ n + 2 i ...       n: the prompt, i: `interval`
    a layer holds     budget     + i, back to the budget, + i, back to the budget ...

- **Prompts.** With `{"schedule.prompt": "keep"}` they stay whole beside the budget and are shared;
  sums of prompts are then not gathered.
- **Budget.** It is a number of tokens by default; a share is one of the prompt. Survivors move up
  and keep their positions. A preempted request evicts at the same points again. The report of a
  response is that of the latest eviction, which `computed_tokens` dates.
- **`h2o`.** Half of the tokens are the most recent ones (`recent`), the others the best. The paper
  evicts one token for each that comes: `{"interval": 1, "fill_blocks": false}`, on the CPU.
- **`scissorhands`.** Counts begin again at each eviction, so `queries` is at most `interval`. The
  paper's B is the most that is held, here budget + `interval`; its m is `interval`.
- **Cost.** 4 bytes a token, layer and KV head, out of the cache's memory. In each step the softmax
  once more without V: one pass over K, on CUDA two. On CUDA there are no full graphs for decode
  steps, and `FULL` is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import WorkerContext, WorkerHooks
    from vllm_pyramid.step.scorer_inputs import ScorerInputs


class AccumulatingScorer(Scorer):
    """Base of the scorers whose evidence is gathered in every step, prefill and generation alike.

    Class attributes:
        mass_kind: what is added up: `kind` of the kernel `add_key_mass`; None: what `observe`
            returns.
        sign: 1 where the greatest sums are kept, -1 where the smallest are.
        starts_over: an eviction sets the sums to zero instead of moving them with their keys.
    """

    mass_kind: ClassVar[str | None] = None
    sign: ClassVar[float] = 1.0
    starts_over: ClassVar[bool] = False
    asked: ClassVar[str] = "observe"

    def gathers(self, policy: Policy) -> bool:
        return True

    @property
    def copies_keys(self) -> bool:
        """Whether `observe` is asked, which sees copies, and not a kernel."""
        return self.mass_kind is None

    def observe(self, inputs: ScorerInputs) -> torch.Tensor:
        """Return what the queries of a step add to each key's sum: `[G, T]` float32.

        `inputs.queries` are those of the step that count; none of them is missing.
        """
        raise NotImplementedError

    def probed(self, inputs: ScorerInputs) -> torch.Tensor | None:
        return None if self.mass_kind is not None else self.observe(inputs)

    @property
    def works_in_every_step(self) -> bool:
        return True

    @property
    def unsupported(self) -> Unsupported:
        return {
            Feature.PREFIX_CACHING: (
                "it adds up what all queries of a request give each key, and a shared prefix comes "
                "without these sums"
            )
        }

    @property
    def leaves_fronts(self) -> bool:
        return True

    @classmethod
    def check_class(cls) -> None:
        if cls.mass_kind is None and cls.observe is AccumulatingScorer.observe:
            raise ValueError(
                f"the scorer {cls.__module__}:{cls.__qualname__} has no method "
                "`observe(self, inputs)`"
            )

    def check(self, policy: Policy) -> None:
        super().check(policy)
        every = policy.schedule.every
        if every and self.history is not None and self.history > every:
            raise ValueError(
                f"policy {policy.name!r} looks back over {self.history} queries but evicts every "
                f"{every} tokens: a history window must not reach beyond the eviction before"
            )

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks | None:
        from vllm_pyramid.methods.accumulated.gather import KeyMass

        return KeyMass(policy, self, context)


class AccumulatedAttentionScorer(AccumulatingScorer):
    """H2O: keep the heavy hitters, the keys with the most attention so far.

    Scores a key by its softmax probabilities, summed over all queries since it was written (its own
    and those of the prompt included) and over the query heads of the KV head (arXiv:2306.14048,
    section 4). It has no parameters.
    """

    kind: Literal["accumulated_attention"] = "accumulated_attention"
    mass_kind: ClassVar[str | None] = "sum"


class PersistenceScorer(AccumulatingScorer):
    """Scissorhands: keep the keys that were seldom below the average attention of late.

    For each of the last `queries` queries before an eviction, a key counts 1 for every query head
    of its KV head that gives it less than 1 / t of its attention, where the query sees t keys. The
    keys with the smallest counts stay (arXiv:2305.17118, section 4: the counter of low scores of
    its algorithm, over its history window).

    Attributes:
        queries: length of the history window; not longer than the interval between evictions.
    """

    kind: Literal["persistence"] = "persistence"
    queries: int = Field(default=128, ge=1)

    mass_kind: ClassVar[str | None] = "below_average"
    sign: ClassVar[float] = -1.0
    starts_over: ClassVar[bool] = True

    @property
    def history(self) -> int | None:
        return self.queries
