# SPDX-License-Identifier: Apache-2.0
"""The command line of the bench, and how it goes on with what it knows; no engine is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_pyramid.tools.bench import measures, prepare
from vllm_pyramid.tools.bench.job import WARM_UP_SEED, Job, Variant, variants_of
from vllm_pyramid.tools.bench.prepare import Prepared, processor
from vllm_pyramid.tools.bench.shapes import SHAPES, shape_of_config, write_model
from vllm_pyramid.tools.child_process import ChildError
from vllm_pyramid.tools.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["throughput", "--policies", ","], "--policies ',': Value should have at least 1 item"),
        (["throughput", "--budget", "4"], "budget 4 is too small"),
        (["throughput", "--budget", "4096"], "keeps all of a prompt of 2048"),
        (["throughput", "--prompt-len", "40000"], "the model takes 32768"),
        (["throughput", "--model", "built-in", "--prompt-len", "9000"], "the model takes 8192"),
        (["throughput", "--model", "/nowhere"], "there is no config.json"),
        (["throughput", "--json", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
        (["throughput", "--policies", "pyramidinfer"], "pyramidinfer 12% is out of reach"),
        (
            ["throughput", "--policies", "kcache", "--kv-swap-space", "0"],
            "--kv-swap-space '0': Input should be greater than 0",
        ),
        (
            # 65 pages of 16 KiB. A request takes 132 in the first layer and 66 in seven.
            ["throughput", "--policies", "kcache", "--kv-swap-space", "0.001"],
            "kcache has 64 blocks of a layer for requests, of a cache for 4 whole ones without "
            "eviction, and one needs 594: give --kv-swap-space more",
        ),
        (
            # Of each 16 KiB block 256 bytes more go to what is gathered.
            ["throughput", "--policies", "full,h2o", "--pool-prompts", "4,1"],
            "h2o 12% has 1039 blocks of a layer for requests, of a cache for 1 whole ones without "
            "eviction, and one needs 1056: give the pool more",
        ),
        (["prefix", "--policies", "snapkv,h2o", "--resume"], "--resume and h2o: it adds up"),
    ],
)
def test_wrong_arguments(arguments, said, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(measures, "Engines", None)  # nothing may start
    assert main(["bench", *arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.fixture(autouse=True)
def vllm_runs_without_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CPU build does, and the CUDA wheel beside a GPU; nothing here starts an engine."""
    monkeypatch.setattr(prepare, "runs_without_plugins", lambda: True)


def test_stock_vllm_where_it_cannot_run(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(measures, "Engines", None)
    monkeypatch.setattr(prepare, "runs_without_plugins", lambda: False)
    assert main(["bench", "throughput", "--out", str(tmp_path)]) == 2
    assert "leave stock out of --policies" in capsys.readouterr().err


class FakeEngines:
    """Stands for `Engines`: answers from the job, and breaks off where it is told to."""

    started = 0
    runs: list[tuple[str, str | None, float]]
    fail_after: int | None = None

    def __init__(self, prepared: Prepared, **options: Any) -> None:
        type(self).started += 1
        self.job, self.limits = prepared.job, {}
        self.options = options

    def __enter__(self) -> FakeEngines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def limit_pool(self, variant: Variant, pool: float) -> None:
        self.limits[variant] = pool

    def ask(
        self,
        variant: Variant,
        do: str,
        on_progress: Callable[[int], None] = lambda _: None,
        **task: Any,
    ) -> dict[str, Any]:
        cls, prompts, max_tokens = type(self), task["prompts"], task["max_tokens"]
        assert do == "run" and task["budget"] == variant.budget
        later = task.get("later", [])
        assert [len(turns) for turns in later] == [self.job.turns - 1] * len(later)
        if len(prompts) == self.job.num_prompts:  # not a warm-up
            if len(cls.runs) == cls.fail_after:
                raise ChildError("the engine failed")
            cls.runs.append((variant.policy, variant.budget, self.limits[variant]))
        on_progress(len(prompts))
        return {
            "output_tokens_per_s": len(prompts) * max_tokens / (1.0 if variant.budget else 2.0),
            "decode_tokens_per_s": 200.0 if variant.budget else 50.0,
            "decode_batch": 4.0,
            "pages_read": 0,
            "pages_visible": 0,
            "prefill_share": 0.5,
            "resident_max": 4,
            "peak_blocks": 10,
            "decode_blocks": 5,
            "ttft_p50_ms": 1.0,
            "tpot_p50_ms": 1.0,
        }


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngines]:
    monkeypatch.setattr(FakeEngines, "runs", [], raising=False)
    monkeypatch.setattr(FakeEngines, "started", 0)
    monkeypatch.setattr(FakeEngines, "fail_after", None)
    monkeypatch.setattr(measures, "Engines", FakeEngines)
    return FakeEngines


JOB = ["--prompt-len", "256", "--output-len", "8", "--num-prompts", "4"]


def test_policies_take_turns(fake, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    command = ["bench", "throughput", *JOB, "--repetitions", "3", "--out", str(out)]
    command += ["--budget", "12%,50%", "--json", str(tmp_path / "too.json")]
    fake.fail_after = 5
    assert main(command) == 2
    assert "the engine failed" in capsys.readouterr().err
    turn = [("stock", None, 4.0), ("pyramidkv", "12%", 4.0), ("pyramidkv", "50%", 4.0)]
    assert fake.runs == [*turn, *turn[:2]]
    fake.runs.clear()
    fake.fail_after = None
    assert main(command) == 0
    assert fake.runs == turn * 3
    written = json.loads((out / "throughput.json").read_text())
    assert written == json.loads((tmp_path / "too.json").read_text())
    assert [row["policy"] for row in written["rows"]] == ["stock", "pyramidkv", "pyramidkv"]
    row = written["rows"][1]
    assert row["repetitions"] == 3 and row["output_tokens_per_s"] == 32.0
    assert row["output_ratio"] == 2.0 and row["decode_ratio"] == 4.0
    assert written["baseline"] == "stock" and written["processor"] == processor()
    assert f"on {processor()}." in capsys.readouterr().out


@pytest.mark.parametrize("measure", [["throughput"], ["throughput", "--decode-only"]])
def test_interrupted(measure, tmp_path, monkeypatch, capsys) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measures, "Engines", interrupted)
    assert main(["bench", *measure, *JOB, "--out", str(tmp_path)]) == 130
    assert "nothing of it is kept" in capsys.readouterr().out


def test_pools_go_from_plenty_to_scarce(fake: type[FakeEngines], tmp_path: Path) -> None:
    command = ["bench", "throughput", *JOB, "--pool-prompts", "4,1.5", "--repetitions", "2"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert [(policy, pool) for policy, _, pool in fake.runs] == [
        (policy, pool) for pool in (4.0, 1.5) for _ in range(2) for policy in ("stock", "pyramidkv")
    ]
    rows = json.loads((tmp_path / "throughput.json").read_text())["rows"]
    assert [row["pool_prompts"] for row in rows] == [4.0, 4.0, 1.5, 1.5]
    assert (tmp_path / "throughput.csv").read_text().count("\n") == 5


def test_variants() -> None:
    shape = SHAPES["small"]
    variants = variants_of(["stock", "full", "snapkv"], ["12%", "256"], 2048, shape)
    assert [variant.label for variant in variants] == ["stock", "full", "snapkv 12%", "snapkv 256"]
    job = Job(shape, 2048, 2, 32, 4.0)
    assert [job.v_on_host(variant) for variant in variants] == [False] * 4
    # A limit that nothing has to be lowered for.
    (thinned,) = variants_of(["pyramidinfer"], ["100%"], 2048, shape)
    assert thinned == Variant("pyramidinfer", "100%")
    (kcache,) = variants_of(["kcache"], ["12%"], 2048, shape)
    assert kcache == Variant("kcache", None) and job.v_on_host(kcache)
    (streams,) = variants_of(["duoattention"], ["12%"], 2048, shape)
    assert streams == Variant("duoattention", None)


def test_conversations_of_a_job() -> None:
    """What all share comes first; each turn brings as many tokens; the last one fits."""
    job = Job(SHAPES["small"], 300 + 3 * 100 + 2 * 8, 8, 4, 4.0, turns=3, shared_len=300)
    assert job.turn_len == 100
    first, later = job.prompts(1), job.later_turns(1)
    assert {tuple(prompt[:300]) for prompt in first} == {tuple(first[0][:300])}
    assert [len(prompt) for prompt in first] == [400] * 4
    assert [[len(turn) for turn in turns] for turns in later] == [[100, 100]] * 4
    drawn = [tuple(p[300:]) for p in first] + [tuple(t) for turns in later for t in turns]
    assert len(set(drawn)) == 12
    assert job.prompts(1) == first and job.prompts(2)[0][:300] != first[0][:300]
    plain = Job(SHAPES["small"], 64, 8, 4, 4.0)
    assert [len(prompt) for prompt in plain.prompts(0)] == [64] * 4
    assert plain.later_turns(0) == [[]] * 4
    warm_up = plain.prompts(WARM_UP_SEED)[0]
    assert all(warm_up not in plain.prompts(repetition) for repetition in range(5))


def test_prefix_caching_is_on_where_it_is_measured() -> None:
    shape = SHAPES["small"]
    variant = Variant("snapkv", "12%")
    off = Job(shape, 2048, 64, 32, 4.0).engine_arguments(variant)
    on = Job(shape, 2048, 64, 32, 4.0, prefix_caching=True).engine_arguments(variant)
    assert off["enable_prefix_caching"] is False and on["enable_prefix_caching"] is None


def test_stock_vllm_has_room_for_as_many_requests_in_its_own_blocks() -> None:
    engine_args = {"kv_admission": "prompt", "dtype": "float32"}
    job = Job(SHAPES["small"], 2048, 64, 32, 4.0, engine_args)
    stock, caching = Variant("stock", None), Variant("stock-prefix-caching", None)
    # 2,112 tokens: 17 blocks of 128, or 132 of 16.
    assert job.pool_blocks(Variant("full", None), 4.0) == 4 * 132 * 8
    assert job.pool_blocks(stock, 4.0) == job.pool_blocks(caching, 4.0) == 4 * 17 * 8 * 8
    ours, made = job.engine_arguments(Variant("full", None)), job.engine_arguments(stock)
    assert ours["block_size"] == 16 and ours["kv_admission"] == "prompt"
    assert made["block_size"] is None and "kv_admission" not in made
    assert made["dtype"] == "float32" and made["max_model_len"] == ours["max_model_len"]
    # What it rounds down and keeps back, two blocks of its own, comes on top and is then held.
    assert made["kv_cache_memory_bytes"] == (4 * 17 + 2) * 8 * 8 * job.shape.block_bytes
    assert made["enable_prefix_caching"] is False
    assert job.engine_arguments(caching)["enable_prefix_caching"] is True
    assert stock.environment == caching.environment == {"VLLM_PLUGINS": ""}
    assert Variant("full", None).environment == {}
    with pytest.raises(ValueError, match="takes part as 'stock'"):
        variants_of(["none"], ["12%"], 2048, SHAPES["small"])


def test_a_pool_is_as_large_as_what_comes_beside_it_allows() -> None:
    job = Job(SHAPES["small"], 2048, 64, 32, 4.0)
    kcache, h2o = Variant("kcache", None), Variant("h2o", "12%")
    blocks = job.pool_blocks(Variant("full", None), 4.0)
    assert blocks == 4 * 132 * 8
    # As much host memory again, a page for a page.
    assert job.pool_blocks(kcache, 4.0) == blocks and "kv_swap_space" not in job.engine_arguments(
        kcache
    )
    # 16 x 4 numbers of 4 bytes beside 16 KiB.
    assert job.pool_blocks(h2o, 4.0) == blocks * 64 // 65
    small = replace(job, kv_swap_space=2000 * 16384 / 2**30)
    assert (
        small.pool_blocks(kcache, 4.0) == 1999 and small.pool_blocks(h2o, 4.0) == 64 * blocks // 65
    )
    assert small.pool_blocks(kcache, 1.0) == 132 * 8
    assert small.engine_arguments(kcache)["kv_swap_space"] == small.kv_swap_space
    assert "kv_swap_space" not in small.engine_arguments(h2o)


@pytest.mark.parametrize(
    ("engine_args", "token_bytes"),
    [
        ({}, 2 * 4 * 64 * 2),
        ({"dtype": "float32"}, 2 * 4 * 64 * 4),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, 2 * 4 * 64 * 2),
        ({"kv_cache_dtype": "fp8"}, 2 * 4 * 64),
    ],
)
def test_a_pool_is_sized_by_the_type_that_is_served(engine_args, token_bytes) -> None:
    shape = SHAPES["small"].served_as(engine_args)
    job = Job(shape, 2048, 64, 32, 4.0, engine_args)
    assert job.pool_bytes == (4 * 132 + 1) * 8 * 16 * token_bytes
    made = job.engine_arguments(Variant("full", None))
    assert made["kv_cache_memory_bytes"] == job.pool_bytes
    assert made["max_num_batched_tokens"] == 2048 + 32
    # A variant with a type of its own has as many bytes, and as many blocks as go into them.
    small = Variant("full", None, "fp8")
    assert job.block_bytes(small) == 16 * 2 * 4 * 64
    assert job.pool_blocks(small, 4.0) == 4 * 132 * 8 * token_bytes // (2 * 4 * 64)


@pytest.mark.parametrize("engine_args", [{"dtype": "bf16"}, {"kv_cache_dtype": "int3"}])
def test_an_unknown_type_is_refused(engine_args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not one of"):
        SHAPES["small"].served_as(engine_args)


def test_a_written_model_has_its_shape(tmp_path: Path) -> None:
    write_model(SHAPES["small"], tmp_path)
    assert shape_of_config(str(tmp_path)) == SHAPES["small"]


@pytest.mark.parametrize(
    ("capability", "given", "expected"),
    [
        (None, {}, {}),
        ((9, 0), {}, {}),
        ((10, 0), {}, {"attention_backend": "FLASH_ATTN"}),
        ((10, 3), {"seed": 1}, {"seed": 1, "attention_backend": "FLASH_ATTN"}),
        ((10, 0), {"attention_backend": "FLASHINFER"}, {"attention_backend": "FLASHINFER"}),
    ],
)
def test_all_engines_run_one_attention(monkeypatch, capsys, capability, given, expected) -> None:
    """On sm_100 vLLM alone would take another than it can under a policy."""
    from vllm_pyramid.tools.bench.prepare import _with_one_attention

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert _with_one_attention(given) == expected
    said = capsys.readouterr().out.splitlines()
    assert len(said) == (given != expected)
