# SPDX-License-Identifier: Apache-2.0
"""The table of capabilities: what the parts of a policy refuse, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_pyramid.frontend.refusals import EVERY_POLICY
from vllm_pyramid.methods.accumulated import AccumulatingScorer
from vllm_pyramid.methods.kvpress_presses import KvpressScorer
from vllm_pyramid.policy import load_policy, load_presets
from vllm_pyramid.policy.capabilities import (
    OF_REQUESTS,
    Declared,
    Feature,
    asked,
    refusals,
    refuse,
    unsupported_by,
    why_not,
)
from vllm_pyramid.policy.request import TOGETHER

F = Feature
OWN_PAGES = {"attend.scorer": {"kind": "tests.methods.test_pages:OwnMean"}}
HOST = {"values": "host"}


@pytest.mark.parametrize(
    ("name", "args", "features", "reason"),
    [
        ("streaming-llm", {"schedule": "interval"}, {F.DRAFTS}, "evicts while it generates"),
        ("streaming-llm", {"schedule": "interval"}, {F.KV_TURNS}, "also evicts generated"),
        ("snapkv", {"fill_blocks": False}, {F.KV_TURNS}, r"\(fill_blocks: false\).*whole blocks"),
        ("snapkv", {"fill_blocks": False}, {F.CUDA}, "do not mask; set fill_blocks to true"),
        ("snapkv-chunked", {}, {F.INNER_SPANS}, "begin behind token 0: it evicts inside"),
        ("snapkv", {"chunk": {"tokens": 512, "scorer": "accumulated_attention"}},
         {F.PREFIX_CACHING}, r"\(chunk.scorer: accumulated_attention\)"),
        ("snapkv", {"chunk": {"tokens": 512, "scorer": "accumulated_attention"}},
         {F.DRAFTS}, r"\(chunk: points\)"),
        ("snapkv", HOST, {F.KV_TURNS}, "V lies in host memory"),
        ("snapkv", {"values": "ridge"}, {F.CACHE_OF_8_BITS}, "would round the changes"),
        ("select", {}, {F.DRAFTS, F.CUDA}, "the host's word of each token's position"),
        ("snapkv", {"attend": "pages"}, {F.KV_TURNS}, "a resumed answer"),
        ("select", OWN_PAGES, {F.HOST_FOLDER}, "may be another after a restart"),
        ("select", OWN_PAGES, {F.CUDA}, "would wait for the device"),
        *(
            ("duoattention", {}, {one, place}, f"{one.words} {place.words}: it was not tried")
            for one in (F.TENSOR_PARALLEL, F.PIPELINE, F.DATA_PARALLEL, F.DRAFTS, F.TRACE)
            for place in (F.CUDA, F.SECOND_RUNNER)
        ),
        ("adakv", {}, {F.DRAFTS}, "lengths that are solved"),
    ],
)  # fmt: skip
def test_what_a_part_refuses(name, args, features, reason) -> None:
    """All features of a row have to be in use."""
    policy = load_policy(name, None, args)
    with pytest.raises(ValueError, match=f"^policy '{name}' (?=.* does not work ).*{reason}"):
        refuse(policy, asked(*features))
    for one in features if len(features) > 1 else ():
        refuse(policy, asked(*(features - {one})))


def test_what_nothing_stands_against() -> None:
    for name in ("snapkv", "pyramidkv", "auto"):
        assert load_policy(name).refusals == ()
    streams = load_policy("duoattention")
    alone = (F.TENSOR_PARALLEL, F.PIPELINE, F.DATA_PARALLEL, F.DRAFTS, F.TRACE, F.CPU)
    refuse(streams, asked(*alone))
    refuse(streams, asked(F.CUDA, F.PREFIX_CACHING))
    refuse(load_policy("select"), asked(F.DRAFTS, F.CPU, F.PIPELINE, F.CACHE_OF_8_BITS))
    refuse(load_policy("pyramidinfer"), asked(F.DRAFTS, F.DRAFT_MODEL))
    for name in ("full", "kcache", "select"):
        refuse(load_policy(name), asked(F.KV_KEEP, F.INNER_SPANS, F.PROMPT_LOGPROBS))


def test_a_press_refuses_what_it_computes_otherwise() -> None:
    tova, snapkv = KvpressScorer(press="TOVAPress"), KvpressScorer(press="SnapKVPress")
    assert unsupported_by(tova).keys() == {F.TENSOR_PARALLEL, F.SOFT_CAP, F.KV_TURNS}
    assert unsupported_by(snapkv).keys() == {F.SOFT_CAP, F.KV_TURNS}


class Picky(AccumulatingScorer):
    """A scorer of a user's own, which says what it does not support, and nothing twice."""

    kind: str = "test:Picky"

    @property
    def unsupported(self) -> Declared:
        return {F.LORA: ("it knows one model", "use one"), F.PREFIX_CACHING: "it remembers"}


def test_a_class_adds_to_what_its_base_classes_say() -> None:
    found = unsupported_by(Picky())
    found_by = {F.PREFIX_CACHING, F.HOST_CACHE, F.KV_EVENTS, F.KV_TURNS, F.HANDOVER}
    expected = {F.LORA, F.DRAFTS, *found_by}
    assert found.keys() == expected
    assert found[F.PREFIX_CACHING] == found[F.KV_TURNS] == "it remembers"
    rows = {row.features: row for row in refusals(found, "scorer: test:Picky")}
    assert rows[(F.LORA,)].fix == "use one"
    error = rows[(F.PREFIX_CACHING,)].error(load_policy("snapkv"), {})
    assert str(error) == (
        "policy 'snapkv' (scorer: test:Picky) does not work with --enable-prefix-caching: it "
        "remembers; leave it out, or choose a policy without `scorer: test:Picky`"
    )
    said = rows[(F.KV_TURNS,)].error(load_policy("snapkv"), {F.KV_TURNS: "kv_session"})
    assert "kv_session: it remembers; leave it out, or send kv_turn_mode 'exact'" in str(said)


@pytest.mark.parametrize("row", [*EVERY_POLICY, *TOGETHER], ids=lambda row: row.what())
def test_what_no_policy_takes(row: Any) -> None:
    """Each row names the features and what to do, and stands for all of its features alone."""
    policy = load_policy("pyramidkv")
    with pytest.raises(ValueError, match=r"^a KV policy \(--kv-policy\) does not work ") as error:
        refuse(policy, asked(*row.features), [row])
    for part in (row.reason, row.fix, *(feature.words for feature in row.features)):
        assert part and part in str(error.value)
    for one in row.features:
        refuse(policy, asked(*(set(row.features) - {one})), [row])
        others = set(row.features) - {one}
        assert why_not([row], one, others) == row.reason
        assert not others or why_not([row], one) is None


def test_every_feature_is_refused_by_someone() -> None:
    rows = [*EVERY_POLICY, *TOGETHER, *(row for one in load_presets() for row in one.refusals)]
    rows += refusals(unsupported_by(KvpressScorer(press="SnapKVPress")), "scorer: kvpress")
    rows += load_policy("snapkv", None, {"values": "ridge"}).refusals
    rows += load_policy("select", None, OWN_PAGES).refusals
    assert {feature for row in rows for feature in row.features} == set(Feature)
    assert all(row.reason and row.fix for row in rows)
    assert set(Feature) > OF_REQUESTS
