# SPDX-License-Identifier: Apache-2.0
"""Parts from a module outside the package, in the processes that users run: all are really used."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.support import Start, greedy, random_prompts

MODULE = """
import torch

from vllm_pyramid.policy.allocator import CurveAllocator
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.policy.selectors import Selector


class EverySeventh(Scorer):
    offset: int = 0

    def score(self, view):
        return (view.places % 7 == self.offset).float().expand(view.num_kv_heads, -1)


class FirstLayerMore(CurveAllocator):
    def curve(self, mean, num_layers, capacity):
        import numpy as np

        curve = np.full(num_layers, float(mean))
        curve[0] += num_layers - 1
        curve[1:] -= 1
        return curve


class Worst(Selector):
    '''Of the tokens that are not protected those with the lowest scores, the latest first.'''

    def select(self, scores, keep):
        wanted = torch.where(scores.isinf(), scores, -scores)
        return wanted.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :keep].neg() + (
            scores.shape[1] - 1
        )


class Broken(Scorer):
    wrong: str

    def score(self, view):
        heads, tokens = view.num_kv_heads, view.num_tokens
        if self.wrong == "NaN":
            return torch.full((heads, tokens), torch.nan)
        return torch.zeros(heads, tokens + 1)
"""
PROMPTS = [61, 150, 233]
BUDGET, WINDOW, SINKS = 40, 4, 2


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module, where this process and those that it starts find it."""
    (tmp_path / "own_methods.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return tmp_path


def _policy(folder: Path, **parts: Any) -> str:
    lines = [f"budget: {BUDGET}", f"window: {WINDOW}", f"sinks: {SINKS}", "fill_blocks: false"]
    path = folder / f"{'-'.join(parts)}.yaml"
    path.write_text("\n".join([*lines, *(f"{key}: {value}" for key, value in parts.items())]))
    return str(path)


def _kept(folder: Path) -> dict[int, list[np.ndarray]]:
    """By the length of the prompt: of each layer `[G, kept]`."""
    found = {}
    for path in folder.glob("*.npz"):
        with np.load(path) as file:
            layers = sum(name.startswith("kept_") for name in file.files)
            kept = [file[f"kept_{layer}"] for layer in range(layers)]
            found[int(file["prompt_len"])] = kept
    return found


def test_scorer_allocator_and_selector_of_the_users_own(random_model, own_module) -> None:
    from vllm_pyramid import LLM

    trace = own_module / "trace"
    policy = _policy(
        own_module,
        scorer='{kind: "own_methods:EverySeventh", offset: 3}',
        allocator="own_methods:FirstLayerMore",
    )
    llm = LLM(
        str(random_model),
        kv_policy=policy,
        kv_trace=str(trace),
        max_model_len=512,
        max_num_batched_tokens=128,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
    )
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(PROMPTS, vocab_size=2048)]
    outputs = llm.generate(prompts, greedy(4), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    kept = _kept(trace)
    assert sorted(kept) == PROMPTS
    for output in outputs:
        n = len(output.prompt_token_ids)
        layers = kept[n]
        lengths = [BUDGET + len(layers) - 1] + [BUDGET - 1] * (len(layers) - 1)
        assert output.kv_transfer_params["kept_tokens"] == lengths
        for layer, heads in enumerate(layers):
            inside = range(SINKS, n - WINDOW)
            best = [p for p in inside if p % 7 == 3] + [p for p in inside if p % 7 != 3]
            room = lengths[layer] - SINKS - WINDOW
            wanted = [*range(SINKS), *sorted(best[:room]), *range(n - WINDOW, n)]
            assert all(head.tolist() == wanted for head in heads), (n, layer)


def test_a_selector_of_the_users_own(own_module: Path, demo: Start, engines: Any) -> None:
    policy = _policy(
        own_module,
        scorer='{kind: "own_methods:EverySeventh", offset: 3}',
        selector="own_methods:Worst",
    )
    trace = own_module / "trace"
    engine = demo(kv_policy=policy, kv_trace=str(trace), max_model_len=512)
    engine.generate(random_prompts(PROMPTS, vocab_size=2048), greedy(4))
    engines.close()
    for n, layers in _kept(trace).items():
        inside = range(SINKS, n - WINDOW)
        worst = sorted(inside, key=lambda p: (p % 7 == 3, -p))[: BUDGET - SINKS - WINDOW]
        wanted = [*range(SINKS), *sorted(worst), *range(n - WINDOW, n)]
        assert all(head.tolist() == wanted for heads in layers for head in heads), n


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("NaN", "returned NaN or infinity, which cannot be ranked"),
        ("shape", r"must return a float32 tensor"),
    ],
)
def test_wrong_scores_end_in_one_sentence(wrong, message, own_module, demo, engines) -> None:
    policy = _policy(own_module, scorer=f'{{kind: "own_methods:Broken", wrong: {wrong}}}')
    with pytest.raises(ValueError, match=message):
        demo(kv_policy=policy, max_model_len=512)
    engines.close()
