# SPDX-License-Identifier: Apache-2.0
"""Blocks that stay in place at evictions, and where they stand in their tables afterwards.

    positions   0 ... in place ......... skip .................. end of the prompt
    before      [ front       ][ others                        ]
    after       [ not read              ][ front       ][ survivors ]

The scheduler moves the same blocks in its tables when it gives the head back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_pyramid.step.step import Step


class FrontMove(NamedTuple):
    """A request whose tables change behind an eviction.

    Each layer's table skips `before` tokens, `[L]`, until the eviction, and `skip` behind it;
    `in_place` tokens of whole blocks stand behind these.
    """

    request_id: str
    before: npt.NDArray[np.int32]
    skip: npt.NDArray[np.int32]
    in_place: int


def front_moves(step: Step) -> list[FrontMove]:
    """Return the moves that a step's evictions ask for, which hold from the next step on."""
    evictions, moves = step.evictions, list[FrontMove]()
    for index, row in enumerate([] if evictions is None else evictions.rows.tolist()):
        plan = step.requests[row].plan
        if evictions is not None and plan.in_place and plan.evicts:
            before = evictions.previous_skips[:, index]
            skip = plan.skip_after(evictions.eviction_numbers[index])
            moves.append(FrontMove(step.requests[row].request_id, before, skip, plan.in_place))
    return moves
