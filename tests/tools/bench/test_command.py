# SPDX-License-Identifier: Apache-2.0
"""The command line of the bench, and how it goes on with what it knows; no engine is started."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_pyramid.tools.bench import measures, prepare, server_load
from vllm_pyramid.tools.bench.job import WARM_UP_SEED, Job, Variant, variants_of
from vllm_pyramid.tools.bench.prepare import Prepared, processor
from vllm_pyramid.tools.bench.server_load import (
    Gauges,
    Server,
    evictions,
    flags_of,
    load,
    with_slack,
)
from vllm_pyramid.tools.bench.shapes import SHAPES
from vllm_pyramid.tools.child_process import ChildError
from vllm_pyramid.tools.cli import main

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["throughput", "--policies", "snapvk"], "unknown policy 'snapvk'"),
        (["throughput", "--policies", ","], "--policies ',': Value should have at least 1 item"),
        (["throughput", "--budget", "0%"], "above 0%"),
        (["throughput", "--budget", "4"], "budget 4 is too small"),
        (["throughput", "--budget", "4096"], "keeps all of a prompt of 2048"),
        (
            ["throughput", "--pool-prompts", "0.5"],
            "--pool-prompts '0.5': Input should be greater than or equal to 1",
        ),
        (["throughput", "--prompt-len", "40000"], "the model takes 32768"),
        (["throughput", "--prompt-len", "0"], "--prompt-len '0': Input should be greater than 0"),
        (
            ["throughput", "--output-len", "1"],
            "--output-len '1': Input should be greater than or equal to 2",
        ),
        (["throughput", "--repetitions", "0"], "--repetitions '0': Input should be greater than 0"),
        (["throughput", "--model", "built-in", "--layers", "4"], "--layers is for the shapes"),
        (["throughput", "--model", "built-in", "--prompt-len", "9000"], "the model takes 8192"),
        (["throughput", "--model", "/nowhere"], "there is no config.json"),
        (["throughput", "--engine-args", "{"], "--engine-args is not valid JSON"),
        (["throughput", "--json", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
        (["pressure", "--pools", "4,0.5"], "--pools '0.5': Input should be greater than or equal"),
        (
            ["throughput", "--pool-prompts", "inf"],
            "--pool-prompts 'inf': Input should be a finite number",
        ),
        (
            ["throughput", "--pool-prompts", "nan"],
            "--pool-prompts 'nan': Input should be a finite number",
        ),
        (["throughput", "--pool-prompts", "4,2"], "at most 1 item after validation, not 2"),
        (["pressure", "--pools", "nan"], "--pools 'nan': Input should be a finite number"),
        (["pressure", "--pools", "much"], "--pools 'much': Input should be a valid number"),
        (["throughput", "--profile"], "give --decode-only too"),
        (
            [
                *("throughput", "--profile", "--decode-only"),
                *("--engine-args", '{"tensor_parallel_size": 2}'),
            ],
            "leave tensor_parallel_size out of --engine-args",
        ),
        (["throughput", "--policies", "none"], "takes part as 'stock'"),
        (["latency", "--rates", "-1"], "--rates '-1': Input should be greater than 0"),
        (["throughput", "--policies", "pyramidinfer"], "pyramidinfer 12% is out of reach"),
        (
            ["throughput", "--policies", "pyramidinfer", "--budget", "100%", "--prompt-len", "64"],
            "pyramidinfer 100% keeps all of a prompt of 64 tokens",
        ),
        (["throughput", "--kv-swap-space", "1"], "none of the policies keeps there: leave it out"),
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
            ["pressure", "--policies", "full,h2o", "--pools", "4,1"],
            "h2o 12% has 1039 blocks of a layer for requests, of a cache for 1 whole ones without "
            "eviction, and one needs 1056: give the pool more",
        ),
        (
            ["prefix", "--policies", "snapkv,h2o", "--resume"],
            "--resume and h2o: it adds up",
        ),
        (["scheduler", "--layers", "0"], "--layers '0': Input should be greater than 0"),
        (["cost", "--model", "llama-3-70b"], "give more --devices"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measures, "Engines", None)  # nothing may start
    out = [] if arguments[0] == "cost" else ["--out", str(tmp_path)]
    assert main(["bench", *arguments, *out]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.fixture(autouse=True)
def vllm_runs_without_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CPU build does, and the CUDA wheel beside a GPU; nothing here starts an engine."""
    monkeypatch.setattr(prepare, "runs_without_plugins", lambda: True)


def test_stock_vllm_where_it_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_policies_take_turns(
    fake: type[FakeEngines], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.parametrize("measure", [["throughput"], ["capacity"], ["throughput", "--decode-only"]])
def test_interrupted(
    measure: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measures, "Engines", interrupted)
    assert main(["bench", *measure, *JOB, "--out", str(tmp_path)]) == 130
    assert "nothing of it is kept" in capsys.readouterr().out


def test_pressure_goes_from_plenty_to_scarce(fake: type[FakeEngines], tmp_path: Path) -> None:
    command = ["bench", "pressure", *JOB, "--pools", "4,1.5", "--repetitions", "2"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert [(policy, pool) for policy, _, pool in fake.runs] == [
        (policy, pool) for pool in (4.0, 1.5) for _ in range(2) for policy in ("stock", "pyramidkv")
    ]
    rows = json.loads((tmp_path / "pressure.json").read_text())["rows"]
    assert [row["pool_prompts"] for row in rows] == [4.0, 4.0, 1.5, 1.5]
    assert (tmp_path / "pressure.csv").read_text().count("\n") == 5


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


def test_pools_are_of_equal_bytes() -> None:
    job = Job(SHAPES["small"], 2048, 64, 32, 4.0)
    assert job.pool_bytes == (4 * 132 + 1) * 8 * 16 * 2 * 4 * 64 * 2
    assert job.prompts(1) == job.prompts(1) != job.prompts(2)
    warm_up = job.prompts(WARM_UP_SEED)[0]
    assert all(warm_up not in job.prompts(repetition) for repetition in range(5))
    assert {len(prompt) for prompt in job.prompts(1)} == {2048}
    assert job.engine_arguments(Variant("full", None))["max_num_batched_tokens"] == 2048 + 32


@pytest.mark.parametrize(
    ("engine_args", "token_bytes"),
    [
        ({}, 2 * 4 * 64 * 2),
        ({"dtype": "float32"}, 2 * 4 * 64 * 4),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, 2 * 4 * 64 * 2),
        ({"kv_cache_dtype": "fp8"}, 2 * 4 * 64),
    ],
)
def test_a_pool_is_sized_by_the_type_that_is_served(
    engine_args: dict[str, Any], token_bytes: int
) -> None:
    shape = SHAPES["small"].served_as(engine_args)
    job = Job(shape, 2048, 64, 32, 4.0, engine_args)
    assert job.pool_bytes == (4 * 132 + 1) * 8 * 16 * token_bytes
    made = job.engine_arguments(Variant("full", None))
    assert made["kv_cache_memory_bytes"] == job.pool_bytes
    # A variant with a type of its own has as many bytes, and as many blocks as go into them.
    small = Variant("full", None, "fp8")
    assert job.block_bytes(small) == 16 * 2 * 4 * 64
    assert job.pool_blocks(small, 4.0) == 4 * 132 * 8 * token_bytes // (2 * 4 * 64)


@pytest.mark.parametrize("engine_args", [{"dtype": "bf16"}, {"kv_cache_dtype": "int3"}])
def test_an_unknown_type_is_refused(engine_args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not one of"):
        SHAPES["small"].served_as(engine_args)


def test_flags_of_a_server() -> None:
    arguments = {"enforce_eager": True, "enable_prefix_caching": False, "seed": 0, "a_b": {"c": 1}}
    assert flags_of(arguments) == [
        *("--enforce-eager", "--no-enable-prefix-caching", "--seed", "0", "--a-b", '{"c": 1}')
    ]


def test_what_is_kept_of_a_result_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {f"p{p}_{m}_ms": float(p) for p in (50, 90, 95, 99) for m in ("ttft", "tpot")}
    monkeypatch.setattr(server_load, "_vllm_bench_serve", lambda *_: result)
    prepared: Any = SimpleNamespace(model="model")
    server: Any = SimpleNamespace(url="http://127.0.0.1:9", has_ended=False)
    result["output_throughput"] = 10.0

    def made(requests: int, rate: float) -> dict[str, Any]:
        result["completed"] = requests
        job = Job(SHAPES["small"], 256, 8, requests, 4.0)
        return load(server, prepared, Variant("stock", None), job, rate, 0)

    many, few = made(20, 2.0), made(19, float("inf"))
    assert (many["ttft_p50_ms"], many["tpot_p99_ms"], many["request_rate"]) == (50.0, 99.0, 2.0)
    assert many["output_tokens_per_s"] == 10.0 and many["pool_prompts"] == 4.0
    assert few["request_rate"] is None
    assert few["ttft_p90_ms"] == 90.0 and "ttft_p99_ms" not in few


@pytest.mark.parametrize(("pool", "blocks"), [(1.0, 21), (4.0, 4 * 17)])
def test_a_server_has_room_for_a_text_that_is_a_little_longer(pool: float, blocks: int) -> None:
    job = Job(SHAPES["small"], 256, 8, 1, pool)
    # vLLM keeps one block of a layer back, and starts if one of the longest fits into the others.
    expected = (blocks + 1) * 8 * job.shape.block_bytes
    full, h2o = Variant("full", None), Variant("h2o", "12%")
    assert with_slack(job, [full]) == {"max_model_len": 328, "kv_cache_memory_bytes": expected}
    # All servers have the memory that the one with the most beside its blocks needs.
    most = max(expected, (21 + 1) * 8 * (job.shape.block_bytes + 256))
    assert with_slack(job, [full, h2o])["kv_cache_memory_bytes"] == most
    given = replace(job, engine_args={"kv_cache_memory_bytes": 5, "seed": 1})
    assert with_slack(given, [full]) == {"max_model_len": 328, "kv_cache_memory_bytes": 5}


class Metrics(BaseHTTPRequestHandler):
    """Answers as a server does; `lines` are those that it says next, the last of them for ever."""

    lines: list[str]

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        body = "# TYPE vllm_pyramid:evictions counter\n"
        body += self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def metrics(*lines: str) -> Iterator[str]:
    """The address of a server that says these lines, one set after the other."""
    handler = type("Handler", (Metrics,), {"lines": list(lines)})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_evictions_of_a_server_are_read_past_any_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    counted = 'vllm_pyramid:evictions_total{engine="0"} 3.0\n'
    counted += 'vllm_pyramid:evictions_created{engine="0"} 1.7e+09\n'
    counted += 'vllm_pyramid:evictions_total{engine="1"} 4.0\n'
    with metrics(counted) as url:
        assert evictions(url) == 7
    with pytest.raises(ChildError, match="does not say what it has evicted"):
        evictions(url)


def _gauges(running: tuple[int, int], blocks: Sequence[int] = ()) -> str:
    lines = [
        f'vllm:num_requests_running{{engine="{engine}",model_name="m"}} {count}.0'
        for engine, count in enumerate(running)
    ]
    lines += [
        f'vllm_pyramid:blocks_held{{engine="0",layer="{layer}"}} {count}.0'
        for layer, count in enumerate(blocks)
    ]
    return "\n".join(lines) + "\n"


def _seen(*lines: str) -> Gauges:
    """What is seen of a server that has said all of its lines."""
    with metrics(*lines) as url, Gauges(url, interval=0.01) as seen:
        end = time.monotonic() + 10
        while seen.looks < len(lines) and time.monotonic() < end:
            time.sleep(0.01)
    assert seen.looks >= len(lines)
    return seen


def test_the_most_that_a_server_was_seen_to_hold() -> None:
    """Sums over engines and layers, each at its greatest, of what a server says."""
    seen = _seen(_gauges((0, 1), [7, 5]), _gauges((2, 3), [4, 4]), _gauges((0, 0), [0, 0]))
    assert seen.largest == {"resident_max": 5, "peak_blocks": 12}
    stock = _seen(_gauges((0, 3)))
    assert stock.largest == {"resident_max": 3}
    idle = _seen(_gauges((0, 0), [0, 0]))
    assert idle.largest == {}


def test_a_server_that_does_not_answer_is_not_seen() -> None:
    with metrics(_gauges((1, 1), [3])) as url:
        pass
    with Gauges(url, interval=0.01) as seen:
        time.sleep(0.1)
    assert (seen.largest, seen.looks) == ({}, 0)


def test_the_log_of_a_server_that_ends_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "server.py"
    monkeypatch.setattr(server_load, "VLLM", [sys.executable, str(program)])

    def complain(*_: Any) -> None:
        raise ChildError("the client complains")

    monkeypatch.setattr(server_load, "_vllm_bench_serve", complain)
    prepared: Any = SimpleNamespace(model="model")
    job, stock = Job(SHAPES["small"], 64, 8, 1, 1.0), Variant("stock", None)
    program.write_text("import time; time.sleep(60)")
    with (
        Server("model", [], "full", {}) as server,
        pytest.raises(ChildError, match=r"^the client complains$"),
    ):
        load(server, prepared, stock, job, 1.0, 0)
    program.write_text("print('the cause'); exit(3)")
    with Server("model", [], "full", {}) as server:
        with pytest.raises(ChildError, match=r"'full' failed(?s:.*)status 3(?s:.*)the cause"):
            server.wait_until_ready()
        with pytest.raises(ChildError, match=r"^the client complains(?s:.*)the cause"):
            load(server, prepared, stock, job, 1.0, 0)


def test_cost_on_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cost", "--prompt-lens", "8192", "--budget", "12%", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[3].startswith("| 8,192 | 12% |")


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
def test_all_engines_run_one_attention(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    capability: tuple[int, int] | None,
    given: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    """On sm_100 vLLM alone would take another than it can under a policy."""
    from vllm_pyramid.tools.bench.prepare import _with_one_attention

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert _with_one_attention(given) == expected
    said = capsys.readouterr().out.splitlines()
    assert len(said) == (given != expected)
