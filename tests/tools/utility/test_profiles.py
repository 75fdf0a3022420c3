# SPDX-License-Identifier: Apache-2.0
"""Profiles: concave curves and greedy lengths against exhaustive search, and the command."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pyramid.kernels import solve
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.allocator import Reals
from vllm_pyramid.tools.cli import main
from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.utility.model import UtilityModel, utilities
from vllm_pyramid.tools.utility.profile import best_lengths, falling, relative, retained, rows_of

pytestmark = pytest.mark.cpu

MODEL = str(model_path())
GAINS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def hull(gains: list[int]) -> Reals:
    """Slopes of the least concave curve above the sums: the best chord over each step."""
    sums = np.concatenate([[0], np.cumsum(gains)])
    points = range(len(sums))
    heights = [
        max(
            sums[a] + (sums[b] - sums[a]) * (x - a) / (b - a) if b > a else sums[a]
            for a in points[: x + 1]
            for b in points[x:]
        )
        for x in points
    ]
    return np.diff(heights)


@settings(max_examples=200, deadline=None)
@given(GAINS)
def test_gains_fall_along_the_concave_hull(gains: list[int]) -> None:
    found = falling(np.array(gains, float))
    assert found == pytest.approx(hull(gains), abs=1e-12)
    assert (np.diff(found) <= 1e-12).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=4))
def test_at_corners_of_the_curves_no_lengths_have_more_utility(rows: list[list[int]]) -> None:
    """All lengths are tried; between corners the hull says how much more there could be."""
    gains = np.array(rows, float)
    layers, capacity = gains.shape
    concave = np.stack([falling(row) for row in gains])
    best: dict[int, float] = {}
    for lengths in itertools.product(range(capacity + 1), repeat=layers):
        worth = sum(row[:k].sum() for row, k in zip(gains, lengths, strict=True))
        best[sum(lengths)] = max(best.get(sum(lengths), 0.0), float(worth))
    totals = range(layers * capacity + 1)
    corners = 0
    for total, lengths in zip(totals, best_lengths(gains, totals), strict=True):
        assert lengths.sum() == total and lengths.min() >= 0 and lengths.max() <= capacity
        pairs = list(zip(gains, concave, lengths, strict=True))
        worth = sum(row[:k].sum() for row, _, k in pairs)
        bound = sum(own[:k].sum() for _, own, k in pairs)
        assert worth <= best[total] + 1e-9 <= bound + 2e-9
        if all(abs(row[:k].sum() - own[:k].sum()) < 1e-9 for row, own, k in pairs):
            assert worth == pytest.approx(best[total])
            corners += 1
    assert corners >= 2  # nothing and everything


def test_a_scorer_that_errs_gets_less_than_one_that_knows() -> None:
    """Two layers hold the same tokens; one scorer's order finds them late, so its gains pool."""
    knows, errs = [8.0, 4, 2, 1, 0, 0], [0.0, 1, 0, 2, 4, 8]
    assert falling(np.array(errs)) == pytest.approx([2.5] * 6)
    found = best_lengths(np.array([errs, knows]), [1, 2, 3, 8, 9])
    # 8 and 4 first; then 2.5 a token for all of the other layer's, before the 2 and the 1.
    assert found.tolist() == [[0, 1], [0, 2], [1, 2], [6, 2], [6, 3]]


@pytest.mark.parametrize("seed", range(3))
def test_it_is_xkv_where_a_scorer_knows_what_comes(seed: int) -> None:
    """With scores as utilities no curve needs a hull, and shares of each layer are XKV's."""
    source = torch.Generator().manual_seed(seed)
    scores = torch.rand(6, 150, generator=source, dtype=torch.float64) ** 3
    scores *= torch.rand(6, 1, generator=source, dtype=torch.float64)
    gains = relative(scores.sort(dim=1, descending=True).values.numpy())
    for total in (0, 1, 60, 450, 900):
        (lengths,) = best_lengths(gains, [total])
        assert lengths.tolist() == solve.best_lengths(scores, total).tolist()
        assert retained(gains, lengths) == pytest.approx(
            float(solve.retention(scores, torch.tensor(lengths)).mean())
        )


def test_rows_have_their_budgets_as_mean() -> None:
    gains = np.random.default_rng(0).random((7, 131)) ** 4
    rows = rows_of(gains)
    assert rows.shape == (99, 7)
    assert np.abs(rows.mean(axis=1) - np.arange(1, 100) / 100).max() <= 0.5 / gains.size + 1e-12
    assert (np.diff(rows, axis=0) >= 0).all()


def test_layers_without_utility_count_as_nothing() -> None:
    gains = np.array([[0.0, 0, 0], [3, 1, 0]])
    assert relative(gains).tolist() == [[0, 0, 0], [0.75, 0.25, 0]]
    assert retained(gains, [3, 1]) == 0.75
    assert retained(0 * gains, [3, 1]) == 0.0


@pytest.fixture(scope="module")
def model() -> UtilityModel:
    return UtilityModel(MODEL)


def ids_of(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(20, 400) for _ in range(count)]


@torch.inference_mode()
def test_utilities_by_the_models_own_attention(model: UtilityModel) -> None:
    """Against Transformers' eager attention weights, and V through the whole output projection."""
    from transformers import AutoModelForCausalLM

    ids, horizon = ids_of(150, 1), 6
    policy = load_policy("random", None, {"window": 4, "sinks": 2})
    gains = model.gains(ids, policy, horizon)

    stock = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answer = list(ids)
    for _ in range(horizon):
        answer.append(int(stock(torch.tensor([answer])).logits[0, -1].argmax()))
    output = stock(torch.tensor([answer]), output_attentions=True, use_cache=True)
    for index, layer in enumerate(stock.model.layers):
        values = output.past_key_values.layers[index].values[0]
        weights = output.attentions[index][0, :, -horizon:, : len(ids)]
        heads, size = len(weights), values.shape[-1]
        group = heads // len(values)
        worth = torch.zeros(len(values), len(ids))
        for head in range(heads):
            columns = layer.self_attn.o_proj.weight[:, head * size : (head + 1) * size]
            given_out = (values[head // group, : len(ids)] @ columns.T).norm(dim=-1)
            worth[head // group] += (weights[head] * given_out).amax(dim=0)
        context = worth[:, 2 : len(ids) - 4]
        # Whatever the order, the sum of all gains is that of all utilities.
        assert gains[index].sum() == pytest.approx(float(context.sum()), rel=1e-3)
        assert gains.shape[1] == context.shape[1] == 144


def test_the_order_is_the_scorers(model: UtilityModel) -> None:
    """A scorer that follows norms of keys, recomputed from the recorded keys."""
    ids = ids_of(130, 2)
    policy = load_policy("knorm", None, {"sinks": 3, "window": 5})
    gains = model.gains(ids, policy, 4)
    with torch.inference_mode():
        layers = model._answered(ids, 5, 4)
        for index, layer in layers.items():
            later = torch.cat(layer.later, dim=1)
            assert later.shape[1] == 4
            worth = utilities(
                later, layer.keys, layer.values, model._outputs[index], model._scale, len(ids)
            )
            wanted = torch.zeros(122, dtype=torch.float64)
            for keys, own in zip(layer.keys, worth, strict=True):
                places = range(3, 125)
                best = sorted(places, key=lambda i, keys=keys: float(keys[i].norm()))
                wanted += own[torch.tensor(best)].double()
            assert gains[index] == pytest.approx(wanted.numpy(), rel=1e-5, abs=1e-9)


def _argv(tmp_path: Path, lengths: list[int], *more: str) -> list[str]:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt_token_ids": ids_of(n, n)}) for n in lengths]
    file.write_text("\n".join(lines))
    output = str(tmp_path / "mine.yaml")
    argv = ["calibrate", "--utility", "--model", MODEL, "--prompts", str(file), "-o", output]
    return [*argv, *more]


@pytest.mark.parametrize("own", [[], ["--relative"]])
def test_the_command_writes_a_policy(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: UtilityModel,
    own: list[str],
) -> None:
    lengths = [200, 260]
    assert main(_argv(tmp_path, lengths, "--horizon", "3", *own)) == 0
    printed = capsys.readouterr().out
    assert "a profile of 8 layers over 2 prompts" in printed
    # On the prompts themselves lengths of a prompt's own are best, and the profile is no worse
    # than equal lengths.
    found = re.findall(r"keeps ([\d.]+)% .* equal lengths ([\d.]+)%, .* own ([\d.]+)%", printed)
    assert len(found) == 3
    for profile, equal, best in (map(float, row) for row in found):
        assert equal < profile <= best + 0.1
    policy = load_policy(str(tmp_path / "mine.yaml"))
    auto = load_policy("auto")
    same = set(type(policy).model_fields) - {"name", "description", "allocator"}
    assert policy.model_dump(include=same) == auto.model_dump(include=same)
    model.prepare(auto)
    gains = [model.gains(ids_of(n, n), auto, 3) for n in lengths]
    rows = [rows_of(relative(one) if own else one) for one in gains]
    wanted = np.mean(rows, axis=0)
    written = policy.as_data()["allocator"]
    assert np.abs(np.array(written["keep"]) - wanted).max() <= 0.5e-4 + 1e-9
    assert written["model"] == model.shape
    assert policy.plan(1000, 8, 16).estimate().end.keep.sum() == 8 * 120
    with pytest.raises(ValueError, match="profile of 8 layers, but this model has 4"):
        policy.plan(1000, 4, 16)


@pytest.mark.parametrize(
    ("lengths", "more", "message"),
    [
        ([200], ["--kv-policy", "full"], "'full' keeps every token"),
        ([200], ["--kv-policy", "h2o"], "scores in every step"),
        ([200], ["--kv-policy", "pyramidinfer"], "scores in every step"),
        (
            [200],
            ["--kv-policy", "knorm", "--kv-policy-args", '{"recent": 0.3}'],
            "does not take each head's best-scored tokens",
        ),
        (
            [200],
            ["--kv-policy", "duoattention"],
            "heads of kind .streaming., which go with allocator",
        ),
        ([200, 151], [], "prompt 2 has 151 tokens: a profile of policy 'auto' needs at least 152"),
        ([200], ["--horizon", "0"], "--horizon 0 must be at least 1"),
        ([200], ["--horizon", "1000000"], "have 1000200 tokens, and the model has"),
        ([200], ["--picture", "p.png"], "--picture does not go with --utility"),
        ([200], ["--engine-args", "{}"], "--engine-args does not go with --utility"),
        ([200], ["--heads"], "--utility does not go with --heads"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    lengths: list[int],
    more: list[str],
    message: str,
) -> None:
    assert main(_argv(tmp_path, lengths, *more)) == 2
    captured = capsys.readouterr()
    line = captured.err.splitlines()[-1]  # behind what Transformers says of loading
    assert line.startswith("vllm-pyramid: error: ") and re.search(message, line), captured.err
    assert not (tmp_path / "mine.yaml").exists()


def test_flags_of_profiles_alone_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = _argv(tmp_path, [200], "--horizon", "3", "--relative")
    argv.remove("--utility")
    assert main(argv) == 2
    assert "--horizon, --relative without --utility would have no effect" in (
        capsys.readouterr().err
    )
