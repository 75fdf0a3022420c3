# SPDX-License-Identifier: Apache-2.0
"""What a bench is to measure: the ways to keep a cache, the job, the pool; checked beforehand."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Any

from vllm_pyramid.bench.cost import Demand
from vllm_pyramid.bench.demand import policy_demand, retention_of
from vllm_pyramid.bench.shapes import Shape
from vllm_pyramid.config import CONFIG_KEYS, NO_POLICY
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.budget import Budget

__all__ = [
    "BLOCK_SIZE",
    "PEERS",
    "STOCK",
    "WARM_UP_SEED",
    "Plan",
    "Variant",
    "default_threads",
    "variants_of",
]

BLOCK_SIZE = 16
# Of the prompts for warming up; no repetition's. (Not -1: `random` takes the absolute value.)
WARM_UP_SEED = 1 << 40
# vLLM without this plugin: its own attention, its own block size. What users would run otherwise.
STOCK, STOCK_CACHING = "stock", "stock-prefix-caching"
STOCK_BLOCK_SIZE = 128  # on the CPU; of 16 on a GPU a multiple
TRANSFORMERS = "transformers"
KVPRESS = "kvpress-"
# kvpress's classes by the name that follows `kvpress-`.
PRESSES = {
    "snapkv": "SnapKVPress",
    "pyramidkv": "PyramidKVPress",
    "streaming-llm": "StreamingLLMPress",
}
PEERS = (TRANSFORMERS, *(KVPRESS + name for name in PRESSES))


@dataclass(frozen=True)
class Variant:
    """One of the things that are compared.

    Attributes:
        policy: of this package, `stock` or `stock-prefix-caching` for vLLM without this plugin, or
            one of `PEERS`.
        budget: as asked for; None where nothing is evicted.
    """

    policy: str
    budget: str | None

    @property
    def label(self) -> str:
        return self.policy if self.budget is None else f"{self.policy} {self.budget}"

    @property
    def is_peer(self) -> bool:
        """Whether it runs outside of vLLM."""
        return self.policy in PEERS

    @property
    def is_stock(self) -> bool:
        """Whether it is vLLM without this plugin."""
        return self.policy in (STOCK, STOCK_CACHING)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its process: for stock vLLM, those that keep plugins out."""
        return {"VLLM_PLUGINS": ""} if self.is_stock else {}

    @property
    def kv_policy(self) -> Policy | None:
        """The policy with this budget; None where none of ours is at work."""
        if self.is_peer or self.is_stock:
            return None
        return load_policy(self.policy, self.budget)

    @property
    def swaps_v(self) -> bool:
        """Whether V of some layers lies in host memory, beside the pool."""
        return self.kv_policy is not None and self.kv_policy.swap_v

    def peer_keeps(self, prompt_len: int) -> int:
        """Tokens of a prompt that each layer of a peer holds (or of stock vLLM: all)."""
        if self.budget is None:
            return prompt_len
        return Budget.parse(self.budget).tokens_for(prompt_len, 1)


def variants_of(
    policies: Sequence[str], budgets: Sequence[str], prompt_len: int, layers: int
) -> list[Variant]:
    """Every policy with every budget; once where it evicts nothing.

    Raises:
        ValueError: an unknown policy, a budget that it cannot have, or one that evicts nothing.
    """
    variants = []
    for policy in policies:
        if policy == NO_POLICY:
            raise ValueError(f"vLLM without a policy takes part as {STOCK!r} or {STOCK_CACHING!r}")
        if policy in (STOCK, STOCK_CACHING, TRANSFORMERS):
            variants.append(Variant(policy, None))
            continue
        if policy.startswith(KVPRESS):
            if policy not in PEERS:
                raise ValueError(f"unknown peer {policy!r}: there are {', '.join(PEERS)}")
        elif not load_policy(policy).evicts:
            variants.append(Variant(policy, None))
            continue
        for budget in budgets:
            variant = Variant(policy, budget)
            _check_budget(variant, budget, prompt_len, layers)
            variants.append(variant)
    return variants


def _check_budget(variant: Variant, budget: str, prompt_len: int, layers: int) -> None:
    """Raise ValueError unless something is evicted, and no more kept than the budget says."""
    tokens = Budget.parse(budget).tokens_for(prompt_len, 1)
    policy = variant.kv_policy
    if policy is None or policy.thinner is None:
        if tokens >= prompt_len:
            raise ValueError(
                f"--budgets: {budget} keeps all of a prompt of {prompt_len} tokens: give a "
                "smaller one, or the policy 'full'"
            )
        return
    # An upper limit here, also 100%: what is kept follows from the schedule.
    plan = retention_of(policy, prompt_len, layers, BLOCK_SIZE)
    kept = int(plan.keep.sum()) / (prompt_len * layers)
    assert policy.budget.percent is not None
    if not plan.evicts:
        raise ValueError(
            f"policy {variant.policy!r} keeps all of a prompt of {prompt_len} tokens: give a "
            "longer --prompt-len"
        )
    if 100 * kept > policy.budget.percent:
        raise ValueError(
            f"--budgets: {budget} is out of reach of policy {variant.policy!r}, which keeps at "
            f"least {kept:.1%} of a prompt of {prompt_len} tokens in {layers} layers: give more, "
            "or 100% for its own lengths"
        )


@dataclass(frozen=True)
class Plan:
    """A job that every variant gets.

    Attributes:
        shape: of the model. prompt_len, output_len: tokens of a request. num_prompts: requests.
        pool_prompts: whole requests (prompt and output) that the cache holds without eviction.
        kv_swap_space: GiB of host memory for V, where a policy keeps it there; None for as much as
            the cache.

    Raises:
        ValueError: it cannot work; the message names the flag to change.
    """

    shape: Shape
    prompt_len: int
    output_len: int
    num_prompts: int
    pool_prompts: float
    engine_args: dict[str, Any] = field(default_factory=dict)
    kv_swap_space: float | None = None

    def __post_init__(self) -> None:
        for flag in ("prompt_len", "output_len", "num_prompts"):
            if getattr(self, flag) < 1:
                raise ValueError(f"--{flag.replace('_', '-')} must be at least 1")
        if self.output_len < 2:
            raise ValueError("--output-len must be at least 2: prefill gives the first token")
        longest = self.shape.positions
        if self.prompt_len + self.output_len > longest:
            raise ValueError(
                f"--prompt-len {self.prompt_len} and --output-len {self.output_len} make "
                f"{self.prompt_len + self.output_len} tokens; the model takes {longest}"
            )
        if self.kv_swap_space is not None and not 0 < self.kv_swap_space < 2**20:
            raise ValueError(f"--kv-swap-space {self.kv_swap_space:g} is no number of GiB above 0")
        if not isfinite(self.pool_prompts):
            raise ValueError(f"--pool-prompts {self.pool_prompts:g} is no number of requests")
        if self.pool_prompts < 1:
            raise ValueError(
                f"--pool-prompts {self.pool_prompts:g} is too small: a pool must hold at least one "
                "whole request, since its prompt is held in full until it is processed"
            )

    @property
    def request_blocks(self) -> int:
        """Blocks of a layer that a whole request needs."""
        return ceil((self.prompt_len + self.output_len) / BLOCK_SIZE)

    def blocks(self, pool_prompts: float) -> int:
        """Blocks of one layer that a pool for so many whole requests has, over all layers."""
        return int(pool_prompts * self.request_blocks) * self.shape.layers

    @property
    def pool_bytes(self) -> int:
        """Bytes of the cache: the pool, and the one block (of each layer) that vLLM keeps back."""
        return (self.blocks(self.pool_prompts) + self.shape.layers) * self.block_bytes

    def stock_blocks(self, pool_prompts: float) -> int:
        """The same for stock vLLM, in blocks of ours: as many whole requests, in its larger blocks.

        That is at most a block of its own a request more, in its favour.
        """
        needed = ceil((self.prompt_len + self.output_len) / STOCK_BLOCK_SIZE)
        return int(pool_prompts * needed) * STOCK_BLOCK_SIZE // BLOCK_SIZE * self.shape.layers

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one layer."""
        return BLOCK_SIZE * self.shape.token_bytes

    def demand(self, variant: Variant) -> Demand:
        """Of one request, for the cost model."""
        if (policy := variant.kv_policy) is None:
            kept = variant.peer_keeps(self.prompt_len)
            return Demand.plain(self.shape, self.prompt_len, self.output_len, kept)
        return policy_demand(self.shape, policy, self.prompt_len, self.output_len, BLOCK_SIZE)

    def arguments_of(self, variant: Variant) -> dict[str, Any]:
        """Arguments of an engine with the policy, beside its name."""
        made = self.arguments() | self.policy_arguments(variant)
        if variant.is_stock:  # it does not know ours
            made = {name: value for name, value in made.items() if name not in CONFIG_KEYS}
        return made

    def policy_arguments(self, variant: Variant) -> dict[str, Any]:
        """Those of them that depend on the policy."""
        if variant.is_stock:
            # Room to trim what its larger blocks round down.
            own = STOCK_BLOCK_SIZE // BLOCK_SIZE * self.shape.layers
            pool = (self.stock_blocks(self.pool_prompts) + 2 * own) * self.block_bytes
            return {
                "block_size": self.engine_args.get("block_size"),
                "enable_prefix_caching": variant.policy == STOCK_CACHING,
                "kv_cache_memory_bytes": self.engine_args.get("kv_cache_memory_bytes", pool),
            }
        if self.kv_swap_space is None or not variant.swaps_v:
            return {}
        return {"kv_swap_space": self.kv_swap_space}

    def beside_block(self, variant: Variant) -> int:
        """Bytes beside each block of a layer: numbers that a policy gathers of its tokens."""
        policy = variant.kv_policy
        if policy is None or policy.gatherer is None:
            return 0
        return 4 * BLOCK_SIZE * self.shape.kv_heads

    def check_room(self, variant: Variant, pool_prompts: float) -> None:
        """Raise ValueError unless one request finds room, before anything is given back."""
        if (policy := variant.kv_policy) is None:
            return
        sizes = policy.block_sizes(self.shape.layers, BLOCK_SIZE)
        needed = int((-(-(self.prompt_len + self.output_len) // sizes)).sum())
        if (blocks := self.pool_blocks(variant, pool_prompts)) < needed:
            raise ValueError(
                f"{variant.label} has {max(blocks, 0)} blocks of a layer for requests, of a cache "
                f"for {pool_prompts:g} whole ones without eviction, and one needs {needed}: give "
                f"{'--kv-swap-space' if policy.swap_v else 'the pool'} more"
            )

    def pool_blocks(self, variant: Variant, pool_prompts: float) -> int:
        """`blocks` that an engine with the policy has: fewer where something else takes memory too.

        Numbers that are gathered beside the cache are within its bytes. Every page needs one for V
        in host memory where the policy keeps V there, so too little of that makes the pool smaller.
        """
        blocks, policy = self.blocks(pool_prompts), variant.kv_policy
        if variant.is_stock:
            return self.stock_blocks(pool_prompts)
        if policy is None:
            return blocks
        blocks = blocks * self.block_bytes // (self.block_bytes + self.beside_block(variant))
        if policy.swap_v and self.kv_swap_space is not None:
            pages = int(self.kv_swap_space * 2**30) // self.block_bytes
            blocks = min(blocks, pages - 1)  # vLLM keeps one back
        return blocks

    def host_bytes(self, variant: Variant, pool_prompts: float) -> int | None:
        """Bytes of host memory for V of the pool, a page for each of its own; None without."""
        if not variant.swaps_v:
            return None
        return self.pool_blocks(variant, pool_prompts) * self.block_bytes

    def prompts(self, seed: int) -> list[list[int]]:
        """Random token ids, above the special ones; the same for every variant."""
        draw = random.Random(seed)
        ids = range(8, self.tokens)
        return [draw.choices(ids, k=self.prompt_len) for _ in range(self.num_prompts)]

    @property
    def tokens(self) -> int:
        """Token ids to draw from: those that the built-in tokenizer has, too."""
        return min(self.shape.vocabulary, 4096)

    def arguments(self) -> dict[str, Any]:
        """Arguments of `LLM`, the user's over the defaults.

        A whole prompt is one chunk where it is not too long, so that prefill and decode steps can
        be told apart.
        """
        chunk = max(2048, min(self.prompt_len + self.num_prompts, 16384))
        return {
            "max_model_len": self.prompt_len + self.output_len,
            "max_num_seqs": self.num_prompts,
            "max_num_batched_tokens": chunk,
            "kv_cache_memory_bytes": self.pool_bytes,
            "block_size": BLOCK_SIZE,
            "dtype": self.shape.dtype,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "seed": 0,
            **self.engine_args,
        }

    def peer_batch(self, variant: Variant) -> int:
        """Requests a peer decodes at once: what its cache has room for in as many bytes.

        Nothing is set aside for the prompts that come later, as a server must: in their favour.
        """
        kept = variant.peer_keeps(self.prompt_len)
        whole = self.pool_prompts * (self.prompt_len + self.output_len)
        return max(1, min(self.num_prompts, int(whole / (kept + self.output_len))))


def default_threads() -> int:
    """Of the engines, on the CPU: `OMP_NUM_THREADS`, or the processors that we may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else len(os.sched_getaffinity(0))
