# SPDX-License-Identifier: Apache-2.0
"""The folder of a host cache: which of its files fit this engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

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


_WHOLE = 1 << 20  # bytes of the files that are read whole
_SAMPLE = 64  # bytes of a sample
_SAMPLES = 256  # of a large file that names no tensors
_LENGTH = 8  # bytes that hold the length of a safetensors header
_LONGEST_HEADER = 100_000_000


def weight_samples(folder: Path) -> list[tuple[str, int, int, str]]:
    """Return name, size, time and a hash of samples for each file below a folder, links followed.

    Of a safetensors file these are its header, and the first, middle and last bytes of each tensor;
    small files are read whole; of other files samples are taken at equal distances. The time of a
    file tells weights that were changed where no sample lies.
    """
    found, seen = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()  # a link that leads back
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(parent, name)
            if path.is_file():
                stat = path.stat()
                sample = _digest(path, stat.st_size)
                name = str(path.relative_to(folder))
                found.append((name, stat.st_size, stat.st_mtime_ns, sample))
    return sorted(found)


def _digest(path: Path, size: int) -> str:
    digest = sha256()
    with path.open("rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
        else:
            for start, count in _places(file, size, path.suffix == ".safetensors"):
                file.seek(start)
                digest.update(file.read(count))
    return digest.hexdigest()


def _places(file: BinaryIO, size: int, has_header: bool) -> Iterator[tuple[int, int]]:
    """Yield start and length of what is read of a large file."""
    header = int.from_bytes(file.read(_LENGTH), "little") if has_header else 0
    if not 0 < header < min(size - _LENGTH, _LONGEST_HEADER):
        yield from ((size * index // _SAMPLES, _SAMPLE) for index in range(_SAMPLES))
        yield max(size - _SAMPLE, 0), _SAMPLE
        return
    tensors = json.loads(file.read(header))
    first = _LENGTH + header
    yield 0, first
    for tensor in tensors.values():
        start, end = tensor.get("data_offsets", (0, 0))
        for place in (start, (start + end) // 2, max(end - _SAMPLE, start)):
            yield first + place, min(_SAMPLE, end - place)
