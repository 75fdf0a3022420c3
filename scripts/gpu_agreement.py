# SPDX-License-Identifier: Apache-2.0
"""What can be demanded of two greedy answers on a GPU, for the stages of scripts/gpu_check.py.

Two runs that compute the same may add up in another order: rows are split into other parts, chunks
of prompts are cut elsewhere, one side replays a graph. In bfloat16 that moves log probabilities by
some hundredths, and where two tokens are nearly as likely the answers part, for good. So equal
tokens cannot be demanded. These can: as far as the answers are the same, the log probability of
each token is the same up to a tolerance; and where they part, each side holds the other's token
for as likely as its own, up to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Nats; a table, a length or a row that is wrong moves a random model's answers by far more.
TOLERANCE = {"bfloat16": 0.15, "float32": 0.02}
# Tokens whose log probabilities the stages ask for: where answers part, the other's is among them.
LOGPROBS = 5

Answer = tuple[Sequence[int], Sequence[dict[int, float]]]  # tokens; of each place, likely tokens


@dataclass
class Agreement:
    """Of pairs of answers.

    Attributes:
        tokens: of the first sides. compared: of them, up to where the answers part.
        parted: answers that part. furthest: the largest difference that was found, in nats.
    """

    tokens: int = 0
    compared: int = 0
    parted: int = 0
    furthest: float = 0.0

    def as_data(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "share_of_tokens_compared": self.compared / max(self.tokens, 1),
            "answers_that_part": self.parted,
            "largest_difference_nats": self.furthest,
        }


def agreement(
    ones: Sequence[Answer],
    others: Sequence[Answer],
    tolerance: float,
    *,
    first: int | None = None,
) -> Agreement:
    """Compare answers to the same prompts.

    Args:
        first: tokens of each that are to agree; None: all of them.

    Raises:
        RuntimeError: they differ by more than `tolerance`, with the request and the place.
    """
    found = Agreement()
    for request, (one, other) in enumerate(zip(ones, others, strict=True)):
        tokens = list(zip(*one, *other, strict=True))[:first]
        found.tokens += len(tokens)
        for place, (mine, likely, theirs, other_likely) in enumerate(tokens):
            where = f"request {request}, token {place}: {mine} and {theirs}"
            found.compared += 1
            gaps = []
            if mine == theirs:
                gaps.append(abs(likely[mine] - other_likely[mine]))
            else:
                for own, token, side in ((mine, theirs, likely), (theirs, mine, other_likely)):
                    if token not in side:
                        raise RuntimeError(f"{where}; neither is likely to the other: {side}")
                    gaps.append(abs(side[own] - side[token]))
                found.parted += 1
            found.furthest = max(found.furthest, *gaps)
            if max(gaps) > tolerance:
                raise RuntimeError(f"{where} differ by {max(gaps):.3g} nats, {tolerance} allowed")
            if mine != theirs:
                break
    return found
