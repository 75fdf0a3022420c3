# SPDX-License-Identifier: Apache-2.0
"""Nothing that was computed with other weights is found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.beside import BUDGET, WINDOW
from tests.engine.models import write_model
from tests.engine.support import Engine, Job, Outcome, greedy, random_prompts


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_of_old_weights_is_found(engines, tiny_model, tmp_path, asynchronous) -> None:
    """Not in the cache, in host memory, in files, nor by requests that run meanwhile."""
    model, folder = tiny_model("mistral"), tmp_path / "kv"
    other = write_model("mistral", tmp_path / "other")
    (weights,) = other.glob("*.safetensors")
    tensors = load_file(weights)
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, weights, {"format": "pt"})
    settings = {"kv_policy": "snapkv", "kv_policy_args": {"window": WINDOW}, "kv_budget": BUDGET}
    settings |= {"async_scheduling": asynchronous, "kv_host_cache": 0.0625}
    settings |= {"max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": 8}
    engine = engines.get(model, **settings, dtype="float32", kv_host_cache_dir=str(folder))
    prompts, later = random_prompts([500, 300]), random_prompts([700], seed=1)

    def serve(
        prompts: list[list[int]], on_step: Callable[[Engine], None] | None = None
    ) -> list[Outcome]:
        return engine.run([Job(prompt, greedy(20)) for prompt in prompts], on_step)

    def tokens(outcomes: list[Outcome]) -> list[list[int]]:
        return [outcome.token_ids for outcome in outcomes]

    def reload(path: Path) -> None:
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})

    old = serve(prompts)
    assert all(outcome.cached for outcome in serve(prompts))
    steps = itertools.count(1)
    meanwhile = serve(later, lambda _: reload(other) if next(steps) == 1 else None)
    new = serve(prompts)
    assert [outcome.cached for outcome in (*meanwhile, *new)] == [0, 0, 0]
    assert not list(folder.rglob("*.kv")), "files name the weights of the start"
    assert engine.llm.reset_prefix_cache()
    assert tokens(serve([*prompts, *later])) == tokens([*new, *meanwhile]) and tokens(new) != (
        tokens(old)
    )
    reload(model)
    back = serve(prompts)
    assert [outcome.cached for outcome in back] == [0, 0] and tokens(back) == tokens(old)
    engine.check_whole()
