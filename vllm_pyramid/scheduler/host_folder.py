# SPDX-License-Identifier: Apache-2.0
"""The folder of a host cache: which of its files fit this engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from vllm_pyramid.compat.cpu_resources import units_of_processor
from vllm_pyramid.compat.versions import vllm_version
from vllm_pyramid.kv_cache.bundle_file import FORMAT
from vllm_pyramid.kv_cache.host_files import HostFiles
from vllm_pyramid.kv_cache.spec import HostSlots, LayerKVCacheSpec
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.scheduler.weight_samples import weight_samples
from vllm_pyramid.version import __version__

_DIGITS = 32


def files_of(
    config: VllmConfig,
    settings: ServedSettings,
    specs: Sequence[LayerKVCacheSpec],
    slots: HostSlots,
) -> HostFiles | None:
    """Open the folder of a host cache; None if none was given.

    Args:
        specs: of the layers that evict. slots: of the host memory.

    Raises:
        ValueError: as `HostFiles` says, or the weights cannot be told from others.
    """
    if settings.host_cache_dir is None:
        return None
    folder = Path(settings.host_cache_dir)
    parallel = config.parallel_config
    if parallel.data_parallel_index:  # each replica has its own
        folder /= f"replica-{parallel.data_parallel_index}"
    ranks, largest = parallel.tensor_parallel_size, slots.count * slots.num_bytes
    limit = settings.host_cache_dir_bytes or ranks * largest
    stages = specs[0].pipeline()
    parts = [slice(None)] * ranks
    if len(stages) > 1:
        ends = zip(stages.starts, stages.ends, strict=True)
        parts = [slice(start, end) for start, end in ends for _ in range(ranks)]
    namespace = namespace_of(config, settings, specs)
    return HostFiles(str(folder), namespace, slots.block_bytes, limit, largest, parts=parts)


def namespace_of(
    config: VllmConfig, settings: ServedSettings, specs: Sequence[LayerKVCacheSpec]
) -> str:
    """Return a name of all that the bytes of a bundle depend on, apart from the bundle's name.

    The weights are told by the commit of their repository, or by the names, sizes, times and
    samples of the files in their folder (`weight_samples`).
    """
    model, cache = config.model_config, config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    facts = {
        **_facts(config, settings, specs),
        "model": model.compute_hash(),
        "architecture": model.hf_config.to_json_string(),
        "weights": _weights(model, "--kv-host-cache-dir"),
        "settings": [model.hf_config_path, *_multimodal(model)],
        "hashes": [algorithm, resolve_none_hash_seed(get_hash_fn_by_name(algorithm))],
        "device": [current_platform.device_type, _device(), settings.backend],
    }
    return _name_of(facts)


def namespace_of_engines(
    config: VllmConfig, settings: ServedSettings, specs: Sequence[LayerKVCacheSpec]
) -> str:
    """Return a name that engines on several hosts share, where they read one another's blocks.

    Paths and times of files may differ between hosts, and so may the models of their GPUs: the
    numbers of two GPUs differ in their last bits, and the layout of a block does not. So may the
    numbers of tensor-parallel ranks: each part of a state says which KV heads it has.

    Raises:
        ValueError: the weights cannot be told from others.
    """
    model = config.model_config
    architecture = {**model.hf_config.to_dict(), "_name_or_path": None}
    on_cpu = current_platform.device_type == "cpu"
    weights = _weights(model, "--kv-transfer-config")
    of_head = [replace(spec, num_kv_heads=1, num_head_slots=None) for spec in specs]
    facts = {
        **_facts(config, settings, of_head),
        "ranks": "any",
        "architecture": json.dumps(architecture, sort_keys=True, default=str),
        "weights": [one[:2] + one[3:] if isinstance(one, tuple) else one for one in weights],
        "quantization": str(model.quantization),
        "device": [current_platform.device_type, _device() if on_cpu else "", settings.backend],
    }
    return _name_of(facts)


def _facts(
    config: VllmConfig, settings: ServedSettings, specs: Sequence[LayerKVCacheSpec]
) -> dict[str, Any]:
    """Return what blocks depend on, apart from the model's files and the device."""
    model, cache = config.model_config, config.cache_config
    return {
        "format": FORMAT,
        "versions": [__version__, vllm_version(), torch.__version__],
        "load": [str(config.load_config.load_format), model.seed],
        "cache": [str(spec) for spec in specs],
        "extras": [extras.made_by for extras in settings.policy.block_extras(specs[0])],
        "ranks": config.parallel_config.tensor_parallel_size,
        "types": [str(model.dtype), cache.cache_dtype],
    }


def _name_of(facts: dict[str, Any]) -> str:
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def _weights(model: Any, flag: str) -> list[Any]:
    folder = Path(model.model)
    if folder.is_dir():
        return weight_samples(folder)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit is None:
        raise ValueError(
            f"{flag}: it is not known which weights {model.model} has, so files of "
            "others could not be told from its own: give the path of a folder as the model"
        )
    return [model.model, commit]


def _multimodal(model: Any) -> list[str]:
    """Return the settings that change what is computed of images and the like."""
    settings = model.multimodal_config
    names = ("mm_processor_kwargs", "mm_encoder_attn_dtype")
    return [] if settings is None else [repr(getattr(settings, name, None)) for name in names]


def _device() -> str:
    """Return what the layout and the numbers of a cache depend on."""
    if current_platform.device_type == "cpu":
        return units_of_processor()
    return str(current_platform.get_device_name())
