# SPDX-License-Identifier: Apache-2.0
"""The table of capabilities: what of an engine or a request does not work with which policy.

Each part says what it does not support (`Component.unsupported`), and `frontend/refusals.py` what
no policy supports. Start-up, requests, docs/limits.md and `vllm-pyramid doctor` read the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from vllm_pyramid.policy.component import Component
    from vllm_pyramid.policy.policy import Policy

_NONE = "serve it with --kv-policy none"
_FULL = 'leave them out, or send {"kv_policy": "full"} along'


class Feature(Enum):
    """What an engine or a request may use, in a user's words, and what to do instead."""

    def __init__(self, words: str, fix: str = "leave it out") -> None:
        self.words, self.fix = words, fix
        self.is_place = words.startswith(("on ", "in "))

    # Where an engine runs, and on how many devices
    CPU = "on CPUs", "serve on a GPU"
    CUDA = "on CUDA devices", "serve on a CPU"
    SECOND_RUNNER = "in vLLM's second model runner", "set VLLM_USE_V2_MODEL_RUNNER=0"
    TENSOR_PARALLEL = "--tensor-parallel-size"
    PIPELINE = "--pipeline-parallel-size"
    DATA_PARALLEL = "--data-parallel-size"
    DECODE_CONTEXT = "--decode-context-parallel-size"
    PREFILL_CONTEXT = "--prefill-context-parallel-size"
    EXPERT_PARALLEL = "--enable-expert-parallel"
    EXTERNAL_LAUNCHER = "--distributed-executor-backend external_launcher", "take mp"
    RAY_REPLICAS = "--data-parallel-backend ray"
    SEVERAL_HOSTS = "ranks on several hosts"
    # What it does with the cache
    KV_CONNECTOR = "--kv-transfer-config"
    HANDOVER = "PyramidConnector (--kv-transfer-config)"
    KV_OFFLOADING = "--kv-offloading-size"
    # A prompt may begin with blocks of another request if its KV is that of the full cache until
    # the prompt's end, and an eviction depends only on the cache and the prompt's last queries.
    PREFIX_CACHING = "--enable-prefix-caching"
    NO_PREFIX_CACHING = "--no-enable-prefix-caching"
    MATCH_UNIT = "--prefix-match-unit"
    RETENTION_INTERVAL = "--prefix-cache-retention-interval"
    RANDOM_HASHES = "--prefix-caching-hash-algo"
    HOST_CACHE = "--kv-host-cache"
    HOST_FOLDER = "--kv-host-cache-dir"
    KV_EVENTS = "--kv-events-config"
    CACHE_METRICS = "--kv-cache-metrics"
    ONE_BLOCK_TABLE = (
        "vLLM's hybrid KV cache manager switched off",
        "leave --disable-hybrid-kv-cache-manager out; chunked local attention switches it off, too",
    )
    OTHER_CACHE = "--kv-cache-dtype"
    E5M2_CACHE = "--kv-cache-dtype fp8_e5m2", "use fp8"
    SCALED_CACHE = "a cache with a scale for each token and KV head", "use --kv-cache-dtype fp8"
    CACHE_OF_8_BITS = "a cache of 8-bit numbers", "leave --kv-cache-dtype out"
    # How it computes
    ASYNC_SCHEDULING = "--async-scheduling"
    TWO_BATCHES = "--enable-dbo or --ubatch-size"
    FAST_PREFILL = "--kv-sharing-fast-prefill"
    OTHER_BACKEND = "--attention-backend"
    FLASH_ATTENTION = "--attention-backend FLASH_ATTN", "use TRITON_ATTN"
    BACKEND_PER_KIND = "attention_config.backend_per_kind"
    HISPARSE = "attention_config.hisparse_config"
    ROUTED_EXPERTS = "--enable-return-routed-experts"
    REPLAY_SSM = "--use-replayssm"
    LORA = "--enable-lora"
    FAULT_TOLERANCE = "--enable-fault-tolerance"
    SCHEDULER_CLS = "--scheduler-cls"
    WORKER_CLS = "--worker-cls"
    RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND", "unset it"
    TRACE = "--kv-trace"
    SHADOW = "--kv-shadow"
    LOGITS_PROCESSORS = "--logits-processors"
    # How it drafts
    DRAFTS = "--speculative-config"
    OTHER_DRAFTS = "drafts by another method"
    DRAFT_MODEL = "a draft model (--speculative-config)", "draft by ngram"
    HIDDEN_STATES = "drafts by eagle, eagle3 or mtp", "draft by draft_model or by ngram"
    MTP_MODULES = "several MTP modules", "set num_speculative_tokens to 1, which takes one module"
    DRAFT_CACHE = (
        "a draft model's kv_cache_dtype",
        "leave it out, and the draft model takes the model's",
    )
    DRAFT_BACKEND = "a draft model's attention_backend"
    # Its model
    POOLING = "a model that does not generate (--runner pooling)", _NONE
    DIFFUSION = "--diffusion-config", _NONE
    ENCODER = "a model with an encoder", _NONE
    MLA = "multi-head latent attention (MLA)", _NONE
    WINDOWS_ALONE = "a model of which every layer has a sliding window", _NONE
    OTHER_LAYERS = "a model of which some layers do not evict", ""
    STATES = "a model whose layers keep states", ""
    SOFT_CAP = "a model that caps its logits", ""
    EXPERTS = "a mixture of experts", ""
    # Of a request. It may evict where earlier turns ended if each eviction depends only on the
    # cache and the latest queries, and all that the next turn needs is in the device's blocks.
    KV_TURNS = "kv_turns", "leave it out, or send kv_turn_mode 'exact'"
    LATER_TURN = "kv_turns of a later turn"
    KV_KEEP = "kv_keep"
    INNER_SPANS = "spans of kv_keep that begin behind token 0", "leave these spans out"
    PROMPT_LOGPROBS = "prompt_logprobs", _FULL


OF_REQUESTS = frozenset(
    (
        *(Feature.KV_TURNS, Feature.LATER_TURN, Feature.KV_KEEP),
        *(Feature.INNER_SPANS, Feature.PROMPT_LOGPROBS),
    )
)
# A feature that is found by prefix caching needs what prefix caching needs.
_FOUND_BY_PREFIX = (Feature.HOST_CACHE, Feature.KV_EVENTS, Feature.KV_TURNS)
# Features in use, each in the user's words.
Used: TypeAlias = Mapping[Feature, str]
# A feature, or several that do not work together, with the reason; or with the reason and what to
# do, where that is not what the feature says.
Declared: TypeAlias = dict[Feature | tuple[Feature, ...], str | tuple[str, str]]
Unsupported: TypeAlias = Mapping[Feature | tuple[Feature, ...], str | tuple[str, str]]
# What scorers refuse since shared prompts come without what they would be evicted by.
_OF_EVICTED_PROMPTS = (Feature.PREFIX_CACHING, Feature.KV_TURNS)
# Without `fill_blocks`.
_PARTLY_FILLED: Unsupported = {
    Feature.KV_TURNS: "later evictions score whole blocks",
    Feature.CUDA: (
        "it leaves a partly filled first block, which attention kernels for CUDA do not mask",
        "set fill_blocks to true",
    ),
}


@dataclass(frozen=True)
class Refusal:
    """A row of the table: `features` are refused where all of them are in use.

    `part` is as a user writes it; empty: no policy takes them.
    """

    features: tuple[Feature, ...]
    reason: str
    fix: str
    part: str = ""

    def what(self, used: Used = MappingProxyType({})) -> str:
        """Return the features in words: `with A and B on CUDA devices`."""
        things = [used.get(one, one.words) for one in self.features if not one.is_place]
        places = [one.words for one in self.features if one.is_place]
        return " ".join(([f"with {' and '.join(things)}"] if things else []) + places)

    def why(self, policy: Policy, used: Used) -> str:
        """Return what does not work and why, without what to do."""
        who = f"policy {policy.name!r} ({self.part})" if self.part else "a KV policy (--kv-policy)"
        return f"{who} does not work {self.what(used)}: {self.reason}"

    def error(self, policy: Policy, used: Used) -> ValueError:
        return ValueError(f"{self.why(policy, used)}; {self.fix}")


def refusals(declared: Unsupported, part: str = "") -> tuple[Refusal, ...]:
    """Return rows as they were declared, each with what to do, but for those that follow."""
    rows: list[Refusal] = []
    for key, why in declared.items():
        features = key if isinstance(key, tuple) else (key,)
        reason, fix = (why, _fix(features, part)) if isinstance(why, str) else why
        rows.append(Refusal(features, reason, fix, part))
    return tuple(row for row in rows if not any({*one.features} < {*row.features} for one in rows))


def _fix(features: tuple[Feature, ...], part: str) -> str:
    things = [one for one in features if not one.is_place] or features
    fix = things[0].fix if len(things) == 1 else "leave one of them out"
    if part and OF_REQUESTS.isdisjoint(features):
        return ", or ".join(filter(None, (fix, f"choose a policy without `{part}`")))
    return fix


def unsupported_by(part: Component) -> Declared:
    """Return what a part does not support: what its class says, and each of its base classes."""
    found: Declared = {}
    for cls in type(part).__mro__:
        own = vars(cls).get("unsupported", {})  # a property, or a class attribute
        declared = own if isinstance(own, Mapping) else own.__get__(part, cls)
        for key, why in declared.items():
            found.setdefault(key, why)
    if (why := found.get(Feature.PREFIX_CACHING)) is not None:
        reason = why if isinstance(why, str) else why[0]
        found = {**dict.fromkeys(_FOUND_BY_PREFIX, reason), **found}
    # Both begin with blocks that another request has evicted from. A scorer has no more to do then,
    # unless it gathers something from all tokens.
    needed = Feature.PREFIX_CACHING if part.section == "scorer" else Feature.KV_TURNS
    if (why := found.get(needed)) is not None and not part.begins_evicted:
        found.setdefault(Feature.HANDOVER, why if isinstance(why, str) else why[0])
    return found


def refusals_of(policy: Policy) -> tuple[Refusal, ...]:
    """Return the rows of all parts of a policy, and of those that a part has (attend.scorer)."""
    partly = policy.evicts and not policy.fill_blocks
    rows = [*refusals(_PARTLY_FILLED, "fill_blocks: false")] if partly else []
    for part in policy.parts:
        declared = unsupported_by(part)
        if part is policy.scorer and policy.schedule.keeps_prompts:
            declared = {key: why for key, why in declared.items() if key not in _OF_EVICTED_PROMPTS}
        rows += refusals(declared, f"{part.section}: {part.kind}")
        for name, value in part:
            if hasattr(value, "unsupported"):
                rows += refusals(unsupported_by(value), f"{part.section}.{name}: {value.kind}")
    return tuple(rows)


def asked(*features: Feature) -> dict[Feature, str]:
    return {feature: feature.words for feature in features}


def refusal_of(policy: Policy, used: Used, rows: Iterable[Refusal] = ()) -> Refusal | None:
    """Return the first row, of the policy's or of `rows`, that refuses features, or None."""
    every = (*rows, *policy.refusals)
    return next((row for row in every if used.keys() >= {*row.features}), None)


def refuse(policy: Policy, used: Used, rows: Iterable[Refusal] = ()) -> None:
    """Raise ValueError, naming what to change, for features that do not work with a policy."""
    if (row := refusal_of(policy, used, rows)) is not None:
        raise row.error(policy, used)


def why_not(rows: Iterable[Refusal], feature: Feature, used: Iterable[Feature] = ()) -> str | None:
    known = {feature, *used}
    fitting = (row for row in rows if feature in row.features and known.issuperset(row.features))
    return next((row.reason for row in fitting), None)
