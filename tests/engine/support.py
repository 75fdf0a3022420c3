# SPDX-License-Identifier: Apache-2.0
"""Engines in this process, a driver that steps them, and what the tests compare."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.plumbing.garbage import spare_collections
from tests.scheduler.checks import check_pool

_COUNTER = itertools.count()
# Log probabilities that differ by less may change places where sums are rounded in another order.
NEAR_TIE = 1e-3


@dataclass
class Job:
    """One request: token ids, sampling parameters, and the step before which it arrives.

    Attributes:
        embeds: `[len(prompt), hidden size]`, sent in place of the token ids. lora: its adapter.
        salt: with which it finds prefixes; None: those of all requests without one.
    """

    prompt: list[int]
    params: Any
    arrival: int = 0
    abort_after: int | None = None  # steps from its arrival; None: it runs to its end
    name: str = field(default_factory=lambda: f"job{next(_COUNTER)}")
    embeds: torch.Tensor | None = field(default=None, kw_only=True)
    lora: Any = field(default=None, kw_only=True)
    salt: str | None = field(default=None, kw_only=True)


@dataclass
class Outcome:
    """What came of a job.

    Attributes:
        request_id: the engine's own name for it (not for n > 1, where each child has another).
        output: vLLM's last `RequestOutput`; None for a job that was aborted.
    """

    job: Job
    request_id: str
    output: Any

    @property
    def token_ids(self) -> list[int]:
        return list(self.output.outputs[0].token_ids)

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were in the cache."""
        return int(self.output.num_cached_tokens)

    @property
    def logprobs(self) -> list[dict[int, float]]:
        """A dictionary a generated token: token id to log probability."""
        return [
            {token: entry.logprob for token, entry in position.items()}
            for position in self.output.outputs[0].logprobs
        ]

    @property
    def report(self) -> dict[str, Any]:
        """What the engine says it kept."""
        assert self.output.kv_transfer_params is not None, "no report of what was evicted"
        return self.output.kv_transfer_params


class Engine:
    """An in-process engine that is stepped by the test."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.client = llm.llm_engine
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.coordinator = self.scheduler.kv_cache_manager.coordinator
        self.pool = self.scheduler.kv_cache_manager.block_pool
        # Stock vLLM's coordinator has no such part.
        layer_blocks = getattr(self.coordinator, "layer_blocks", None)
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        self.num_layers = layer_blocks.num_tables if layer_blocks else len(groups)
        self.tables_per_layer = layer_blocks.stages.tables_per_layer if layer_blocks else 1
        self.block_size = layer_blocks.largest if layer_blocks else self.scheduler.block_size
        self.broken = False

    def run(
        self,
        jobs: Iterable[Job],
        on_step: Callable[[Engine], None] | None = None,
        *,
        max_steps: int = 100_000,
    ) -> list[Outcome]:
        """Run the jobs to their ends; outcomes in the order of the jobs."""
        self.broken = True  # unless this comes to its end
        outcomes = self._run(list(jobs), on_step, max_steps)
        self.broken = False
        return outcomes

    def _run(
        self, jobs: list[Job], on_step: Callable[[Engine], None] | None, max_steps: int
    ) -> list[Outcome]:
        waiting = sorted(jobs, key=lambda job: job.arrival)
        outcomes: dict[str, Outcome] = {}
        aborts: list[tuple[int, str]] = []
        step = 0
        while waiting or self.client.has_unfinished_requests():
            while waiting and waiting[0].arrival <= step:
                job = waiting.pop(0)
                prompt: dict[str, Any] = {"prompt_token_ids": job.prompt}
                if job.embeds is not None:
                    prompt = {"prompt_embeds": job.embeds}
                if job.salt is not None:
                    prompt["cache_salt"] = job.salt
                request_id = self.client.add_request(
                    job.name, prompt, job.params, lora_request=job.lora
                )
                outcomes[job.name] = Outcome(job, request_id, None)
                if job.abort_after is not None:
                    aborts.append((step + job.abort_after, job.name))
            for name in [name for when, name in aborts if when <= step]:
                if outcomes[name].output is None or not outcomes[name].output.finished:
                    self.client.abort_request([name])
                    outcomes[name].output = None
            aborts = [entry for entry in aborts if entry[0] > step]
            for output in self.client.step():
                outcomes[output.request_id].output = output
            if on_step is not None:
                on_step(self)
            step += 1
            assert step < max_steps, "the engine makes no progress"
        return [outcomes[job.name] for job in jobs]

    def generate(self, prompts: Sequence[list[int]], params: Any) -> list[Outcome]:
        """All prompts at once with the same parameters."""
        return self.run([Job(prompt, params) for prompt in prompts])

    @property
    def usable_blocks(self) -> int:
        """Blocks of the pool; the null block is never handed out."""
        return self.pool.num_gpu_blocks - 1

    def check_whole(self) -> None:
        """Everything went back to the pool."""
        check_pool(self.coordinator)
        assert self.pool.get_num_free_blocks() == self.usable_blocks
        assert not self.coordinator.counters.held_blocks.any()
        assert not self.coordinator.counters.skipped_tokens.any()
        assert not self.coordinator.plans.records, "finished requests are kept"
        for hooks in self.scheduler.pyramid.hooks:
            for kept in ("_requests", "_of_request", "_averaged"):
                assert not getattr(hooks, kept, None), f"{kept} keeps finished requests"

    def check_nothing_left(self) -> None:
        """No request, block, plan or table of any part of the engine is left."""
        self.client.step()  # tells the worker which requests ended last
        self.check_whole()
        scheduler, admission = self.scheduler, self.scheduler.pyramid.chunks.admission
        assert not scheduler.requests and not scheduler.running and not scheduler.waiting
        assert admission is None or not len(admission.table)
        assert not self.client.output_processor.request_states
        assert not self.coordinator.prefixes._published_from
        assert not any(manager.req_to_blocks for manager in self.coordinator.single_type_managers)
        left = set(
            self.core.model_executor.driver_worker.worker.model_runner.pyramid.tracker._requests
        )
        assert not left, f"the worker keeps {left}"

    def attention_layers(self, *, evicting: bool = False) -> list[Any]:
        """Layers with attention; `evicting`: those that have a context of ours alone."""
        layers = self.core.vllm_config.compilation_config.static_forward_context.values()
        found = [layer for layer in layers if hasattr(layer, "impl")]
        if evicting:
            found = [layer for layer in found if getattr(layer.impl, "context", None) is not None]
        return found

    @property
    def kv_heads(self) -> int:
        """KV heads of a layer."""
        config = self.core.vllm_config
        return int(config.model_config.get_num_kv_heads(config.parallel_config))

    def shuffle_blocks(self, seed: int = 0) -> None:
        """Put the free blocks into random order, so that neighbours in a table are far apart."""
        blocks = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        random.Random(seed).shuffle(blocks)
        self.pool.free_blocks(blocks)

    def shutdown(self) -> None:
        """Give back the memory and the process-wide state."""
        self.client.engine_core.shutdown()


@contextmanager
def count_preemptions(engine: Engine) -> Iterator[dict[str, int]]:
    """Counts inside, how often requests were preempted: `all`, and `evicted` before."""
    scheduler = engine.scheduler
    original = scheduler._preempt_request
    count = {"all": 0, "evicted": 0}

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        count["all"] += 1
        count["evicted"] += engine.coordinator.plans.has_evicted(request.request_id)
        return original(request, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_preempt_request", preempt)
        yield count


def is_compiled(engine: Engine) -> bool:
    """Whether vLLM has compiled the engine's model."""
    mode: str = engine.core.vllm_config.compilation_config.mode.name
    return mode != "NONE"


def is_cpu_build() -> bool:
    """Whether this vLLM has its own kernels for the CPU (the CUDA wheel has none)."""
    from vllm.platforms import builtin_platform_plugins

    return builtin_platform_plugins["cpu"]() is not None


def register_kernels_once() -> None:
    """From now on no engine of this process puts C++ in the place of Triton's kernels again.

    vLLM does so for each engine, and looks through all modules for the kernels, for a second. It
    stumbles over llvmlite's, which drafting loads (numba), so whatever runs in this process after
    an engine that drafts would fail. One registration is enough. An engine in a process of its own
    makes it once, before it drafts.
    """
    from vllm.platforms import current_platform

    # The class that has it: an engine without a policy has vLLM's own platform, whose class is a
    # base of this package's.
    name = "register_triton_kernel_overrides"
    platform: Any = next(cls for cls in type(current_platform).__mro__ if name in vars(cls))
    original = platform.register_triton_kernel_overrides
    if getattr(original, "is_once", False):
        return
    done = []

    def register(cls: Any) -> None:
        if not done:
            done.append(original())

    register.is_once = True  # type: ignore[attr-defined]
    platform.register_triton_kernel_overrides = classmethod(register)


def inspect_models_here() -> None:
    """From now on vLLM looks at the class of a model in this process.

    It starts another one for each architecture that is new to this machine (in order not to touch
    CUDA), which imports everything: eight seconds and more. The engine imports the class anyway.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


@cache
def spare_imports() -> None:
    """Before the first engine of this process: it collects ten times while it starts."""
    spare_collections()


# `start(model, **settings)`: a running engine.
Start = Callable[..., Engine]
# `models(name)`: the folder of a model.
Models = Callable[[str], Path]


class EnginePool:
    """At most one in-process engine; asking for the same settings again finds it running."""

    _is_warm: ClassVar[bool] = False  # whether an engine has run in this process

    def __init__(self) -> None:
        self._key: str | None = None
        self._engine: Engine | None = None

    def get(self, model: Any, **settings: Any) -> Engine:
        """An engine of `vllm_pyramid.LLM(model, **settings)`, eager unless told otherwise."""
        key = repr((str(model), sorted(settings.items(), key=lambda item: item[0])))
        if key != self._key or (self._engine is not None and self._engine.broken):
            self.close()
            self._engine = start_engine(str(model), **settings)
            self._key = key
        assert self._engine is not None
        return self._engine

    def close(self) -> None:
        """End the engine, if one is running."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine, self._key = None, None
            if not EnginePool._is_warm:  # the first one imported the most
                spare_collections()
                EnginePool._is_warm = True


@contextmanager
def in_process() -> Iterator[None]:
    """vLLM starts its engine core in this process, where tests can look into it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


def start_engine(model: str, **settings: Any) -> Engine:
    """Start an in-process engine with small defaults."""
    from vllm_pyramid import LLM

    register_kernels_once()
    inspect_models_here()
    spare_imports()
    defaults: dict[str, Any] = {
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    if settings.get("kv_policy", "none") != "none":
        defaults["kv_min_tokens"] = 0  # prompts are short here
    settings = {**defaults, **settings}
    if "num_gpu_blocks_override" not in settings:
        settings.setdefault("kv_cache_memory_bytes", 128 << 20)
    else:
        settings.setdefault("kv_cache_memory_bytes", 1 << 30)
    with in_process():
        return Engine(LLM(model, **settings))


def greedy(max_tokens: int, *, logprobs: int | None = None, **extra_args: Any) -> Any:
    """Greedy sampling of exactly `max_tokens` tokens; `extra_args`: the request's own settings."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        extra_args=extra_args or None,
    )


def random_prompts(
    lengths: Iterable[int], *, seed: int = 0, vocab_size: int = 512
) -> list[list[int]]:
    """Random token ids above the special tokens, one prompt a length."""
    source = random.Random(seed)
    return [[source.randrange(8, vocab_size) for _ in range(length)] for length in lengths]


def assert_same_tokens(
    found: Sequence[Outcome], expected: Sequence[Outcome], near: float = NEAR_TIE
) -> None:
    """Check answers that were computed over different chunks: equal up to a near tie.

    Rounding decides between tokens that are equally likely, and what follows depends on it, so that
    nothing behind such a token is compared.

    Args:
        found, expected: of jobs with `logprobs`, two at least.
    """
    for one, other in zip(found, expected, strict=True):
        assert len(one.token_ids) == len(other.token_ids), one.job.name
        pairs = list(zip(one.token_ids, other.token_ids, strict=True))
        at = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
        for index in range(min(at + 1, len(pairs))):
            for token in pairs[index]:
                # Each has seen both tokens, and makes of them what the other makes.
                a, b = one.logprobs[index].get(token), other.logprobs[index].get(token)
                assert a is not None and b is not None and abs(a - b) < near, (index, token, a, b)
        if at < len(pairs):
            for run in (one, other):
                first, second = (run.logprobs[at][token] for token in pairs[at])
                assert abs(first - second) < near, (at, pairs[at], first, second)


def kept_at_evictions(folder: Path, outcome: Outcome) -> dict[int, list[torch.Tensor]]:
    """What a trace says of each eviction, by the tokens computed: a layer `[G, held]` positions."""
    found = {}
    for path in folder.glob(f"{outcome.request_id}*.npz"):
        with np.load(path) as file:
            layers = len(file["held"])
            kept = [torch.from_numpy(file[f"kept_{layer}"]) for layer in range(layers)]
            assert [len(rows[0]) for rows in kept] == file["held"].tolist()
            found[int(file["computed" if "computed" in file else "prompt_len"])] = kept
    return dict(sorted(found.items()))
