# SPDX-License-Identifier: Apache-2.0
"""The job of a bench: the variants that are compared, the requests, the KV cache they get."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from vllm_pyramid.frontend.settings import CONFIG_KEYS
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.served_settings import NO_POLICY
from vllm_pyramid.tools.bench.memory import PolicyMemory
from vllm_pyramid.tools.bench.shapes import BLOCK_SIZE, Shape
from vllm_pyramid.tools.command_parts import split_cache_dtype

# Seed of the warm-up prompts; no repetition's. (Not -1: `random` takes the absolute value.)
WARM_UP_SEED = 1 << 40
# vLLM without this plugin: its own attention, its own block size.
STOCK, STOCK_CACHING = "stock", "stock-prefix-caching"
STOCK_OFFLOADING = "stock-offloading"  # with prefix caching, and a second tier in host memory
STOCK_BLOCK_SIZE = 128  # on the CPU; a multiple of the 16 on a GPU


@dataclass(frozen=True)
class Variant:
    """One of the things that are compared.

    Attributes:
        policy: a policy's name or file, `stock` or `stock-prefix-caching`.
        budget: as on the command line; None where nothing is evicted.
        cache_dtype: of the KV cache, as `--kv-cache-dtype` names it; None for the model's.
        turn_mode: how sessions go on; None where nothing is evicted, or without sessions.
    """

    policy: str
    budget: str | None
    cache_dtype: str | None = None
    turn_mode: str | None = None

    @classmethod
    def parse(cls, text: str, budget: str | None) -> Variant:
        """Return the variant of `snapkv`, or of `snapkv@fp8` with that type of cache."""
        policy, cache_dtype = split_cache_dtype(text)
        return cls(policy, budget, cache_dtype)

    @property
    def name(self) -> str:
        """The policy as on the command line."""
        return self.policy if self.cache_dtype is None else f"{self.policy}@{self.cache_dtype}"

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.name, self.budget, self.turn_mode)))

    @property
    def is_stock(self) -> bool:
        """Whether it is vLLM without this plugin."""
        return self.policy in (STOCK, STOCK_CACHING, STOCK_OFFLOADING)

    def in_cache(self, shape: Shape) -> Shape:
        """Return the shape with the variant's type of KV cache, if it names one."""
        return shape if self.cache_dtype is None else replace(shape, cache_dtype=self.cache_dtype)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its process; stock vLLM loads no plugins."""
        return {"VLLM_PLUGINS": ""} if self.is_stock else {}


def _memory(shape: Shape, variant: Variant) -> PolicyMemory | None:
    if variant.is_stock:
        return None
    shape = variant.in_cache(shape)
    return PolicyMemory(shape, load_policy(variant.policy, variant.budget))


def variants_of(
    policies: Sequence[str],
    budgets: Sequence[str],
    prompt_len: int,
    shape: Shape,
    turn_modes: Sequence[str | None] = (None,),
) -> list[Variant]:
    """Return every policy with every budget and mode of turns; one without a budget comes once.

    ValueError: an unknown policy, a budget that it cannot have, or one that evicts nothing.
    """
    variants = []
    for policy in policies:
        if policy == NO_POLICY:
            raise ValueError(f"vLLM without a policy takes part as {STOCK!r} or {STOCK_CACHING!r}")
        without_budget = Variant.parse(policy, None)
        memory = _memory(shape, without_budget)
        if memory is None or not memory.policy.has_budget:
            variants.append(without_budget)
            continue
        for variant in (Variant.parse(policy, budget) for budget in budgets):
            memory = _memory(shape, variant)
            assert memory is not None
            memory.check_budget(variant.label, prompt_len)
            variants += [replace(variant, turn_mode=mode) for mode in turn_modes]
    return variants


@dataclass(frozen=True)
class Job:
    """The requests that every variant gets, and the KV cache it has for them.

    Attributes:
        prompt_len, output_len: tokens of a request; of a conversation, of its last turn.
        num_prompts: requests, or conversations.
        pool_prompts: the KV cache has blocks for this many whole requests without eviction.
        engine_args: the user's arguments of every engine.
        kv_swap_space: GiB of host memory for V; None for as much as the KV cache.
        turns: of each conversation.
        shared_len: tokens with which all prompts begin.
        concurrency: requests or conversations under way at once; None: all.
        resume: whether turns go on with what our policies have kept of the turn before.
        prefix_caching: whether our policies share prefixes, those that can.
        host_cache: GiB of host memory for a second tier; None: none.

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
    host_cache: float | None = None

    def __post_init__(self) -> None:
        if (tokens := self.prompt_len + self.output_len) > self.shape.positions:
            raise ValueError(
                f"--prompt-len {self.prompt_len} and --output-len {self.output_len} make {tokens} "
                f"tokens; the model takes {self.shape.positions}"
            )

    def memory(self, variant: Variant) -> PolicyMemory | None:
        """Return what its policy makes of the KV cache; None for stock vLLM."""
        return _memory(self.shape, variant)

    def v_on_host(self, variant: Variant) -> bool:
        """Return whether V of some layers lies in host memory, in addition to the KV cache."""
        memory = self.memory(variant)
        return memory is not None and memory.v_on_host

    @property
    def turn_len(self) -> int:
        """Tokens that a user adds in each turn."""
        answers = (self.turns - 1) * self.output_len
        return (self.prompt_len - self.shared_len - answers) // self.turns

    def prompts(self, seed: int) -> list[list[int]]:
        """Return the first prompts: random token ids, the same for every variant."""
        shared = self._draw(f"shared {seed}", self.shared_len)
        tokens = self._draw(seed, self.num_prompts * self.turn_len)
        return [[*shared, *own] for own in self._turns(tokens)]

    def later_turns(self, seed: int | str) -> list[list[list[int]]]:
        """Return the users' later turns, `[num_prompts][turns - 1]` lists of token ids."""
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
        """Return the blocks of `pool_prompts` whole requests, in blocks of `block_size` tokens."""
        needed = int(pool_prompts * ceil((self.prompt_len + self.output_len) / block_size))
        return needed * block_size // BLOCK_SIZE * self.shape.layers

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV cache, with the one block of each layer that vLLM keeps back."""
        blocks = self._blocks(self.pool_prompts, BLOCK_SIZE) + self.shape.layers
        return blocks * self.shape.block_bytes

    def block_bytes(self, variant: Variant) -> int:
        """Return the bytes of a variant's block of one layer."""
        return variant.in_cache(self.shape).block_bytes

    def pool_blocks(self, variant: Variant, pool_prompts: float) -> int:
        """Return the blocks that a variant's requests can have, in memory for `pool_prompts`.

        What a policy accumulates in addition to its blocks is part of the memory. Of 8-bit floats
        there are twice the blocks. V in host memory needs a page there for every block. Stock vLLM
        gets as many whole requests in its larger blocks, which favours it by up to a block each.
        """
        block, whole = self.block_bytes(variant), self.shape.block_bytes
        if variant.is_stock:
            return self._blocks(pool_prompts, STOCK_BLOCK_SIZE) * whole // block
        blocks = self._blocks(pool_prompts, BLOCK_SIZE)
        blocks = blocks * whole // (block + self.beside_block_bytes(variant))
        if self.kv_swap_space is not None and self.v_on_host(variant):
            blocks = min(blocks, int(self.kv_swap_space * 2**30) // block - 1)  # vLLM keeps one
        return blocks

    def beside_block_bytes(self, variant: Variant) -> int:
        """Return the bytes of what a policy accumulates, for each block of a layer."""
        memory = self.memory(variant)
        return 0 if memory is None else memory.bytes_beside_block

    def check_room(self, variant: Variant, pool_prompts: float) -> None:
        """Raise ValueError unless one request fits, also when it holds most."""
        if (memory := self.memory(variant)) is None:
            return
        needed = memory.most_blocks(self.prompt_len, self.output_len)
        if (blocks := self.pool_blocks(variant, pool_prompts)) < needed:
            raise ValueError(
                f"{variant.label} has {max(blocks, 0)} blocks of a layer for requests, of a cache "
                f"for {pool_prompts:g} whole ones without eviction, and one needs {needed}: give "
                f"{'--kv-swap-space' if memory.v_on_host else 'the pool'} more"
            )

    def engine_arguments(self, variant: Variant) -> dict[str, Any]:
        """Return the arguments of an engine besides its policy; the user's take precedence."""
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
            # vLLM rounds down and keeps one block back. The bench reserves what is too much.
            spare = 2 * STOCK_BLOCK_SIZE // BLOCK_SIZE * self.shape.layers
            blocks = self.pool_blocks(variant, self.pool_prompts) + spare
            made["kv_cache_memory_bytes"] = blocks * self.block_bytes(variant)
            given = {name: v for name, v in self.engine_args.items() if name not in CONFIG_KEYS}
            caching: dict[str, Any] = {"enable_prefix_caching": variant.policy != STOCK}
            if variant.policy == STOCK_OFFLOADING:
                caching["kv_offloading_size"] = self.host_cache
            return made | {"block_size": None} | given | caching
        if self.host_cache is not None:
            made["kv_host_cache"] = self.host_cache
        # Budgets as they are given, of short prompts too, but for a floor of the policy's own.
        made["kv_min_tokens"] = load_policy(variant.policy).min_tokens or 0
        if self.kv_swap_space is not None and self.v_on_host(variant):
            return made | self.engine_args | {"kv_swap_space": self.kv_swap_space}
        return made | self.engine_args
