# SPDX-License-Identifier: Apache-2.0
"""The stages of scripts/gpu_check.py: what they run, and what they need of the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

MATRIX = (
    "check_attention.py",
    "check_fp8.py",
    "check_lanes.py",
    "check_mass.py",
    "check_moves.py",
    "check_observed_expected.py",
    "check_page_selection.py",
    "check_pages.py",
    "check_recent.py",
    "check_scaled_rows.py",
    "check_scores.py",
    "check_tables.py",
    "check_topn.py",
    "check_vllm_rows.py",
)


@dataclass(frozen=True)
class Stage:
    """One process.

    Attributes:
        arguments: a script of this folder and its arguments, or `bench` and those of
            `vllm-pyramid bench`; empty for `numerics`, which pytest runs.
        limit: seconds after which it is ended and counts as failed.
        capability, memory_gib: what the device must have, else the stage is skipped.
        devices: how many there must be.
        alone: nothing else may run on the device meanwhile: it takes times, or vLLM measures the
            memory that is left for its cache.
        roomy: (GiB, arguments): what runs instead where the device has so much memory.
    """

    name: str
    limit: int
    arguments: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    capability: tuple[int, int] = (8, 0)
    memory_gib: int = 4
    devices: int = 1
    alone: bool = False
    roomy: tuple[int, tuple[str, ...]] | None = None

    @property
    def measures(self) -> bool:
        """Whether it measures speed, and says nothing of what is right."""
        return self.arguments[:1] in (("bench",), ("gpu_http.py",))


def fitted(stage: Stage, memory_gib: float) -> Stage:
    """The stage as it runs on a device with so much memory."""
    if stage.roomy is None or memory_gib < stage.roomy[0]:
        return stage
    return replace(stage, arguments=stage.roomy[1], roomy=None)


def engine_stages() -> list[Stage]:
    """Backends, eager and graphs, both runners; the most usual combination first.

    Then 8-bit caches, which FlashAttention has from version 3 on.
    """
    stages = [
        Stage(
            f"engine-{backend.lower()}-{mode}-{runner}",
            300,
            ("gpu_engines.py", "engine", "--backend", backend, "--mode", mode, "--runner", runner),
            (("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "v2" else "0"),),
        )
        for runner in ("v2", "v1")
        for backend in ("FLASH_ATTN", "TRITON_ATTN")
        for mode in ("eager", "graphs")
    ]
    usual = {stage.name: stage for stage in stages}
    return stages + [
        replace(
            (stage := usual[f"engine-{backend}-graphs-v2"]),
            name=f"engine-fp8-{backend}",
            arguments=(*stage.arguments, "--kv-cache-dtype", "fp8"),
            capability=capability,
        )
        for backend, capability in (("flash_attn", (9, 0)), ("triton_attn", (8, 9)))
    ]


def thinning_stages() -> list[Stage]:
    """Against Transformers in float32, which FlashAttention does not have, and in bfloat16."""
    return [
        Stage(
            f"thinning-{backend.lower()}-{dtype}-{runner}",
            300,
            ("gpu_thinning.py", "--backend", backend, "--dtype", dtype),
            (("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "v2" else "0"),),
        )
        for runner in ("v2", "v1")
        for backend, dtype in (("TRITON_ATTN", "float32"), ("FLASH_ATTN", "bfloat16"))
    ]


def start_stages() -> list[Stage]:
    """Starts with the policies of all kinds in turn; plain ones with two of them."""
    start = ("gpu_engines.py", "start")
    plain = (*start, "--policies", "none,full,pyramidkv")
    core = "VLLM_ENABLE_V1_MULTIPROCESSING"
    stages = [
        Stage("start-in-process", 300, plain, ((core, "0"),), memory_gib=16, alone=True),
        Stage("start-own-core", 300, plain, ((core, "1"),), memory_gib=16, alone=True),
    ]
    # KV heads with lengths of their own are not served by several ranks.
    kinds = "none,full,pyramidkv,xkv,h2o,pyramidinfer,select"
    on_two = (*start, "--policies", kinds, "--tensor-parallel", "2")
    stages.append(Stage("start-tp2", 900, on_two, memory_gib=16, devices=2, alone=True))
    fixed = (*start, "--cache-gib", "0.5", "--policies")
    checked = (("VLLM_GPU_SYNC_CHECK", "error"),)
    stages += [
        Stage("sync-check", 600, (*fixed, "none,full,pyramidkv,xkv,h2o"), checked),
        Stage("sync-check-kinds", 600, (*fixed, "full,pyramidinfer,select,duoattention"), checked),
    ]
    on_host = (*fixed, "none,full,kcache,snapkv+host", "--swap-space", "2")
    stages.append(Stage("host-values", 600, on_host, ((core, "0"),)))
    stages.append(Stage("host-values-sync", 600, on_host, checked))
    return stages


# Weights take 15.0 GiB, activations and graphs some 4; a token has 128 KiB of K and V, 64 in half
# of the layers. Engines that are alive at once share nine tenths of the memory.
LARGE, SMALL = 120, 70  # GiB: an H200 has 140, an H100 78


@dataclass(frozen=True)
class Bench:
    """A job of `vllm-pyramid bench throughput` on the shape of Llama 3 8B.

    Attributes:
        policies: of engines alive at once, `stock` first. pool: whole requests that each has
            room for.
        layers: where the shape has fewer, so that the longest prompts find room.
    """

    policies: str
    prompt: int
    requests: int
    pool: int
    output: int = 256
    layers: int | None = None

    def arguments(self, *more: str) -> tuple[str, ...]:
        """The command line behind `vllm-pyramid`."""
        numbers = {
            "--prompt-len": self.prompt,
            "--output-len": self.output,
            "--num-prompts": self.requests,
            "--pool-prompts": self.pool,
            **({"--layers": self.layers} if self.layers is not None else {}),
        }
        found = [text for flag, number in numbers.items() for text in (flag, str(number))]
        common = ("--model", "llama-3-8b", "--policies", self.policies, "--budget", "12%")
        return ("bench", "throughput", *common, *found, *more)


THREE, PAIR = "stock,full,pyramidkv", "stock,pyramidkv"
# Name, what a large card runs, what a small one runs, flags.
BENCHES: tuple[tuple[str, Bench, Bench, tuple[str, ...]], ...] = (
    ("decode-8k", Bench(THREE, 8192, 72, 15), Bench(PAIR, 8192, 72, 12), ("--decode-only",)),
    ("decode-32k", Bench(THREE, 32768, 12, 4), Bench(PAIR, 32768, 12, 3), ("--decode-only",)),
    ("throughput-8k", Bench(THREE, 8192, 48, 15), Bench(PAIR, 8192, 48, 12), ()),
    ("throughput-32k", Bench(THREE, 32768, 12, 4), Bench(PAIR, 32768, 12, 3), ()),
    *(
        (f"throughput-auto-{name}", bench, replace(bench, pool=small), ())
        for name, small, bench in (
            ("1k", 80, Bench("stock,auto", 1024, 128, 120, 128)),
            ("8k", 12, Bench("stock,auto", 8192, 48, 15)),
        )
    ),
    (
        "fp8-throughput-8k",
        Bench("stock@fp8,auto@fp8,pyramidkv@fp8", 8192, 48, 30),
        Bench("stock@fp8,auto@fp8", 8192, 48, 24),
        (),
    ),
    *(
        (f"decode-select-{name}", bench, small, ("--decode-only",))
        for name, bench, small in (
            ("8k", Bench("stock,select", 8192, 16, 17), Bench("stock,select", 8192, 12, 13)),
            (
                "32k",
                Bench("stock,select", 32768, 8, 9),
                Bench("stock,select", 32768, 8, 9, layers=16),
            ),
            (
                "128k",
                Bench("stock,select", 130560, 2, 2),
                Bench("stock,select", 130560, 2, 2, layers=16),
            ),
        )
    ),
)


def bench_stages() -> list[Stage]:
    """Engines side by side, as many requests as the card has room for."""
    return [
        Stage(
            name,
            600,
            small.arguments("--repetitions", "3", *flags),
            memory_gib=SMALL,
            alone=True,
            roomy=(LARGE, large.arguments("--repetitions", "3", *flags)),
        )
        for name, large, small, flags in BENCHES
    ]


def http_stages() -> list[Stage]:
    """Two servers with vLLM's defaults at once, each in nearly half of the memory."""
    http = ("gpu_http.py", "--shape", "llama-3-8b")
    long = ("--jobs", "8192:256:64,1024:128:128,32768:256:12", "--profile")
    short = ("--jobs", "8192:256:32,1024:128:64")
    fp8 = ("--kv-cache-dtype", "fp8")
    return [
        Stage("http", 420, (*http, *long), memory_gib=SMALL, alone=True),
        Stage("fp8-http", 300, (*http, *short, *fp8), memory_gib=SMALL, alone=True),
    ]


STAGES = (
    Stage("numerics", 500, memory_gib=16),
    Stage("kernels", 300, ("gpu_kernels.py",), memory_gib=12, alone=True),
    *engine_stages(),
    *thinning_stages(),
    *start_stages(),
    *bench_stages(),
    *http_stages(),
)


def lacking(stage: Stage, device: dict[str, Any]) -> str | None:
    """What the device lacks for a stage, or None."""
    if tuple(device["capability"]) < stage.capability:
        return f"needs compute capability {stage.capability}, this is {device['capability']}"
    if device["devices"] < stage.devices:
        return f"needs {stage.devices} devices, here are {device['devices']}"
    if device["memory_gib"] < stage.memory_gib:
        return f"needs {stage.memory_gib} GiB of device memory, this has {device['memory_gib']}"
    return None
