# SPDX-License-Identifier: Apache-2.0
"""What of an engine does not work with any KV policy: rows of the table of capabilities."""

from __future__ import annotations

from vllm_pyramid.compat.backend_names import BACKENDS, FP8_CACHES, SCALED_ROWS
from vllm_pyramid.policy.capabilities import Feature, Unsupported, refusals

CACHE_TYPES = ("auto", "bfloat16", "float16", "float32", *FP8_CACHES, *SCALED_ROWS)
# Ways to draft: without a cache of their own, or with one that is never evicted from.
DRAFTERS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")

_UNTRIED = "it was not tried together with eviction"
_PREFIXES = "it stores what prefix caching finds"

_REFUSED: Unsupported = {
    Feature.KV_CONNECTOR: (
        "other connectors name blocks by their places in one table of all layers, and here every "
        "layer has a table, of which an eviction gives the front back",
        "use PyramidConnector between engines, and --kv-host-cache for whole prompts outside the "
        "device",
    ),
    (Feature.HANDOVER, Feature.PIPELINE): "blocks of several pipeline stages are not handed over",
    (Feature.HANDOVER, Feature.DATA_PARALLEL): (
        "replicas would serve their states at the same address",
        "start a server for each replica",
    ),
    (Feature.HANDOVER, Feature.SEVERAL_HOSTS): "workers serve states at the address of one host",
    (Feature.HANDOVER, Feature.OTHER_LAYERS): "their windows and states are not handed over yet",
    (Feature.HANDOVER, Feature.DRAFTS): "it was not tried with drafts",
    (Feature.HANDOVER, Feature.HOST_CACHE): "they were not tried together",
    (Feature.HANDOVER, Feature.LORA): (
        "an adapter is known by its name, which another one may have in the other engine"
    ),
    (Feature.HANDOVER, Feature.TRACE): "a trace would lack the evictions of another engine",
    (Feature.HANDOVER, Feature.SHADOW): "they were not tried together",
    Feature.KV_OFFLOADING: (
        "its connector names blocks by their places in one table of all layers, and here every "
        "layer has a table, of which an eviction gives the front back",
        "use --kv-host-cache",
    ),
    (Feature.PIPELINE, Feature.ASYNC_SCHEDULING): (
        "they were not tried together",
        "leave --async-scheduling out",
    ),
    (Feature.HOST_CACHE, Feature.NO_PREFIX_CACHING): _PREFIXES,
    (Feature.KV_EVENTS, Feature.NO_PREFIX_CACHING): "they tell what prefix caching finds",
    (Feature.HOST_FOLDER, Feature.SEVERAL_HOSTS): (
        "each rank would write to the disk of its own host, and files are read on the host that "
        "schedules",
        "leave the folder out",
    ),
    (Feature.HOST_FOLDER, Feature.LORA): (
        "an adapter is known by its name, which another one may have after a restart"
    ),
    (Feature.HOST_FOLDER, Feature.RANDOM_HASHES): (
        "its hashes are others after a restart",
        "choose sha256, or set PYTHONHASHSEED",
    ),
    Feature.EXTERNAL_LAUNCHER: (
        "each rank would run a scheduler, and only one learns what was evicted"
    ),
    Feature.RAY_REPLICAS: _UNTRIED,
    Feature.EXPERT_PARALLEL: (
        "experts that are spread over ranks were not tried on GPUs, and on CPUs vLLM's kernel of "
        "experts ends with a segmentation fault"
    ),
    Feature.FAULT_TOLERANCE: (
        "an engine that recovers would not know what its requests have evicted"
    ),
    Feature.DECODE_CONTEXT: "the tokens of a block would be spread over ranks",
    Feature.PREFILL_CONTEXT: "the observation window would be spread over ranks",
    Feature.TWO_BATCHES: "two batches a step would each need block tables of their own",
    Feature.ONE_BLOCK_TABLE: "every layer needs a block table of its own",
    Feature.FAST_PREFILL: "it skips the queries that the scorer looks through",
    Feature.OTHER_CACHE: (
        "such caches have no scoring kernel",
        f"use one of {', '.join(CACHE_TYPES)}; where the checkpoint asks for it, add "
        "--kv-cache-dtype bfloat16",
    ),
    Feature.ROUTED_EXPERTS: "vLLM stores them by the blocks in which it believes a token to be",
    Feature.MATCH_UNIT: "prefixes are found at the ends of whole blocks",
    Feature.RETENTION_INTERVAL: "prefixes of all layers are kept together, at every block",
    Feature.REPLAY_SSM: "states with a buffer of inputs were not tried together with eviction",
    Feature.CACHE_METRICS: "blocks come from a pool that does not count how long they stay",
    Feature.DIFFUSION: "such a model writes to tokens of its cache again",
    Feature.SCHEDULER_CLS: "the policy brings its own scheduler",
    Feature.WORKER_CLS: "the policy brings its own worker",
    Feature.RUST_FRONT_END: "it would neither check requests nor show counters",
    Feature.OTHER_BACKEND: (
        "block tables of single layers are read by our own kernels on CPUs, and on CUDA devices by "
        f"those of {' and '.join(BACKENDS)}"
    ),
    Feature.POOLING: "there is no cache to evict from",
    Feature.ENCODER: "policies are for decoder-only models",
    Feature.MLA: "its cache has no KV heads to choose tokens for",
    Feature.WINDOWS_ALONE: "there is nothing to evict",
    (Feature.PREFIX_CACHING, Feature.STATES): (
        "a state would have to be stored at each point where another prompt may diverge",
        "leave the flag out",
    ),
    (Feature.PIPELINE, Feature.OTHER_LAYERS): (
        "windows, states and layers that read others' caches go with one stage alone so far",
        "use --tensor-parallel-size",
    ),
    (Feature.HOST_CACHE, Feature.OTHER_LAYERS): (
        "their windows and states are not stored with a prefix yet",
        "leave --kv-host-cache out",
    ),
    (Feature.HOST_CACHE, Feature.DRAFT_MODEL): (
        "its layers are not stored with a prefix yet",
        "draft by ngram, or leave --kv-host-cache out",
    ),
    (Feature.PIPELINE, Feature.DRAFTS): "drafts are known to the last stage alone",
    (Feature.DATA_PARALLEL, Feature.EXPERTS): (
        "such replicas share out experts in step, which was not tried on GPUs, and on CPUs vLLM "
        "cannot gather their tokens (`all_gatherv`)",
        "start a server for each replica, or use --tensor-parallel-size",
    ),
    Feature.OTHER_DRAFTS: (_UNTRIED, f"draft by one of {', '.join(DRAFTERS)}"),
    Feature.DRAFT_CACHE: (
        "blocks of both models come from one pool, and were not tried with caches of two types"
    ),
    Feature.DRAFT_BACKEND: "its layers use the target model's backend",
    Feature.MTP_MODULES: (
        "each reads one token further into the next chunk of a prompt than the one before"
    ),
    (Feature.E5M2_CACHE, Feature.CUDA): (
        "FlashAttention has none, and vLLM's Triton attention takes every fp8 cache for e4m3"
    ),
    (Feature.SCALED_CACHE, Feature.FLASH_ATTENTION): (
        "FlashAttention does not read the scales in the rows of the cache",
        Feature.FLASH_ATTENTION.fix,
    ),
    (Feature.SCALED_CACHE, Feature.CPU): (
        "our kernels there have one scale a layer, none for each token and KV head"
    ),
    (Feature.SCALED_CACHE, Feature.STATES): (
        "such rows in pages that are as large as a state were not tried",
        Feature.SCALED_CACHE.fix,
    ),
    Feature.BACKEND_PER_KIND: "it would replace the backend that reads per-layer tables",
    Feature.HISPARSE: "it keeps pages of its own",
    (Feature.KV_TURNS, Feature.PIPELINE): (
        "each pipeline stage has a block pool of its own, in which no session is cached yet",
        Feature.KV_TURNS.fix,
    ),
    (Feature.KV_TURNS, Feature.STATES): (
        "layers of this model have a state, which is not stored at the end of a turn yet",
        Feature.KV_TURNS.fix,
    ),
    (Feature.SHADOW, Feature.LOGITS_PROCESSORS): (
        "they change answers that it would take for the model's, and replays run without them"
    ),
    (Feature.SHADOW, Feature.PIPELINE): "it has not been tried with pipeline stages",
    (Feature.SHADOW, Feature.DRAFTS): "it has not been tried with drafts",
}
EVERY_POLICY = refusals(_REFUSED)
