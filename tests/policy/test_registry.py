# SPDX-License-Identifier: Apache-2.0
"""Presets by name and by file, and changes to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vllm_pyramid.methods.host_values import HostValues
from vllm_pyramid.policy import AUTO, RECOMMENDED, load_policy, load_presets, policy_names
from vllm_pyramid.policy.capabilities import Feature
from vllm_pyramid.policy.request import resolve
from vllm_pyramid.policy.request_keys import RequestKeys
from vllm_pyramid.step.probe import probe

DOCS = Path(__file__).parents[2] / "docs" / "policies.md"


@pytest.fixture
def preset(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_the_presets() -> None:
    names = policy_names()
    assert names == sorted(names)
    assert {"full", "streaming-llm", "snapkv", "pyramidkv"} <= set(names)
    for name, policy in zip(names, load_presets(), strict=True):
        assert policy.name == name
        assert "https://" in policy.paper or name == "random"  # a control, nobody's method
        row = f"| [`{name}`](methods/{name}.md)"
        assert row in DOCS.read_text(), f"docs/policies.md has no row for {name}"


def test_auto_is_a_preset() -> None:
    assert load_policy("auto") == load_policy(RECOMMENDED)
    assert load_policy("auto", "25%", {"window": 20}) == load_policy(
        RECOMMENDED, "25%", {"window": 20}
    )
    assert AUTO not in policy_names()
    keys = RequestKeys.parse({"kv_policy": "auto"})
    assert resolve(load_policy("auto"), keys).policy == load_policy(RECOMMENDED)
    with pytest.raises(ValueError, match="kv_policy 'auto' is not served here"):
        resolve(load_policy("snapkv"), keys)


def test_the_examples_of_the_documentation(preset, tmp_path, monkeypatch) -> None:
    (format_example,) = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    packaged = load_policy("pyramidkv").model_dump(exclude={"description", "paper"})
    documented = load_policy(preset(format_example)).model_dump(exclude={"description", "paper"})
    assert documented == packaged

    page = DOCS.with_name("write_a_method.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (own_example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_methods.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    own = load_policy(preset(own_example))
    assert own.scorer.model_dump() == {"kind": "my_methods:NormScorer", "weight": 0.5}
    probe(own, 6, 2, 16)
    args = {"allocator": {"kind": "my_methods:FirstLayersAllocator", "count": 3}, "sinks": 0}
    learns = load_policy(preset(own_example), None, {"scorer.kind": "my_methods:LearningScorer"})
    assert learns.why_not(Feature.KV_TURNS) == "it scores by the requests that it has seen"
    plan = load_policy(preset(own_example), 512, args).plan(8192, 8, 16)
    assert plan.end.keep.tolist() == [1016, 1016, 1016, 210, 210, 210, 209, 209]


@pytest.mark.parametrize("name", ["pyramidvk", "", "None", "../configs/snapkv", "none"])
def test_an_unknown_name_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown policy .* valid policies: .*full, .*pyramidkv"):
        load_policy(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget: 64\nscorrer: none\n", r"key 'scorrer' in .*mine\.yaml, line 2 .*'scorer'"),
        ("budget: 64\nscorer: [\n", r"malformed YAML in .*mine\.yaml, line 3, column 1"),
        ("budget: 64\nbudget: 65\nscorer: recency\n", r"line 2: 'budget' is given twice"),
        ("- a\n", "not a list"),
        ("scorer: recency\n", "budget: this key is missing"),
        ("budget: 0\nscorer: recency\n", r"budget \(line 1\): budget 0 is out of range"),
        ("budget: 9\nfill_blocks: 1\nscorer: recency\n", r"fill_blocks \(line 2\)"),
        (
            "budget: 99\nwindow: 8\nscorer: {kind: observation_window, pooling: median}\n",
            r"scorer\.pooling.*not 'median'",
        ),
        ("budget: 50%\nscorer: none\n", "keeps every token"),
        ("name: full\nbudget: 50%\nscorer: recency\n", "reserved"),
    ],
)
def test_mistakes_in_a_file_are_named(preset: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(preset(text))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the policy file .*gone\.yaml"):
        load_policy(str(tmp_path / "gone.yaml"))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot read the policy file"):
        load_policy(str(binary))


@pytest.mark.parametrize(
    "args",
    [
        {"beta": 14, "window": 16, "pooling": "max"},
        {"allocator.beta": 14, "window": 16, "scorer.pooling": "max"},
        {"allocator": {"beta": 14.0}, "window": 16, "scorer": {"pooling": "max"}},
    ],
)
def test_arguments_in_every_spelling(args: dict[str, Any]) -> None:
    policy = load_policy("pyramidkv", 512, args).model_dump()
    assert policy["allocator"] == {"kind": "arithmetic", "beta": 14.0}
    assert policy["window"] == 16
    assert policy["scorer"]["pooling"] == "max"
    assert policy["scorer"]["kernel_size"] == 5
    assert policy["budget"] == 512


@pytest.mark.parametrize(
    "args",
    [
        {"beta": 10, "allocator.kind": "arithmetic"},
        {"allocator": {"kind": "arithmetic", "beta": 10}},
        {"allocator": "arithmetic", "beta": 10},
    ],
)
def test_a_kind_is_changed_before_its_fields(args: dict[str, Any]) -> None:
    policy = load_policy("snapkv", 512, args)
    assert policy.allocator.model_dump() == {"kind": "arithmetic", "beta": 10.0}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"betta": 3}, "unknown argument 'betta'.*did you mean 'beta'.*allocator.beta"),
        ({"kind": "uniform"}, "ambiguous.*'allocator.kind'"),
        ({"allocator": {"x": 3}}, "unknown argument 'allocator.x'"),
        ({"beta": 3, "allocator.beta": 4}, "given twice"),
        ({"beta": "x"}, r"policy 'pyramidkv': allocator\.beta: .*not 'x'"),
        ({"window": 600}, "budget 512 is too small .* at least 601"),
        ({"allocator": "uniform", "beta": 3}, "unknown argument 'beta' .it belongs to allocator"),
    ],
)
def test_wrong_arguments(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy("pyramidkv", 512, args)


# V in host memory ---------------------------------------------------------------------------------


def test_any_policy_keeps_v_in_host_memory() -> None:
    policy = load_policy("pyramidkv", "12%", {"values": "host", "top_n": 64, "device_layers": 2})
    assert policy.values == HostValues(top_n=64, device_layers=2, renormalize=True)
    assert [policy.values.on_device(layer) for layer in range(4)] == [True, True, False, False]
    args = {"values": {"kind": "host", "top_n": 64, "device_layers": 2}}
    assert load_policy("pyramidkv", "12%", args) == policy
    assert policy.block_sizes(4, 16).tolist() == [16, 16, 32, 32]
    plain = load_policy("pyramidkv", "12%")
    assert all(plain.values.on_device(layer) for layer in range(4))
    assert plain.block_sizes(4, 16).tolist() == [16] * 4
    # What is kept is the plain policy's; only the rounding to blocks is that of the larger ones.
    ours, theirs = (p.plan(1000, 4, 32) for p in (policy, plain))
    assert ours.end.keep.tolist() == theirs.end.keep.tolist()
    assert not (ours.end.skip % 32).any()
    assert ours.end.blocks_in(policy.block_sizes(4, 16)).tolist() == [
        -(-1000 // size) - skip // size
        for size, skip in zip([16, 16, 32, 32], ours.end.skip.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("pyramidkv", {"top_n": 64}, "policy 'pyramidkv'.* 'top_n' .it belongs to values 'host'"),
        (
            "kcache",
            {"values": "device", "device_layers": 0},
            "'device_layers' .it belongs to values 'host'",
        ),
        ("kcache", {"values": "disk"}, "unknown values kind 'disk'.*valid kinds: device, host"),
        ("full", {"values": "host"}, "'full' is reserved .*choose kcache"),
        ("h2o", {"values": "host"}, "prompt's end alone so far.*'interval'.*accumulated_attention"),
        ("pyramidinfer", {"values": "host"}, "prompt's end alone so far.*recent_ensemble"),
    ],
)
def test_settings_of_host_values_that_cannot_work(name: str, args: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(name, None, args)


def test_a_layer_must_be_left_for_the_host() -> None:
    load_policy("kcache").plan(100, 2, 32)
    with pytest.raises(ValueError, match=r"V of 1 layers on the device.*the model has 1"):
        load_policy("kcache").plan(100, 1, 32)
    with pytest.raises(ValueError, match="budget of 12% has no effect"):
        load_policy("kcache", "12%")
