# SPDX-License-Identifier: Apache-2.0
"""From the arguments of the command to what is to be measured; whatever cannot be is refused."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import Any

from vllm_pyramid.bench.output import processor
from vllm_pyramid.bench.plan import KVPRESS, Plan, Variant, default_threads, variants_of
from vllm_pyramid.bench.shapes import SHAPES, named_shape, shape_of_config, write_model
from vllm_pyramid.command_parts import names
from vllm_pyramid.compat.versions import runs_without_plugins, vllm_version
from vllm_pyramid.config import parse_engine_args
from vllm_pyramid.policy import load_policy
from vllm_pyramid.store import identity_of_model

__all__ = ["fractions", "identity_of", "plan_of", "pools_of", "threads_of", "variants_asked"]

BUILT_IN = "built-in"


def plan_of(args: argparse.Namespace, folder: Path) -> tuple[Plan, str, bool]:
    """The job, the model for vLLM, and whether its weights are made up.

    Args:
        folder: for a model that is made up.

    Raises:
        ValueError: the job cannot be.
    """
    random = args.model in SHAPES
    if random:
        shape = named_shape(args.model, args.layers)
        write_model(shape, folder)
        model = str(folder)
    else:
        if args.layers is not None:
            raise ValueError(f"--layers is for the shapes {', '.join(SHAPES)}, not {args.model!r}")
        from vllm_pyramid.demo import model_path

        model = str(model_path()) if args.model == BUILT_IN else args.model
        shape = shape_of_config(model)
    pool = args.pool_prompts
    if args.measure == "pressure":
        pool = max(pools_of(args))
    plan = Plan(
        shape=shape,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        num_prompts=args.num_prompts,
        pool_prompts=args.num_prompts if pool is None else pool,
        engine_args=parse_engine_args(args.engine_args),
        kv_swap_space=args.kv_swap_space,
    )
    return plan, model, random


def fractions(text: str, what: str) -> tuple[float, ...]:
    """The numbers above 0 of a list such as `0.5,2`; `inf` is one.

    Raises:
        ValueError: there are none, or one is something else.
    """
    found = []
    for name in names(text, what):
        try:
            value = float(name)
        except ValueError:
            value = 0.0
        if not value > 0:
            raise ValueError(f"{what}: {name!r} is not a number above 0")
        found.append(value)
    return tuple(found)


def pools_of(args: argparse.Namespace) -> tuple[float, ...]:
    """Whole requests that the caches of `pressure` have room for.

    Raises:
        ValueError: not numbers, or too small or endless a pool.
    """
    pools = fractions(args.pools, "--pools")
    if min(pools) < 1 or not isfinite(max(pools)):
        raise ValueError("--pools: a pool must hold at least one whole request: give 1 or more")
    return pools


def variants_asked(args: argparse.Namespace, plan: Plan) -> list[Variant]:
    """What is to be compared.

    Raises:
        ValueError: what was asked for cannot take part, or needs another argument.
    """
    policies = names(args.policies, "--policies")
    budgets = names(args.budgets, "--budgets")
    variants = variants_of(policies, budgets, plan.prompt_len, plan.shape.layers)
    if plan.kv_swap_space is not None and not any(variant.swaps_v for variant in variants):
        raise ValueError(
            "--kv-swap-space is memory for V, which none of the policies keeps there: leave it "
            "out, or add kcache or a .yaml file with `swap_v: true`"
        )
    if any(variant.is_stock for variant in variants) and not runs_without_plugins():
        raise ValueError(
            "this vLLM was built for CUDA and runs on this machine's CPU with vllm-pyramid's "
            "attention alone: leave stock out of --policies, or install a CPU build of vLLM"
        )
    if args.measure != "latency":  # servers get room for texts that are a little longer
        pools = pools_of(args) if args.measure == "pressure" else (plan.pool_prompts,)
        for variant in variants:
            for pool in pools:
                plan.check_room(variant, pool)
    peers = [variant for variant in variants if variant.is_peer]
    if peers and args.measure != "throughput":
        raise ValueError(
            f"{peers[0].policy} generates outside of vLLM: it has no pool, queue or server, and "
            "takes part in `bench throughput` alone"
        )
    if any(peer.policy.startswith(KVPRESS) for peer in peers) and not args.peer_python:
        raise ValueError(
            "kvpress needs another Transformers than vLLM: give --peer-python PATH, the Python of "
            "an environment with kvpress 0.5.5 (scripts/kvpress_parity/run.sh makes one in "
            "build/kvpress-venv)"
        )
    if args.peer_python and not os.access(args.peer_python, os.X_OK):
        raise ValueError(f"--peer-python {args.peer_python} is no program that can be run")
    return variants


def threads_of(args: argparse.Namespace) -> int | None:
    """Of each engine; None where a GPU computes."""
    import torch

    if torch.cuda.is_available():
        if args.threads is not None:
            raise ValueError("--threads is for engines on the CPU; here a GPU computes")
        return None
    return default_threads() if args.threads is None else int(args.threads)


def identity_of(
    args: argparse.Namespace, plan: Plan, variants: Sequence[Variant], model: str
) -> list[Any]:
    """All that the results of a run depend on beside its pools and repetitions.

    Args:
        model: a made-up one's name, else the folder or name that vLLM is given.
    """
    policies = {variant.policy for variant in variants if variant.kv_policy is not None}
    texts = {name: load_policy(name).model_dump_json() for name in sorted(policies)}
    programs = ("torch", "transformers")
    versions = {name: metadata.version(name) for name in programs} | {"vllm": vllm_version()}
    compared = [asdict(variant) for variant in variants]
    where = [processor(), threads_of(args), args.peer_python, versions]
    return [identity_of_model(model), args.measure, asdict(plan), compared, texts, where]
