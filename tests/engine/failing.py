# SPDX-License-Identifier: Apache-2.0
"""A user's policy whose parts fail for prompts of some lengths, in a module of its own."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

# A prompt's length says what fails. Those that fail in a worker have blocks to give back.
MODULE = """
import os

import numpy as np
import torch

from vllm_pyramid.policy.allocator import CurveAllocator
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.step.hooks import SchedulerHooks

WINDOW_AND_SINKS = 6


class Cursed(Scorer):
    def score(self, view):
        scores = view.keys.float().norm(dim=-1)
        if view.prompt_len == 103:
            scores[0, 50] = torch.nan
        if view.prompt_len == 153:
            raise KeyError("a scorer of the user's own")
        if view.prompt_len == 163:
            return scores[:, 1:]
        if view.prompt_len == 193 and view.first_kv_head > 0:
            raise KeyError("on the second rank alone")
        return scores


class Asking(Cursed):
    asks_ranks = True

    def score(self, view):
        scores = super().score(view)
        return view.mean_of_heads(scores).expand(view.num_kv_heads, -1)


class Fussy(CurveAllocator):
    def curve(self, mean, num_layers, capacity):
        if capacity + WINDOW_AND_SINKS == 173:
            raise LookupError("an allocator of the user's own")
        return np.full(num_layers, float(mean))

    def scheduler_hooks(self, policy, num_layers):
        return Curious()


class Curious(SchedulerHooks):
    name = "curious"

    def on_request_added(self, request_id, salt, application, plan):
        if plan.prompt_len == 183:
            raise OSError("a hook when a request comes")

    def on_eviction(self, request_id, plan, resolved):
        if plan.prompt_len == 203:
            raise OSError("a hook when a request was evicted from")
"""
POLICY = """
budget: 40
window: 4
sinks: 2
scorer: "cursed_methods:{scorer}"
allocator: "cursed_methods:Fussy"
"""
NAN, RAISES, SHAPE, ALLOCATOR, ONE_RANK, ADDED, EVICTED = 103, 153, 163, 173, 193, 183, 203
# By length, what the client is told.
REASONS = {
    NAN: "gave NaN or infinity, which cannot be ranked",
    RAISES: 'KeyError: "a scorer of the user\'s own"',
    SHAPE: "must return a float32 tensor",
    ALLOCATOR: "LookupError: an allocator of the user's own",
    ADDED: "OSError: a hook when a request comes",
    EVICTED: "a hook when a request was evicted from",
}
HONEST = [110, 140, 61]


def write_module(folder: Path, patched: pytest.MonkeyPatch) -> None:
    """Write the module and its policies, and let this process and those that it starts find it."""
    (folder / "cursed_methods.py").write_text(textwrap.dedent(MODULE))
    for name in ("Cursed", "Asking"):
        (folder / f"{name.lower()}.yaml").write_text(POLICY.format(scorer=name))
    patched.syspath_prepend(folder)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
