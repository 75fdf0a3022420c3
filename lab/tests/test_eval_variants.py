# SPDX-License-Identifier: Apache-2.0
"""The list of policies of a run: names, files, arguments, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.eval.variants import Variant, budgets_of, parse_variants
from vllm_pyramid.policy import load_policy

pytestmark = pytest.mark.cpu


def parse(text: str) -> list[Variant]:
    return list(parse_variants(text, "--policies"))


def test_names_files_and_arguments(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("budget: 12%\nwindow: 4\nscorer: {kind: observation_window, kernel_size: 3}\n")
    text = f'full, {path}:{{"window": 9}},snapkv:{{"kernel_size":11,"pooling":"max"}} ,kcache,'
    full, mine, snapkv, kcache = parse(text)
    assert (full, kcache) == (Variant("full"), Variant("kcache"))
    assert mine == Variant(str(path), {"window": 9})
    assert snapkv.args == {"kernel_size": 11, "pooling": "max"}
    assert (mine.load().window, mine.load().scorer.kernel_size) == (9, 3)
    scorer = snapkv.load("25%").scorer
    assert (scorer.kernel_size, scorer.pooling) == (11, "max")
    assert str(snapkv.load("25%").budget) == "25%"


def test_labels_tell_variants_apart() -> None:
    labels = [v.label for v in parse('xkv,xkv:{},xkv:{"window":4},xkv:{"fill_blocks":false}')]
    assert labels == ["xkv", "xkv(window=4)", "xkv(fill_blocks=false)"]
    # One policy however it is written, once.
    (nested,) = parse(
        'snapkv:{"allocator":{"kind":"arithmetic","beta":9},"window":4},'
        'snapkv:{"window":4,"allocator.beta":9,"allocator.kind":"arithmetic"}'
    )
    assert nested.label == "snapkv(allocator.beta=9, allocator.kind=arithmetic, window=4)"


def test_variants_that_say_where_turns_ended() -> None:
    plain, turns, both = parse('snapkv,snapkv@turns,snapkv@fp8@turns:{"window":4}')
    assert [v.turns for v in (plain, turns, both)] == [False, True, True]
    labels = [v.label for v in (plain, turns, both)]
    assert labels == ["snapkv", "snapkv@turns", "snapkv@fp8@turns(window=4)"]
    assert both.cache_dtype == "fp8" and turns.cache_dtype is None
    assert plain.definition() == turns.definition()
    for name, reason in (("full", "keep"), ("h2o", "sums"), ("xkv", "solve")):
        with pytest.raises(ValueError, match=f"{name}@turns.*takes no kv_turns: .*{reason}"):
            parse(f"{name}@turns")


def test_policies_that_have_no_budget() -> None:
    for name in ("full", "duoattention"):
        assert budgets_of(load_policy(name), ("12%", "512")) == [None]
    assert budgets_of(load_policy("snapkv"), ("12%", "12%")) == ["12%"]


def test_types_of_caches() -> None:
    """They belong to the variant: to its label, and to its engine's arguments."""
    plain, half, other, scaled = parse(
        'snapkv,snapkv@fp8,snapkv@fp8_e5m2:{"window":4},full@int8_per_token_head'
    )
    assert [v.label for v in (plain, half, other)] == [
        "snapkv",
        "snapkv@fp8",
        "snapkv@fp8_e5m2(window=4)",
    ]
    assert [v.engine_args for v in (plain, half)] == [{}, {"kv_cache_dtype": "fp8"}]
    assert scaled.engine_args == {"kv_cache_dtype": "int8_per_token_head"}
    assert half.definition() == plain.definition() and other.load().window == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("snapkv@fp9", "behind the @ goes a type of KV cache, one of fp8, fp8_e4m3"),
        ("", "is empty"),
        (" , ", "is empty"),
        ("snapvk", "unknown policy 'snapvk' .did you mean 'snapkv'"),
        ('{"window":4}', "arguments follow a policy's name and a colon"),
        ('snapkv{"window":4}', "arguments follow a policy's name and a colon, .* not 'snapkv'"),
        ("snapkv:{window:4}", "arguments of 'snapkv' are not valid JSON.*quote the list"),
        ('snapkv:{"window":4', "arguments of 'snapkv' are not valid JSON"),
        ('snapkv:{"window":4,"window":5}', "arguments of 'snapkv': .* 'window' twice"),
        ('xkv:{"retention":NaN}', "arguments of 'xkv': .* NaN"),
        ('snapkv:{"window":4}full', "end before 'full': a comma"),
        ('full,snapkv:{"windw":4}', "policy 'snapkv': unknown argument 'windw'"),
        ('snapkv:{"beta":4}', "unknown argument 'beta' .it belongs to"),
        ('snapkv:{"kernel_size":4}', "kernel_size"),
        ('full:{"budget":4}', "set the budget with --kv-budget"),
    ],
)
def test_wrong_lists_name_the_flag(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^--policies.*{said}"):
        parse(text)
