# SPDX-License-Identifier: Apache-2.0
"""The type of the weights on a processor without bfloat16 products, where the user chose none.

With AVX2 alone, products in bfloat16 take three times as long as those in float32, with AVX-512
alone twice as long. There weights become float32 where they are small compared with the memory that
is free; the KV cache keeps its 16 bits. `--dtype` wins.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from vllm.config import ModelConfig
from vllm.config.cache import CacheDType
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_pyramid.compat.cpu_resources import available_host_memory, free_by_node
from vllm_pyramid.compat.platform.defaults import chosen_for_children, replicas_here, share_is_vllms
from vllm_pyramid.frontend.layer_kinds import has_states

logger = init_logger(f"vllm.{__name__}")

# What was decided, and for which model: this engine's processes that start later see less memory.
# vLLM warns of variables of its prefix that it does not know.
DECIDED = "PYRAMID_CPU_WEIGHTS"
FLOAT32, AS_STORED = "float32", "as-stored"
# Of what is free: the rest is for the KV cache and activations.
SHARE_OF_FREE = 0.5
_CACHES: dict[str | torch.dtype, CacheDType] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
# What the library that multiplies may use at most, and the values without products of bfloat16.
_CEILING = "ONEDNN_MAX_CPU_ISA"
_LOW_CEILINGS = {
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"),
}


def has_bfloat16_products() -> bool:
    """Return whether the processor multiplies bfloat16 by itself; True where it is not x86."""
    found = torch.cpu.get_capabilities()
    if found.get("architecture") != "x86_64":
        return True
    if os.environ.get(_CEILING, "").upper() in _LOW_CEILINGS:
        return False
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def choose_weights(args: EngineArgs, model_config: ModelConfig) -> bool:
    """Choose float32 for the weights where that is faster, `args` leave it open and memory allows.

    Returns:
        Whether `args` were changed, so that `model_config`, made from them, does not fit any more.
    """
    cache = _CACHES.get(model_config.dtype)
    if args.dtype != "auto" or cache is None or model_config.quantization is not None:
        return False
    if has_bfloat16_products() or not _is_alone(args):
        return False
    decided, _, model = os.environ.get(DECIDED, "").partition(" ")
    if model != model_config.model:
        decided = _decide(args, model_config, cache)
        chosen_for_children(DECIDED, f"{decided} {model_config.model}")
    if decided != FLOAT32:
        return False
    args.dtype = "float32"
    if args.kv_cache_dtype == "auto":
        args.kv_cache_dtype = cache
    return True


def _is_alone(args: EngineArgs) -> bool:
    """Return whether all workers, which compute with one type, are on this host."""
    return (
        args.nnodes == 1
        and args.distributed_executor_backend != "ray"
        and replicas_here(args) == args.data_parallel_size
    )


def _decide(args: EngineArgs, model_config: ModelConfig, stored: str) -> str:
    """`FLOAT32` or `AS_STORED`, and say why in the log."""
    slow = "this processor has no bfloat16 products"
    if has_states(model_config.hf_text_config, model_config.max_model_len):
        logger.info(
            "weights: stored and computed in %s, which is slow: %s. State layers of this model "
            "need 16-bit kernels; --dtype float32 may be faster",
            stored,
            slow,
        )
        return AS_STORED
    size, free = float32_bytes(model_config), _free(args)
    size = None if size is None else size * args.data_parallel_size
    if size is None or size > SHARE_OF_FREE * free:
        takes = "an unknown size" if size is None else f"{size / 2**30:.1f} GiB"
        logger.info(
            "weights: stored and computed in %s, which is slow: %s. float32 would take %s, more "
            "than half of the %.1f GiB that are free; --dtype float32 forces it",
            stored,
            slow,
            takes,
            free / 2**30,
        )
        return AS_STORED
    logger.info(
        "weights: converted to float32 (%.1f of %.1f GiB free), KV cache in %s: %s. Set --dtype to "
        "choose another type",
        size / 2**30,
        free / 2**30,
        stored if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        slow,
    )
    return FLOAT32


def _free(args: EngineArgs) -> float:
    """Return the free bytes of the workers' nodes, without a KV cache whose size was given."""
    workers = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size
    free: float = min(available_host_memory(), sum(free_by_node()[:workers]))
    cache = args.kv_cache_memory_bytes or 0
    if not cache and (space := os.environ.get("VLLM_CPU_KVCACHE_SPACE")):
        cache = int(float(space) * 2**30)
    if not cache and not share_is_vllms(args):
        free = min(free, args.gpu_memory_utilization * psutil.virtual_memory().total)
    return max(0.0, free - cache * workers)


def float32_bytes(model_config: ModelConfig) -> int | None:
    """Return the bytes of a model's weights as float32, or None.

    They are the larger of what files and configuration say: a folder may be downloaded in part.
    """
    config = model_config.hf_text_config
    stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
    files = _file_bytes(model_config) * (1 if stored == "float32" else 2)
    return max(files, 4 * _parameters(config)) or None


def _file_bytes(model_config: ModelConfig) -> int:
    """Return the bytes of the weights' files in the model's folder, or of those downloaded."""
    folder = Path(model_config.model)
    if not folder.is_dir():
        try:
            found = try_to_load_from_cache(
                model_config.model, "config.json", revision=model_config.revision
            )
        except HFValidationError:  # a bucket, or what another loader reads
            return 0
        if not isinstance(found, str):
            return 0
        folder = Path(found).parent
    for kind in ("*.safetensors", "*.bin"):
        # Mistral's models have all weights a second time, under this name.
        paths = [path for path in folder.glob(kind) if not path.name.startswith("consolidated")]
        if paths := paths or list(folder.glob(kind)):
            return sum(path.stat().st_size for path in paths)
    return 0


def _parameters(config: Any) -> int:
    """Weights of a decoder's matrices by its configuration; 0 where that does not say."""

    def read(*names: str) -> int:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int)), 0)

    hidden, layers = read("hidden_size"), read("num_hidden_layers")
    heads = read("num_attention_heads")
    if not (hidden and layers and heads):
        return 0
    head_size = read("head_dim") or hidden // heads
    heads_of_all = 2 * heads + 2 * (read("num_key_value_heads") or heads)
    experts = read("num_experts", "num_local_experts", "n_routed_experts")
    mlp = read("moe_intermediate_size", "intermediate_size") if experts else 0
    mlp = experts * mlp or read("intermediate_size")
    tables = 1 if getattr(config, "tie_word_embeddings", False) else 2
    return hidden * (layers * (head_size * heads_of_all + 3 * mlp) + tables * read("vocab_size"))
