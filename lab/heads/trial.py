# SPDX-License-Identifier: Apache-2.0
"""What a mask of heads costs a model, next to random masks of as many heads.

*Copies*: random tokens come twice, further apart than a streaming head sees; of the second copy's
last tokens, how many are the model's greedy choice. *Texts*: at the last tokens of the user's own,
how often the greedy choice is that of whole attention, and how far the distributions diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lab.heads.model import HeadModel
from lab.heads.probe import Repeated, retrieval_heads
from lab.heads.scores import HeadScores

LAST = 256  # tokens of a copy or text that are looked at
RANDOM = 3  # random masks


@dataclass(frozen=True)
class Trial:
    """What was measured with one way of attending; the texts' figures are None without texts.

    Attributes:
        copied: share of the second copy's tokens that are the greedy choice.
        agreement: share of the texts' tokens with the greedy choice of whole attention.
        divergence: from whole attention (Kullback-Leibler), mean nats a token.
    """

    copied: float
    agreement: float | None
    divergence: float | None


def copies(scores: HeadScores) -> Repeated:
    """Return two copies, each twice as long as what a streaming head sees, and not short."""
    return Repeated(max(2 * (scores.sinks + scores.recent), LAST + 2), 2)


def check_texts(texts: Sequence[Sequence[int]], scores: HeadScores, model: HeadModel) -> None:
    """Raise ValueError for a text that masks cannot change, or that the model cannot read."""
    least = scores.sinks + scores.recent + LAST
    for number, ids in enumerate(texts, start=1):
        if not least <= len(ids) <= model.longest or not max(ids) < model.vocabulary:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens: from {least} (sinks, recent tokens and "
                f"{LAST} that are looked at) to {model.longest} are needed, ids below "
                f"{model.vocabulary}"
            )


def random_masks(mask: torch.Tensor) -> list[torch.Tensor]:
    """Return `RANDOM` masks of as many heads, the same ones each time."""
    source = torch.Generator().manual_seed(0)
    count = int(mask.sum())
    return [retrieval_heads(torch.rand(mask.shape, generator=source), count) for _ in range(RANDOM)]


def try_masks(
    model: HeadModel,
    scores: HeadScores,
    masks: Sequence[torch.Tensor | None],
    texts: Sequence[Sequence[int]],
    on_run: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Measure each mask; None is whole attention.

    Args:
        texts: token ids, which `check_texts` has seen.
        on_run: called after each run of the model.
    """
    sequence = copies(scores).tokens(model.ordinary_ids(), seed=1)
    following = torch.tensor(sequence[-LAST:])

    def run(ids: Sequence[int], mask: torch.Tensor | None) -> torch.Tensor:
        found = model.logits(ids, LAST + 1, mask, scores)[:-1]  # each says what follows it
        on_run()
        return found

    copied = [
        (run(sequence, mask).argmax(-1) == following).double().mean().item() for mask in masks
    ]
    if not texts:
        return [Trial(share, None, None) for share in copied]
    figures = torch.zeros(len(masks), 2, dtype=torch.float64)
    for ids in texts:
        whole = run(ids, None)
        for row, mask in enumerate(masks):
            figures[row] += _compared(whole, whole if mask is None else run(ids, mask))
    pairs = (figures / len(texts)).tolist()
    return [Trial(share, *pair) for share, pair in zip(copied, pairs, strict=True)]


def _compared(whole: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return agreement and divergence, `[2]`, of two `[tokens, vocabulary]` logits."""
    same = (whole.argmax(-1) == logits.argmax(-1)).double().mean()
    p, q = whole.double().log_softmax(-1), logits.double().log_softmax(-1)
    return torch.stack([same, (p.exp() * (p - q)).sum(-1).mean()])
