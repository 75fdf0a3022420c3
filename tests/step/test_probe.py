# SPDX-License-Identifier: Apache-2.0
"""Every preset passes the trial at start-up, and a class that returns the wrong thing does not."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import ClassVar, Literal

import pytest
import torch

from vllm_pyramid.methods.accumulated import AccumulatingScorer
from vllm_pyramid.policy import load_policy, policy_names
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.policy.selectors import Selector
from vllm_pyramid.step.probe import probe
from vllm_pyramid.step.scorer_inputs import ScorerInputs


class Returning(Scorer):
    """Scores as a test says."""

    kind: Literal["returning"] = "returning"
    what: ClassVar[object] = None

    def score(self, view: ScorerInputs) -> torch.Tensor:
        if isinstance(self.what, Exception):
            raise self.what
        return self.what  # type: ignore[return-value]


class Gathering(AccumulatingScorer):
    """Gathers what cannot be added up."""

    kind: Literal["gathering"] = "gathering"

    def observe(self, view: ScorerInputs) -> torch.Tensor:
        return torch.zeros(view.num_kv_heads, view.num_tokens, dtype=torch.float64)


class Choosing(Selector):
    """Selects as a test says."""

    kind: Literal["choosing"] = "choosing"
    what: ClassVar[object] = None

    def select(self, scores: torch.Tensor, keep: int) -> torch.Tensor:
        return self.what if isinstance(self.what, torch.Tensor) else torch.zeros(2, keep).long()


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("shape", [(6, 2, 16), (3, 3, 64), (10, 5, 32)])
def test_presets_pass(name: str, shape: tuple[int, int, int]) -> None:
    probe(load_policy(name), *shape)


class Mixing(Scorer):
    """Compares KV heads with one another, and says that it does not."""

    kind: Literal["mixing"] = "mixing"
    in_parts: ClassVar[bool] = True

    def score(self, view: ScorerInputs) -> torch.Tensor:
        norms = view.keys.norm(dim=-1)
        return norms - norms.mean(dim=0)


def test_a_scorer_that_mixes_heads_cannot_score_in_parts() -> None:
    policy = load_policy("keydiff").model_copy(update={"scorer": Mixing()})
    with pytest.raises(ValueError, match="'mixing' says `in_parts = True`, but gives a KV head"):
        probe(policy, 8, 4, 16)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (torch.zeros(2, 3), r"returned \[2, 3\] torch.float32: `score` must return a float32"),
        (torch.zeros(2, 46).double(), r"returned \[2, 46\] torch.float64"),
        (torch.full((2, 46), torch.nan), "returned NaN"),
        ([1.0], "returned a list"),
        (KeyError("x"), r"failed on a made-up request: KeyError: 'x'"),
    ],
)
def test_wrong_scores_are_one_sentence(what, message, monkeypatch) -> None:
    monkeypatch.setattr(Returning, "what", what)
    policy = load_policy("random", None, {"sinks": 2, "window": 4})
    policy = policy.model_copy(update={"scorer": Returning()})
    with pytest.raises(ValueError, match=message) as error:
        probe(policy, 6, 2, 16)
    assert "\n" not in str(error.value)


def test_what_is_gathered_is_tried_too() -> None:
    policy = load_policy("h2o").model_copy(update={"scorer": Gathering()})
    with pytest.raises(
        ValueError, match=r"the scorer 'gathering' returned \[2, 40\] torch.float64"
    ):
        probe(policy, 6, 2, 16)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (None, "returned wrong places"),  # one place again and again
        (torch.arange(26).repeat(2, 1) + 30, "returned wrong places"),  # behind the end
        (torch.arange(5).repeat(2, 1), r"returned \[2, 5\]: `select` must return \[G, keep\]"),
        (torch.arange(26.0).repeat(2, 1), "returned torch.float32"),
    ],
)
def test_wrong_selections_are_one_sentence(what, message, monkeypatch) -> None:
    monkeypatch.setattr(Choosing, "what", what)
    policy = load_policy("random", None, {"sinks": 2, "window": 4})
    policy = policy.model_copy(update={"selector": Choosing()})
    with pytest.raises(ValueError, match=message):
        probe(policy, 6, 2, 16)


class Undeclared(Scorer):
    """Looks at what it did not ask for."""

    kind: Literal["undeclared"] = "undeclared"
    what: ClassVar[str] = ""

    def score(self, view: ScorerInputs) -> torch.Tensor:
        if self.what == "queries":
            return view.reduce_groups(view.attention().sum(dim=1))
        if self.what == "ranks":
            return view.mean_of_heads(view.keys.norm(dim=-1)).expand(view.num_kv_heads, -1)
        return view.unrotated_queries(1).sum() + view.keys.norm(dim=-1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("queries", r"looks at 4 queries, .* has 1 .*: declare `needs_queries = True`"),
        ("rotary", "declare `needs_rotary = True`"),
        ("ranks", "declare `asks_ranks = True`"),
    ],
)
def test_what_a_class_does_not_declare_is_missed_here(what, message, monkeypatch) -> None:
    monkeypatch.setattr(Undeclared, "what", what)
    policy = load_policy("random", None, {"sinks": 2, "window": 4})
    policy = policy.model_copy(update={"scorer": Undeclared()})
    with pytest.raises(ValueError, match=rf"scorer 'undeclared' .*{message}"):
        probe(policy, 6, 2, 16)


FORKS = """
import os, torch
from vllm_pyramid.policy import load_policy
from vllm_pyramid.step.probe import probe

torch.set_num_threads(2)
probe(load_policy("snapkv-expected"), 8, 2, 128)
child = os.fork()
if child == 0:
    torch.randn(2_000_000).add(1).sum()  # in two threads
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.get_num_threads())
"""


@pytest.mark.long
def test_a_process_forked_afterwards_can_compute() -> None:
    """vLLM forks its engine core on CUDA; a pool of threads does not survive that."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["7", "2"]
