# SPDX-License-Identifier: Apache-2.0
"""The job of a bench: the variants that are compared, the requests, the KV cache they get."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from vllm_pyramid.frontend.settings import CONFIG_KEYS
from vllm_pyramid.policy import Budget, load_policy
from vllm_pyramid.policy.served_settings import NO_POLICY
from vllm_pyramid.tools.bench.cost import RequestNeeds
from vllm_pyramid.tools.bench.memory import PolicyMemory, check_budget_evicts
from vllm_pyramid.tools.bench.shapes import BLOCK_SIZE, Shape
from vllm_pyramid.tools.command_parts import split_cache_dtype

# Seed of the warm-up prompts; no repetition's. (Not -1: `random` takes the absolute value.)
WARM_UP_SEED = 1 << 40
# vLLM without this plugin: its own attention, its own block size.
STOCK, STOCK_CACHING = "stock", "stock-prefix-caching"
STOCK_BLOCK_SIZE = 128  # on the CPU; a multiple of the 16 on a GPU
# Peers generate outside of vLLM. kvpress's classes, by the name that follows `kvpress-`.
TRANSFORMERS, KVPRESS = "transformers", "kvpress-"
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
        policy: a policy's name or file, `stock`, `stock-prefix-caching`, or one of `PEERS`.
        budget: as on the command line; None where nothing is evicted.
        cache_dtype: of the KV cache, as `--kv-cache-dtype` names it; None for the model's.
    """

    policy: str
    budget: str | None
    cache_dtype: str | None = None

    @classmethod
    def parse(cls, text: str, budget: str | None) -> Variant:
        """As on the command line: `snapkv`, or `snapkv@fp8` with that cache."""
        policy, cache_dtype = split_cache_dtype(text)
        return cls(policy, budget, cache_dtype)

    @property
    def name(self) -> str:
        """The policy as on the command line."""
        return self.policy if self.cache_dtype is None else f"{self.policy}@{self.cache_dtype}"

    @property
    def label(self) -> str:
        return self.name if self.budget is None else f"{self.name} {self.budget}"

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
        """Variables of its process. Stock vLLM loads no plugins."""
        return {"VLLM_PLUGINS": ""} if self.is_stock else {}

    def tokens_kept(self, prompt_len: int) -> int:
        """Tokens of a prompt that each layer of a peer keeps (of stock vLLM: all)."""
        if self.budget is None:
            return prompt_len
        return Budget.parse(self.budget).tokens_for(prompt_len, 1)


def _floor(variant: Variant) -> int:
    return 0 if variant.is_peer else load_policy(variant.policy).min_tokens or 0


def _memory(shape: Shape, variant: Variant) -> PolicyMemory | None:
    if variant.is_peer or variant.is_stock:
        return None
    shape = replace(shape, cache_dtype=variant.cache_dtype)
    return PolicyMemory(shape, load_policy(variant.policy, variant.budget))


def variants_of(
    policies: Sequence[str], budgets: Sequence[str], prompt_len: int, shape: Shape
) -> list[Variant]:
    """Every policy with every budget; once where it evicts nothing.

    Raises:
        ValueError: an unknown policy, a budget that it cannot have, or one that evicts nothing.
    """
    variants = []
    for policy in policies:
        if policy == NO_POLICY:
            raise ValueError(f"vLLM without a policy takes part as {STOCK!r} or {STOCK_CACHING!r}")
        if policy.startswith(KVPRESS) and policy not in PEERS:
            raise ValueError(f"unknown peer {policy!r}: there are {', '.join(PEERS)}")
        without_budget = Variant.parse(policy, None)
        if without_budget.is_peer and without_budget.cache_dtype is not None:
            raise ValueError(f"{policy!r}: a peer's cache has the model's dtype")
        if not policy.startswith(KVPRESS):
            memory = _memory(shape, without_budget)
            if memory is None or not memory.evicts:
                variants.append(without_budget)
                continue
        for variant in (Variant.parse(policy, budget) for budget in budgets):
            if (memory := _memory(shape, variant)) is not None:
                memory.check_budget(variant.label, prompt_len)
            else:
                check_budget_evicts(variant.tokens_kept(prompt_len), variant.label, prompt_len)
            variants.append(variant)
    return variants


@dataclass(frozen=True)
class Job:
    """The requests that every variant gets, and the KV cache it has for them.

    Attributes:
        prompt_len, output_len: tokens of a request; of a conversation, of its last. num_prompts:
            requests, or conversations.
        turns: of each conversation: so often a prompt goes on from the answer before it.
        shared_len: tokens with which all prompts begin.
        concurrency: requests or conversations under way at once; None: all.
        resume: whether turns go on with what our policies have kept of the turn before.
        prefix_caching: whether our policies share prefixes, those that can.
        pool_prompts: the KV cache has blocks for so many whole requests without eviction.
        kv_swap_space: GiB of host memory for V, where a policy keeps it there; None for as much as
            the KV cache.

    Raises:
        ValueError: the requests are longer than the model allows.
    """

    shape: Shape
    prompt_len: int
    output_len: int
    num_prompts: int
    pool_prompts: float
    engine_args: dict[str, Any] = field(default_factory=dict)
    kv_swap_space: float | None = None
    turns: int = 1
    shared_len: int = 0
    concurrency: int | None = None
    resume: bool = False
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        if (tokens := self.prompt_len + self.output_len) > self.shape.positions:
            raise ValueError(
                f"--prompt-len {self.prompt_len} and --output-len {self.output_len} make {tokens} "
                f"tokens; the model takes {self.shape.positions}"
            )

    def memory(self, variant: Variant) -> PolicyMemory | None:
        """What its policy makes of the KV cache; None without one of our policies."""
        return _memory(self.shape, variant)

    def v_on_host(self, variant: Variant) -> bool:
        """Whether V of some layers lies in host memory, beside the KV cache."""
        memory = self.memory(variant)
        return memory is not None and memory.v_on_host

    def needs(self, variant: Variant) -> RequestNeeds:
        """What one request needs, for the cost model."""
        if (memory := self.memory(variant)) is not None:
            return memory.needs(self.prompt_len, self.output_len)
        kept = variant.tokens_kept(self.prompt_len)
        return RequestNeeds.plain(self.shape, self.prompt_len, self.output_len, kept)

    @property
    def turn_len(self) -> int:
        """Tokens that a user adds in each turn."""
        answers = (self.turns - 1) * self.output_len
        return (self.prompt_len - self.shared_len - answers) // self.turns

    def prompts(self, seed: int) -> list[list[int]]:
        """The first prompts: random token ids, the same for every variant."""
        shared = self._draw(f"shared {seed}", self.shared_len)
        tokens = self._draw(seed, self.num_prompts * self.turn_len)
        return [[*shared, *own] for own in self._turns(tokens)]

    def later_turns(self, seed: int) -> list[list[list[int]]]:
        """What the users add after that, `[num_prompts][turns - 1]` lists of token ids."""
        count = self.turns - 1
        tokens = self._draw(f"later {seed}", self.num_prompts * count * self.turn_len)
        made = self._turns(tokens)
        return [made[i * count : (i + 1) * count] for i in range(self.num_prompts)]

    def _draw(self, seed: int | str, count: int) -> list[int]:
        # Above the special ones; those that the built-in tokenizer has too.
        ids = range(8, min(self.shape.vocabulary, 4096))
        return random.Random(seed).choices(ids, k=count)

    def _turns(self, tokens: list[int]) -> list[list[int]]:
        length = self.turn_len
        return [tokens[start : start + length] for start in range(0, len(tokens), length)]

    # The KV cache. Blocks are always of one layer, and of BLOCK_SIZE tokens.

    def _blocks(self, pool_prompts: float, block_size: int) -> int:
        """Blocks for so many whole requests, in an engine with blocks of `block_size` tokens."""
        needed = int(pool_prompts * ceil((self.prompt_len + self.output_len) / block_size))
        return needed * block_size // BLOCK_SIZE * self.shape.layers

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV cache, with the one block of each layer that vLLM keeps back."""
        blocks = self._blocks(self.pool_prompts, BLOCK_SIZE) + self.shape.layers
        return blocks * self.shape.block_bytes

    def block_bytes(self, variant: Variant) -> int:
        """Bytes of a variant's block of one layer."""
        return replace(self.shape, cache_dtype=variant.cache_dtype).block_bytes

    def bytes_beside_block(self, variant: Variant) -> int:
        """Bytes beside each block, for numbers that a policy gathers of its tokens."""
        memory = self.memory(variant)
        return 0 if memory is None else memory.bytes_beside_block

    def pool_blocks(self, variant: Variant, pool_prompts: float) -> int:
        """Blocks that requests of a variant can have, in memory for so many whole requests.

        What a policy gathers beside its blocks is part of the memory. Of 8-bit floats there are
        twice the blocks. V in host memory needs a page there for every block. Stock vLLM gets as
        many whole requests in its larger blocks; that is up to a block of its own more for each, in
        its favour.
        """
        block, whole = self.block_bytes(variant), self.shape.block_bytes
        if variant.is_stock:
            return self._blocks(pool_prompts, STOCK_BLOCK_SIZE) * whole // block
        blocks = self._blocks(pool_prompts, BLOCK_SIZE)
        blocks = blocks * whole // (block + self.bytes_beside_block(variant))
        if self.kv_swap_space is not None and self.v_on_host(variant):
            blocks = min(blocks, int(self.kv_swap_space * 2**30) // block - 1)  # vLLM keeps one
        return blocks

    def host_bytes(self, variant: Variant, pool_prompts: float) -> int | None:
        """Bytes of host memory for V, a page for each block; None where V stays."""
        if not self.v_on_host(variant):
            return None
        return self.pool_blocks(variant, pool_prompts) * self.block_bytes(variant)

    def check_room(self, variant: Variant, pool_prompts: float) -> None:
        """Check that one request fits, also when it holds most.

        Raises:
            ValueError: it does not.
        """
        if (memory := self.memory(variant)) is None:
            return
        needed = memory.most_blocks(self.prompt_len, self.output_len)
        if (blocks := self.pool_blocks(variant, pool_prompts)) < needed:
            raise ValueError(
                f"{variant.label} has {max(blocks, 0)} blocks of a layer for requests, of a cache "
                f"for {pool_prompts:g} whole ones without eviction, and one needs {needed}: give "
                f"{'--kv-swap-space' if memory.v_on_host else 'the pool'} more"
            )

    def peer_batch(self, variant: Variant) -> int:
        """Requests that a peer decodes at once: as many as the same bytes hold.

        Unlike a server, a peer keeps no room for the prompts that come later; in its favour.
        """
        kept = variant.tokens_kept(self.prompt_len)
        whole = self.pool_prompts * (self.prompt_len + self.output_len)
        return max(1, min(self.num_prompts, int(whole / (kept + self.output_len))))

    def engine_arguments(self, variant: Variant) -> dict[str, Any]:
        """Arguments of an engine beside its policy; the user's take precedence."""
        made: dict[str, Any] = {
            "max_model_len": self.prompt_len + self.output_len,
            "max_num_seqs": self.num_prompts,
            # A prompt is one chunk if it is not too long: then no step both prefills and decodes.
            "max_num_batched_tokens": max(2048, min(self.prompt_len + self.num_prompts, 16384)),
            "kv_cache_memory_bytes": self.pool_bytes,
            "block_size": BLOCK_SIZE,
            "dtype": self.shape.dtype,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": None if self.prefix_caching else False,
            "seed": 0,
        }
        if variant.cache_dtype is not None:
            made["kv_cache_dtype"] = variant.cache_dtype
            # What vLLM keeps back is smaller, too.
            spare = self.shape.layers * (self.shape.block_bytes - self.block_bytes(variant))
            made["kv_cache_memory_bytes"] -= spare
        if variant.is_stock:
            # Two of its own blocks more, since it rounds down and keeps one back. The bench then
            # reserves what is too much.
            spare = 2 * STOCK_BLOCK_SIZE // BLOCK_SIZE * self.shape.layers
            blocks = self.pool_blocks(variant, self.pool_prompts) + spare
            made["kv_cache_memory_bytes"] = blocks * self.block_bytes(variant)
            given = {name: v for name, v in self.engine_args.items() if name not in CONFIG_KEYS}
            caching = {"enable_prefix_caching": variant.policy == STOCK_CACHING}
            return made | {"block_size": None} | given | caching
        # Budgets as they are given, of short prompts too, but for a floor of the policy's own.
        made["kv_min_tokens"] = _floor(variant)
        if self.kv_swap_space is not None and self.v_on_host(variant):
            return made | self.engine_args | {"kv_swap_space": self.kv_swap_space}
        return made | self.engine_args
