# SPDX-License-Identifier: Apache-2.0
"""From the options to a job and its variants. What cannot run is refused before anything starts."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from vllm_pyramid.compat.versions import runs_without_plugins
from vllm_pyramid.policy.capabilities import Feature
from vllm_pyramid.policy.request_keys import RESUME
from vllm_pyramid.tools.bench.job import STOCK_OFFLOADING, Job, Variant, variants_of
from vllm_pyramid.tools.bench.options import EngineOptions, Prefix
from vllm_pyramid.tools.bench.shapes import SHAPES, Shape, named_shape, shape_of_config, write_model

BUILT_IN = "built-in"


@dataclass(frozen=True)
class Prepared:
    """All that a measure needs.

    Attributes:
        variants: the first one is the baseline.
        model: folder or name. random: whether its weights are made up.
        threads: of each engine; None where a GPU computes.
    """

    job: Job
    variants: tuple[Variant, ...]
    model: str
    random: bool
    threads: int | None


def prepare(options: EngineOptions, folder: Path) -> Prepared:
    """Return what the options describe; ValueError names the flag to change.

    `folder` is for the files of a model with random weights.
    """
    return with_job(options, *model_of(options, folder))


def model_of(options: EngineOptions, folder: Path) -> tuple[str, Shape]:
    """Return the folder or name of the model, and the shape that is served."""
    if options.model in SHAPES:
        shape = named_shape(options.model, options.layers)
        write_model(shape, folder)
        model = str(folder)
    else:
        if options.layers is not None:
            raise ValueError(
                f"--layers is for the shapes {', '.join(SHAPES)}, not {options.model!r}"
            )
        from vllm_pyramid.tools.demo import model_path

        model = str(model_path()) if options.model == BUILT_IN else options.model
        shape = shape_of_config(model)
    return model, shape.served_as(options.engine_args)


def with_job(
    options: EngineOptions,
    model: str,
    shape: Shape,
    turn_modes: Sequence[str | None] = (None,),
    **changes: Any,
) -> Prepared:
    """Return the job and the variants of the options; `changes` are other fields of the job."""
    fields: dict[str, Any] = {
        "prompt_len": options.longest_prompt,
        "num_prompts": options.num_prompts,
        "engine_args": options.engine_args,
    }
    if isinstance(options, Prefix):
        names = ("turns", "shared_len", "concurrency", "resume")
        fields |= {name: getattr(options, name) for name in names}
        fields |= {"prefix_caching": True, "host_cache": options.host_cache or None}
    fields |= changes
    job = Job(
        shape=shape,
        output_len=options.output_len,
        pool_prompts=max(pool for pool, _ in options.rounds),
        kv_swap_space=options.kv_swap_space,
        **fields | {"engine_args": _with_one_attention(fields["engine_args"])},
    )
    variants = variants_of(options.policies, options.budgets, job.prompt_len, shape, turn_modes)
    _check_variants(options, job, variants)
    random = options.model in SHAPES
    return Prepared(job, tuple(variants), model, random, _threads(options.threads))


def _with_one_attention(engine_args: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with which all engines run one attention, stock vLLM's included."""
    import torch

    named = "attention_backend" in engine_args
    if named or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10:
        return engine_args
    print(
        "attention: FLASH_ATTN in all engines, also of stock vLLM, which prefers FlashInfer on "
        "this device; attention_backend in --engine-args says otherwise"
    )
    return {**engine_args, "attention_backend": "FLASH_ATTN"}


def _check_variants(options: EngineOptions, job: Job, variants: Sequence[Variant]) -> None:
    """Raise ValueError unless every variant can take part and needs no other argument."""
    if job.kv_swap_space is not None and not any(map(job.v_on_host, variants)):
        raise ValueError(
            "--kv-swap-space is memory for V, which none of the policies keeps there: leave it "
            "out, or add kcache or a .yaml file with `values: host`"
        )
    offloads = any(variant.policy == STOCK_OFFLOADING for variant in variants)
    if offloads and current_platform.is_cpu():
        raise ValueError(
            f"{STOCK_OFFLOADING}: vLLM's --kv-offloading-size is for GPUs, and this is a CPU: "
            "leave it out of --policies"
        )
    if offloads and job.host_cache is None:
        raise ValueError(
            f"{STOCK_OFFLOADING} takes part in `bench prefix` with --host-cache: leave it out"
        )
    for variant in variants:
        resumes = job.resume or variant.turn_mode == RESUME
        memory = job.memory(variant) if resumes else None
        if memory and (reason := memory.policy.why_not(Feature.KV_TURNS)) is not None:
            flag = "--resume" if job.resume else f"--turn-modes {variant.turn_mode}"
            raise ValueError(f"{flag} and {memory.policy.name}: {reason}; leave out one of them")
    if any(variant.is_stock for variant in variants) and not runs_without_plugins():
        raise ValueError(
            "this vLLM was built for CUDA and runs on this machine's CPU with vllm-pyramid's "
            "attention alone: leave stock out of --policies, or install a CPU build of vLLM"
        )
    for variant in variants:
        for pool in options.pools:
            job.check_room(variant, pool)


def _threads(given: int | None) -> int | None:
    """Return the threads of each engine; None where a GPU computes."""
    import torch

    if torch.cuda.is_available():
        if given is not None:
            raise ValueError("--threads is for engines on the CPU; here a GPU computes")
        return None
    variable = os.environ.get("OMP_NUM_THREADS", "")
    default = int(variable) if variable.isdigit() else 0
    return given or default or len(os.sched_getaffinity(0))


def processor() -> str:
    """Return the names of the processor and of the GPU, if there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    cores = f"{name}, {len(os.sched_getaffinity(0))} cores"
    import torch

    return f"{torch.cuda.get_device_name()}; {cores}" if torch.cuda.is_available() else cores
