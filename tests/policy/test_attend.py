# SPDX-License-Identifier: Apache-2.0
"""The section `attend`: what is read of a cache, what a request may change, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from vllm_pyramid.methods.pages import SelectPages
from vllm_pyramid.methods.pages.summaries import try_scorer
from vllm_pyramid.policy import Budget, Policy, load_policy
from vllm_pyramid.policy.attend import ALL_PAGES
from vllm_pyramid.policy.kinds import built_in_kinds, parse_component
from vllm_pyramid.policy.page_scorer import PageScorer
from vllm_pyramid.policy.request import check_request, for_request

SIZE = 16


def _part(policy: Policy) -> SelectPages:
    assert isinstance(policy.attend, SelectPages)
    return policy.attend


def _attend(**fields: Any) -> SelectPages:
    return _part(load_policy("select", args={"attend": fields}))


def test_pages_of_a_budget() -> None:
    part = _attend(budget=1024, dense_layers=2, sinks=16, recent=64)
    pages = part.pages(8192, 8, SIZE)
    assert pages.dtype == np.int32 and pages.tolist() == [ALL_PAGES] * 2 + [64] * 6
    assert part.pages(100, 8, SIZE)[2:].tolist() == [64] * 6, "a number holds for short prompts"
    share = _attend(budget="12%", min_tokens=0)
    assert share.pages(8192, 8, SIZE)[2:].tolist() == [62] * 6  # 983.04 tokens
    assert share.pages(10, 8, SIZE)[2:].tolist() == [7] * 6, "sinks, recent pages and one more"
    assert _attend(budget="12%").pages(100, 8, SIZE)[2:].tolist() == [16] * 6, "the floor: 256"
    assert (_attend(budget="100%").pages(100, 8, SIZE) == ALL_PAGES).all()
    assert part.sink_pages(SIZE) == 1 and part.recent_pages(SIZE) == 5
    assert _attend(sinks=0, recent=0).recent_pages(SIZE) == 1, "a query's own page"
    # Equal calls share their result, which no caller may change.
    assert part.pages(8192, 8, SIZE) is pages
    with pytest.raises(ValueError, match="read-only"):
        pages[0] = 1


@given(
    budget=st.integers(81, 4000),
    prompt=st.integers(1, 8000),
    layers=st.integers(3, 40),
    kind=st.sampled_from(["uniform", "arithmetic"]),
)
def test_a_pyramid_reads_its_mean(budget: int, prompt: int, layers: int, kind: str) -> None:
    """Layers share the budget as an allocator says; rounding up to pages adds less than one."""
    part = _attend(budget=budget, allocator=kind)
    pages = part.pages(prompt, layers, SIZE)[2:].astype(np.int64)
    least = 1 + 5 + 1
    assert (pages >= least).all() and (np.diff(pages) <= 0).all()
    floors = pages[pages > least]
    assert floors.sum() * SIZE <= budget * len(pages) + len(pages) * SIZE
    assert pages.sum() * SIZE >= budget * len(pages)


def test_a_request_has_a_budget_of_its_own() -> None:
    policy = load_policy("select")

    def asking(**extra: Any) -> Policy:
        served = check_request(policy, SamplingParams(extra_args=extra))
        assert for_request(policy, extra) == served
        return served.policy

    assert asking() == policy
    for value, meant in ((512, 512), ("512", 512), ("6%", "6%"), ("100%", "100%")):
        part = asking(kv_attend_budget=value).attend
        assert isinstance(part, SelectPages) and part.budget.value == meant
        assert part == policy.attend.model_copy(update={"budget": Budget.parse(value)})
    assert asking(kv_attend_budget=512) is asking(kv_attend_budget="512"), "made once"
    for value in (0, -1, "0%", "101%", 1.5, True, "x", [512]):
        with pytest.raises(ValueError, match="kv_attend_budget of the request: budget"):
            asking(kv_attend_budget=value)
    with pytest.raises(ValueError, match=r"80 tokens is too small.* give at least 81"):
        asking(kv_attend_budget=80)
    assert not asking(kv_policy="full").attend.selects
    why = r"kv_attend_budget has no effect on policy .*attends to everything that it keeps"
    with pytest.raises(ValueError, match=why):
        asking(kv_attend_budget=512, kv_policy="full")
    with pytest.raises(ValueError, match=why):
        check_request(load_policy("snapkv"), SamplingParams(extra_args={"kv_attend_budget": 512}))
    with pytest.raises(ValueError, match=r"kv_top_n has no effect .*keeps V on the device"):
        asking(kv_top_n=4)
    both = check_request(
        load_policy("select-evicted"),
        SamplingParams(extra_args={"kv_budget": "30%", "kv_attend_budget": "6%"}),
    )
    assert both.budget == Budget.parse("30%")
    assert _part(both.policy).budget == Budget.parse("6%")


@pytest.mark.parametrize(
    ("preset", "args", "message"),
    [
        ("h2o", {}, "a key that is not read gets no score"),
        ("pyramidinfer", {}, "selecting was not tried"),
        ("kcache", {}, "keeps V in host memory"),
        ("select", {"attend.budget": 80}, "give at least 81"),
        ("select", {"attend.scorer": "boxes"}, r"unknown attend.scorer kind 'boxes' \(did you "),
    ],
)
def test_what_cannot_select(preset: str, args: dict[str, Any], message: str) -> None:
    given = args if preset in ("select", "full") else {"attend": "pages", **args}
    with pytest.raises(ValueError, match=message):
        load_policy(preset, args=given)


def test_a_model_must_have_layers_that_select() -> None:
    policy = load_policy("select")
    policy.check_layers(3)
    with pytest.raises(ValueError, match=r"the model has 2.*lower `dense_layers`"):
        policy.check_layers(2)
    shares = load_policy(
        "select", args={"attend.allocator": {"kind": "shares", "shares": [2.0, 1.0]}}
    )
    shares.check_layers(4)
    assert shares.attend.pages(4096, 4, SIZE)[2] > shares.attend.pages(4096, 4, SIZE)[3]
    with pytest.raises(ValueError, match="2 layers"):
        shares.check_layers(5)


# Page scorers -------------------------------------------------------------------------------------

MODULE = '''
import torch

from vllm_pyramid.policy.page_scorer import PageScorer


class First(PageScorer):
    """The first key of a page stands for it."""

    power: float = 1.0

    def summarise(self, keys):
        return keys[:, :, 0] ** self.power

    def extend(self, query):
        return query


class Mute(PageScorer):
    def summarise(self, keys):
        return keys.mean(dim=2)


class Wide(First):
    kind: str
    rows = 3


class Wrong(First):
    kind: str
    how: str

    def summarise(self, keys):
        if self.how == "raises":
            raise KeyError("nothing")
        found = keys.mean(dim=2)
        return {"shape": found[:, :1], "NaN": found * torch.nan, "half": found.half()}[self.how]
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_pages_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_the_kinds_of_page_scorers() -> None:
    kinds = built_in_kinds(PageScorer)
    assert {"box", "spread"} <= kinds.keys()
    for kind, cls in kinds.items():
        cls.check_class()
        part = parse_component(PageScorer, kind)
        assert part.has_kernels
        try_scorer(part, 4, 2, 8, SIZE)


def test_a_page_scorer_of_the_users_own(own: str) -> None:
    policy = load_policy("select", args={"attend.scorer": {"kind": f"{own}:First", "power": 2.0}})
    scorer: Any = _part(policy).scorer
    assert scorer.power == 2.0 and not scorer.has_kernels
    assert Policy.model_validate(policy.as_data()) == policy
    try_scorer(scorer, 4, 2, 8, SIZE)
    for kind, message in (
        ("Mute", "has no method `extend`"),
        ("Wide", "3 rows in a summary, and kernels read 1 or 2"),
    ):
        with pytest.raises(ValueError, match=message):
            load_policy("select", args={"attend.scorer": f"{own}:{kind}"})
    for how, message in (
        ("raises", "`summarise` of the page scorer .* failed on made-up input: KeyError"),
        ("shape", r"must return \[3, 2, 8\] finite numbers of torch.float32, not \[3, 1, 8\]"),
        ("NaN", "must return .* finite"),
        ("half", "not .* of torch.float16"),
    ):
        wrong = parse_component(PageScorer, {"kind": f"{own}:Wrong", "how": how})
        with pytest.raises(ValueError, match=message):
            try_scorer(wrong, 4, 2, 8, SIZE)
