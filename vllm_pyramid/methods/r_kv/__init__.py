# SPDX-License-Identifier: Apache-2.0
"""Keep what is looked at and not said again, while a model thinks (R-KV, arXiv:2505.24133).

Made for long answers: with its preset prompts stay whole and shared, and the budget is one of what
is generated.

    computed tokens   n ........ n + 128 ........ n + 256 ...     n: the prompt
    a layer holds     n          + 128            n + budget + 128, back to n + budget ...

- **Where it differs from the authors' code.** That evicts prompts too; here `{"schedule.prompt":
  "evict"}` does. Evictions come every 128 tokens behind the prompt, theirs at multiples of 128.
  Their servers choose one set of tokens for all layers and heads; here each KV head chooses, as in
  their code for Transformers. Beside a prompt that stays, both parts of a score look at the answer
  alone.
- **Cost.** The last `window` queries of each request before an eviction are kept apart from the
  cache: `--max-num-seqs` x layers x `window` x heads x head size numbers. Redundancy compares all
  pairs of keys that may be evicted; on a CPU each pair once, and only until a similar key is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import WorkerContext, WorkerHooks
    from vllm_pyramid.step.scorer_inputs import ScorerInputs

_TILE = 128  # keys that the others are compared with at a time
_TINY = 1e-8  # beside the length of a key


class RKVScorer(Scorer):
    """R-KV: keep keys that are looked at and that no later key repeats.

    Scores a key by `mix * importance - (1 - mix) * redundancy` (arXiv:2505.24133). Importance is
    the mean over the window's queries of the softmax over the keys before the window, of the
    largest logit of the query heads of a group, max-pooled over `kernel_size` keys. Redundancy is a
    softmax over the keys of their mean cosine with the others of their head. Of the keys whose
    cosine with a key exceeds `threshold` the latest one is spared: that cosine does not count.

    Attributes:
        mix: the share of importance, the paper's lambda; 0.07 by default in the authors' code.
        kernel_size: keys that importance is pooled over; odd.
        threshold: of the cosine of similar keys.
    """

    in_parts: ClassVar[bool] = True
    keeps_queries: ClassVar[bool] = True
    kind: Literal["r_kv"] = "r_kv"
    mix: float = Field(default=0.1, ge=0, le=1)
    kernel_size: int = Field(default=7, ge=1)
    threshold: float = Field(default=0.5, ge=-1, le=1)

    @field_validator("kernel_size")
    @classmethod
    def _is_odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("kernel_size must be odd, so that a key is in the middle")
        return value

    def floats_per_key(self, policy: Policy, head_size: int, group: int) -> int:
        return 4 * head_size + (2 * group + 1) * policy.window + 4 * _TILE

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        past = inputs.num_tokens - inputs.window
        logits = inputs.reduce_groups(inputs.logits()[..., :past], "max")
        given = logits.softmax(dim=-1).mean(dim=1)
        half = self.kernel_size // 2
        importance = F.max_pool1d(given, self.kernel_size, stride=1, padding=half)
        redundancy = redundancy_of(inputs.keys, self.threshold)[:, :past]
        scores = self.mix * importance - (1 - self.mix) * redundancy
        return torch.cat([scores, scores.new_zeros(len(scores), inputs.window)], dim=1)

    @property
    def works_in_every_step(self) -> bool:
        return True

    @property
    def leaves_fronts(self) -> bool:
        return True

    def check(self, policy: Policy) -> None:
        super().check(policy)
        every = policy.schedule.every
        if policy.window < 1 or (every and policy.window > every):
            raise ValueError(
                f"policy {policy.name!r} scores with the last `window` queries before an eviction, "
                f"so `window` must be at least 1"
                + (f", and at most the interval, {every}" if every else "")
                + f", not {policy.window}"
            )
        if policy.chunk.tokens and policy.chunk.scorer in (None, self):
            raise ValueError(
                f"policy {policy.name!r} evicts inside the prompt (chunk.tokens), where r_kv keeps "
                "no queries: choose another chunk.scorer"
            )

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks | None:
        from vllm_pyramid.methods.r_kv.worker import RecentScores

        return RecentScores(policy, self, context)


def redundancy_of(keys: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return how much the keys of each head, `[G, T, D]`, repeat one another: `[G, T]`, sum 1.

    Without a table of all pairs: a key's sum of cosines is a product with the sum of all keys, and
    of a key's similar ones only the latest is looked for.
    """
    tokens = keys.shape[1]
    unit = keys / (keys.norm(dim=-1, keepdim=True) + _TINY)
    latest = latest_similar(unit, threshold)
    others = (unit * unit.sum(dim=1, keepdim=True)).sum(dim=-1) - unit.square().sum(dim=-1)
    partners = unit.gather(1, latest[..., None].expand_as(unit))
    spared = (unit * partners).sum(dim=-1)
    spared[:, 0].masked_fill_(latest[:, 0] == 0, 0.0)  # the first key is no other one to itself
    others.scatter_add_(1, latest, -spared)
    return (others / tokens).softmax(dim=-1)


def latest_similar(unit: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the place of the latest other key that is similar to each key of length 1: `[G, T]`.

    0 where there is none, as in the authors' code. The latest keys are looked at first. On a CPU
    two keys are compared once at most, and not if both have found one.
    """
    import torch

    heads, tokens = unit.shape[:2]
    latest = torch.zeros(heads, tokens, dtype=torch.int64, device=unit.device)
    for head, own in enumerate(unit):
        if unit.device.type == "cpu":
            _find_latest(own, threshold, latest[head])
            continue
        for end in range(tokens, 0, -_TILE):  # the host does not wait for an answer
            start = max(end - _TILE, 0)
            cosines = own @ own[start:end].T
            columns = torch.arange(start, end, dtype=torch.float32, device=unit.device)
            cosines[start:end].diagonal().fill_(-2.0)  # of keys with themselves
            found = torch.where(cosines > threshold, columns, 0.0).amax(dim=-1).long()
            latest[head] = torch.where(latest[head] > 0, latest[head], found)
    return latest


def _find_latest(own: torch.Tensor, threshold: float, latest: torch.Tensor) -> None:
    """Fill in what `latest_similar` returns of one head's keys, `[T, D]`.

    keys     0 ... start ... end    the tile's keys are compared with one another; those without
    tile           [         )      a similar one also with all before, those before that are
    seeking  x x x                  seeking with the tile: a product both have is made once
    """
    import torch

    places = torch.arange(len(own))
    seeking = torch.ones(len(own), dtype=torch.bool)  # keys before the tile: none found behind

    def note(cosines: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Note the latest similar column of each row; return which rows have one."""
        similar = cosines.amax(dim=-1) > threshold
        found = torch.where(cosines[similar] > threshold, columns, 0).amax(dim=-1)
        latest[rows[similar]] = torch.maximum(latest[rows[similar]], found)
        return similar

    for end in range(len(own), 0, -_TILE):
        start = max(end - _TILE, 0)
        rows, tile = places[start:end][seeking[start:end]], places[start:end]
        inside = own[rows] @ own[start:end].T
        inside[torch.arange(len(rows)), rows - start] = -2.0  # of keys with themselves
        lonely = rows[~note(inside, rows, tile)]
        before, passed = places[:start][seeking[:start]], places[:start][~seeking[:start]]
        if len(before):
            cosines = own[before] @ own[start:end].T
            seeking[before[note(cosines, before, tile)]] = False
            if len(lonely):
                note(cosines[:, lonely - start].T, lonely, before)
        if len(passed) and len(lonely):
            note(own[lonely] @ own[passed].T, lonely, passed)
