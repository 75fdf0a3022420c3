# SPDX-License-Identifier: Apache-2.0
"""The host pool and its size; what was moved; where V in host memory is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.methods.host_values import HostValues
from vllm_pyramid.methods.host_values.traffic import StepTraffic, SwapTraffic
from vllm_pyramid.methods.host_values.worker import HostPool, capped_cache_bytes, check_host_memory
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.request import resolve
from vllm_pyramid.policy.request_keys import RequestKeys
from vllm_pyramid.policy.values import DeviceValues

GIB = 2**30
HOST = {"values": "host"}


def test_host_pages_mirror_device_pages() -> None:
    """Page b on the host is page b's own, whatever layer the block table gives it to."""
    keys = torch.zeros(6, 2, 32, 8, dtype=torch.bfloat16)
    pool = HostPool(6, 2 * 32 * 8 * 2)
    assert pool.num_bytes == keys.numel() * 2
    values = pool.values(keys)
    assert values.shape == keys.shape and values.dtype == keys.dtype
    values[4] = 1.5
    again = pool.values(torch.zeros(6, 2, 32, 8, dtype=torch.bfloat16))
    assert (again[4] == 1.5).all() and not again[[0, 1, 2, 3, 5]].any()
    with pytest.raises(RuntimeError, match="V would lie elsewhere"):
        pool.values(torch.zeros(7, 2, 32, 8, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="V would lie elsewhere"):
        pool.values(torch.zeros(6, 2, 16, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("swap", "expected"),
    [(None, 8 * GIB), (8 * GIB, 8 * GIB), (9 * GIB, 8 * GIB), (GIB + 5000, GIB), (90000, 81920)],
)
def test_the_host_caps_the_device(swap: int | None, expected: int) -> None:
    sizes = {"page_bytes": 8192, "longest_pages": 9, "longest": 100}
    assert capped_cache_bytes(8 * GIB, swap, **sizes) == expected


def test_a_pool_for_no_request_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"holds 9 pages of V of 8192 bytes.*100 tokens needs 10"):
        capped_cache_bytes(8 * GIB, 81919, page_bytes=8192, longest_pages=9, longest=100)


def test_host_memory_that_is_not_there_is_refused() -> None:
    check_host_memory(3 * GIB, None, free_bytes=6 * GIB, workers=2)
    with pytest.raises(ValueError, match=r"6 GiB for 2; this host has 5 GiB free: set a smaller"):
        check_host_memory(3 * GIB, None, free_bytes=5 * GIB, workers=2)
    with pytest.raises(ValueError, match=r"3 GiB has pages for which --kv-swap-space 2 GiB has no"):
        check_host_memory(3 * GIB, 2 * GIB, free_bytes=9 * GIB, workers=1)


def test_traffic_is_summed_by_request() -> None:
    traffic = SwapTraffic()
    alive = {"a", "b"}.__contains__
    traffic.on_step_report(
        StepTraffic(["a", "b", "gone"], [100, 10, 1], [100, 70, 3], [0, 1, 1]), alive
    )
    traffic.on_step_report(StepTraffic(["b", "a"], [10, 10], [50, 60], [1, 1]), alive)
    assert traffic.totals() == {"v_bytes_written": 131, "v_bytes_read": 283}
    assert traffic.on_request_finished("a") == {
        "v_bytes_written": 110, "v_bytes_read": 160, "v_bytes_read_per_token": 60.0,
    }  # fmt: skip
    assert traffic.on_request_finished("b")["v_bytes_read_per_token"] == 60.0
    assert traffic.on_request_finished("b") == traffic.on_request_finished("gone") == {
        "v_bytes_written": 0, "v_bytes_read": 0, "v_bytes_read_per_token": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("value", [0, "x", "nan", True])
def test_a_wrong_swap_space(value: Any) -> None:
    with pytest.raises(ValueError, match="kv_swap_space must be a number of GiB above 0"):
        KVSettings("kcache", kv_swap_space=value)


def test_swap_space() -> None:
    for given, expected in ((None, None), ("0.5", GIB // 2)):
        served = KVSettings("kcache", kv_swap_space=given).served()
        assert served is not None and served.swap_space_bytes == expected
    settings = KVSettings("pyramidkv", kv_policy_args=HOST, kv_swap_space=4)
    assert KVSettings.from_additional_config(settings.to_additional_config()) == settings
    with pytest.raises(ValueError, match="keeps on the device: leave it out, choose kcache"):
        KVSettings("pyramidkv", kv_swap_space=4)
    with pytest.raises(ValueError, match="kv_swap_space without a kv_policy"):
        KVSettings(kv_swap_space=4)


def test_a_request_chooses_its_own_top_n() -> None:
    policy = load_policy("kcache")

    def asking(served: Policy, **extra_args: Any) -> Policy:
        return resolve(served, RequestKeys.parse(extra_args)).policy

    chosen = asking(policy, kv_top_n=7)
    assert chosen.values == HostValues(top_n=7, device_layers=1) and chosen.name == "kcache"
    assert policy.values == HostValues(top_n=128, device_layers=1)
    opted_out = asking(policy, kv_policy="full")
    assert opted_out.name == "full" and opted_out.values == DeviceValues()
    for wrong in (0, -1, 2.0, "7", True):
        with pytest.raises(ValueError, match="kv_top_n of a request must be a number of keys"):
            RequestKeys.parse({"kv_top_n": wrong})
    with pytest.raises(ValueError, match="kv_top_n has no effect on policy"):
        asking(load_policy("snapkv"), kv_top_n=7)
    with pytest.raises(ValueError, match="kv_top_n has no effect on policy"):
        asking(policy, kv_top_n=7, kv_policy="full")
    with pytest.raises(ValueError, match="keeps every token"):
        asking(policy, kv_budget=64)


def test_keys_alone_in_pages_of_one_size() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_pyramid.kv_cache.layer_roles import roles_of

    stock = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    names = [f"model.layers.{layer}.attn" for layer in range(3)]
    specs = roles_of(dict.fromkeys(names, stock), load_policy("kcache"), 4096).evicting
    assert [spec.block_size for spec in specs.values()] == [16, 32, 32]
    assert [spec.full_block_size for spec in specs.values()] == [16, 16, 16]
    assert {spec.page_size_bytes for spec in specs.values()} == {stock.page_size_bytes}
    uneven = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=32, head_size_v=16, dtype=torch.bfloat16
    )
    with pytest.raises(ValueError, match="keys of 32 and values of 16 elements"):
        roles_of(dict.fromkeys(names, uneven), load_policy("kcache"), 4096)
