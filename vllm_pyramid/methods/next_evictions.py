# SPDX-License-Identifier: Apache-2.0
"""At which tokens the requests of a step come to their next eviction, for what is gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.policy.scorer import Scorer
    from vllm_pyramid.step.step import Numbers, Step


def next_evictions(
    step: Step, policy: Policy, scorer: Scorer, *, inside: bool
) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """Return the tokens, `[R]`, computed at each request's next eviction by a scorer, and if any.

    One that the step itself comes to counts. `inside`: the scorer scores inside prompts alone.
    """
    inner = step.next_inner_eviction()
    if inside:
        return inner, step.evicting & (inner >= 0)
    # Evictions at the prompt's end and behind it.
    past = np.maximum(step.eviction_numbers - step.inner_evictions, 0)
    if policy.schedule.keeps_prompts:
        past = np.maximum(past, 1)
    point = step.prompt_lens + past * step.intervals
    if policy.inner_policy is not None and policy.inner_policy.scorer == scorer:
        point = np.where(inner >= 0, inner, point)
    return point, step.evicting & ((past == 0) | (step.intervals > 0))
