# SPDX-License-Identifier: Apache-2.0
"""What evictions launch on a device, in a model of 32 layers: counted, for one prompt and eight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.pretended_device import DeviceTensor, PretendedDevice
from tests.shifted_worker import SPLITS, Worker, launch_tables
from vllm_pyramid.policy import Policy, load_policy

pytestmark = pytest.mark.cpu

LAYERS = 32
# Of each function of the Triton back end (tests/kernels/triton_matrix/check_launch.py,
# tests/methods/test_observed_expected.py).
LAUNCHES = {"future_queries": 1, "observed_expected_scores": 7}
LAUNCHES |= {"window_scores": 4, "select": 1, "compact": 1, "copy_blocks": 1, "unrankable": 2}
# What is launched in every step, with evictions or without.
OF_STEPS = {"reshape_and_cache", "vllms_attention", "gather_tables", "lane_rows", "lane_slots"}
# Operations of tensors that launch nothing: views, and memory.
VIEWS = {"_reshape_alias", "alias", "as_strided", "detach", "expand", "permute", "select", "slice"}
VIEWS |= {"split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}
VIEWS |= {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "unfold"}


class CountingDevice(PretendedDevice):
    """Counts what is launched while `counts` is not None."""

    counts: Counter[str] | None = None

    def launch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        launched, name = super().launch(function), function.__name__.replace("_reference", "")

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.counts is not None and name.rstrip("_") not in OF_STEPS:
                self.counts[name] += LAUNCHES[name]
            return launched(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if self.counts is not None and isinstance(result, DeviceTensor) and name not in VIEWS:
            self.counts[name] += 1
        return result


def _launches(
    policy: Policy, prompts: int, monkeypatch: pytest.MonkeyPatch, *, at_step_end: bool = True
) -> Counter[str]:
    """Return what a step with the ends of prompts launches more than one without."""
    lens = {f"p{i}": 90 + 3 * i for i in range(prompts)}
    counts = []
    for served in (load_policy("full"), policy):
        with CountingDevice() as device:
            launch_tables(monkeypatch, device)
            more: dict[str, Any] = {"layers": LAYERS, "spare": LAYERS * 64}
            worker = Worker(served, device, lens, at_step_end=at_step_end, **more)
            device.counts = Counter()
            worker.step(lens, copies=served.evicts)
            counts.append(device.counts)
        monkeypatch.undo()
        assert device.waits == [] and worker.failed == {}
        assert worker.evictions == (prompts if served.evicts else 0)
    return counts[1] - counts[0]


POLICIES = {
    "auto": load_policy("snapkv-expected", "40", args={"window": 16}),
    "snapkv": load_policy("snapkv", "40", args={"window": 16}),
    "pyramidkv": load_policy("pyramidkv", "40", args={"window": 8}),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("prompts", "most"), [(1, 60), (8, 80)])
def test_launches_of_prompts_that_end(
    name: str, prompts: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 60 for one prompt, of which 32 copy queries; at most 80 for eight."""
    counts = _launches(POLICIES[name], prompts, monkeypatch)
    print(dict(counts))
    assert counts["index_select"] >= LAYERS and counts["compact"] >= 1
    assert counts["copy_blocks"] == 1
    assert LAYERS < counts.total() <= most


def test_layer_by_layer_launches_many_times_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = _launches(POLICIES["snapkv"], 1, monkeypatch, at_step_end=False)
    assert counts["compact"] == LAYERS and counts.total() > 400


# Tables of a step ---------------------------------------------------------------------------------

PROMPTS = {f"p{i}": 90 + 3 * i for i in range(4)}
OF_TABLES = {"gather_tables", "lane_rows", "lane_slots"}


class CountingTables(PretendedDevice):
    """Counts what a step launches before its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.inside = False

    def launch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        launched, name = super().launch(function), function.__name__.removesuffix("_reference")

        def counted(*args: Any, **kwargs: Any) -> Any:
            if name in OF_TABLES:
                self.counts[name] += 1
            return launched(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if self.inside and isinstance(result, DeviceTensor) and name not in VIEWS:
            self.counts[name] += 1
        return result


def _of_step(worker: Worker, device: CountingTables, scheduled: dict[str, int]) -> Counter[str]:
    """Return what the tables of a step launch."""
    follow = worker.shifted.follow

    def counted(*args: Any) -> None:
        device.inside = True
        follow(*args)
        device.inside = False

    worker.shifted.follow = counted
    device.counts.clear()
    worker.step(scheduled)
    worker.shifted.follow = follow
    return Counter(device.counts)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("name", ["pyramidkv", "heads"])
def test_tables_of_a_step_are_one_launch(
    name: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the lengths of 32 layers; two in the step behind an eviction, which sends skips."""
    policy = POLICIES.get(name)
    if policy is None:
        policy = load_policy("duoattention", *SPLITS["duoattention"])
    slots = {"lane_rows": 1, "lane_slots": 1} if name == "heads" else {}
    with CountingTables() as device:
        launch_tables(monkeypatch, device)
        layers = 2 if name == "heads" else LAYERS
        worker = Worker(policy, device, PROMPTS, layers=layers, held=held)
        decode = dict.fromkeys(PROMPTS, 1)
        assert _of_step(worker, device, PROMPTS) == Counter({"gather_tables": 1, **slots})
        behind = _of_step(worker, device, decode)
        assert behind == Counter({"gather_tables": 1, "_to_copy": 1, "index_copy_": 1, **slots})
        for _ in range(2):
            assert _of_step(worker, device, decode) == Counter({"gather_tables": 1, **slots})
    assert worker.evictions == len(PROMPTS) and device.waits == []
