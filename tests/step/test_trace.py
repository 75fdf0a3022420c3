# SPDX-License-Identifier: Apache-2.0
"""`--kv-trace`: what the files hold, what they are called, and when they appear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import steps
from vllm_pyramid.policy import load_policy
from vllm_pyramid.step.failures import Failure
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.step.trace import TraceWriter
from vllm_pyramid.step.trace_files import read_kept
from vllm_pyramid.worker.eviction_tracker import EvictionTracker

NUM_LAYERS = 3
NUM_KV_HEADS = 2
HEADS = [NUM_KV_HEADS] * NUM_LAYERS


def make_evictions(request_ids: list[str], prompt_len: int = 12) -> StepEvictions:
    """Layer 0 keeps 4 tokens, layer 1 everything, layer 2 keeps 8."""
    count = len(request_ids)
    kept_lens = [[4] * count, [prompt_len] * count, [8] * count]
    return steps.make_evictions([prompt_len] * count, kept_lens, budget=8, request_ids=request_ids)


def kept(seed: int, count: int, prompt_len: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(prompt_len, generator=generator)[:count].sort().values for _ in range(2)]
    return torch.stack(rows).to(torch.int32)


RECALL = torch.tensor([0.25, 0.75])  # of the two KV heads


def write(writer: TraceWriter, evictions: StepEvictions, seed: int = 0) -> None:
    for index in range(len(evictions.request_ids)):
        writer.record(evictions, index, 0, kept(seed + index, 4), RECALL)
        writer.record(evictions, index, 2, kept(seed + index + 100, 8), RECALL)
    writer.finish_step(evictions)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_holds_the_request(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path / "new" / "folder"), HEADS, 0, 1)
    write(writer, make_evictions(["cmpl-1", "cmpl-2"]))
    folder = tmp_path / "new" / "folder"
    assert files(folder) == ["cmpl-1.npz", "cmpl-2.npz"]
    for index, name in enumerate(["cmpl-1", "cmpl-2"]):
        with np.load(folder / f"{name}.npz") as trace:
            assert set(trace) == {
                *("request_id", "prompt_len", "budget", "layers", "held"),
                *(f"kept_{layer}" for layer in range(NUM_LAYERS)),
                *(f"recall_{layer}" for layer in range(NUM_LAYERS)),
            }
            assert str(trace["request_id"]) == name
            assert int(trace["prompt_len"]) == 12
            assert int(trace["budget"]) == 8
            assert trace["held"].tolist() == [4, 12, 8]
            assert trace["layers"].tolist() == [0, 1, 2]
            assert trace["held"].dtype == np.int32
            assert trace["kept_0"].tolist() == kept(index, 4).tolist()
            assert trace["kept_1"].tolist() == [list(range(12))] * NUM_KV_HEADS
            assert [trace[f"recall_{layer}"].tolist() for layer in range(NUM_LAYERS)] == [
                RECALL.tolist(),
                [1.0, 1.0],  # everything was kept
                RECALL.tolist(),
            ]
            assert trace["kept_2"].tolist() == kept(index + 100, 8).tolist()
            assert all(trace[f"kept_{layer}"].dtype == np.int32 for layer in range(NUM_LAYERS))
    assert not writer._open


def test_heads_with_lengths_of_their_own_are_layers_of_one_head(tmp_path: Path) -> None:
    """Two layers of two KV heads, of which one keeps everything; read as any other trace."""
    evictions = steps.make_evictions([9], [[9], [2], [3], [9]], budget=6, request_ids=["r"])
    writer = TraceWriter(str(tmp_path), [1] * 4, 0, 1, [5, 5, 7, 7], tables_per_layer=2)
    places = {1: [0, 8], 2: [0, 7, 8]}
    for lane, of_lane in places.items():
        positions = torch.tensor([of_lane], dtype=torch.int32)
        writer.record(evictions, 0, lane, positions, torch.tensor([0.5 / lane]))
    writer.finish_step(evictions)
    with np.load(tmp_path / "r.npz") as trace:
        assert int(trace["kv_heads"]) == 2
        assert trace["layers"].tolist() == [5, 5, 7, 7] and trace["held"].tolist() == [9, 2, 3, 9]
        assert [trace[f"kept_{lane}"].shape for lane in range(4)] == [
            (1, 9),
            (1, 2),
            (1, 3),
            (1, 9),
        ]
        assert [float(trace[f"recall_{lane}"][0]) for lane in range(4)] == [1, 0.5, 0.25, 1]
        assert all(trace[f"kept_{lane}"][0].tolist() == places[lane] for lane in places)
    (read,) = read_kept(tmp_path)
    assert (read.layers, read.heads, read.tokens) == ([5, 7], [2, 2], 9)
    assert read.counts.tolist() == [[2, *[1] * 7, 2], [2, *[1] * 6, 2, 2]]


@pytest.mark.parametrize(
    "request_id",
    ["../../etc/passwd", "a/b\\c", "ä b:c*?", "..", ".", "x" * 500, "ä" * 200, "tab\tnewline\n"],
)
def test_odd_names_stay_in_the_folder(tmp_path: Path, request_id: str) -> None:
    folder = tmp_path / "traces"
    write(TraceWriter(str(folder), HEADS, 0, 1), make_evictions([request_id]))
    assert files(tmp_path) == ["traces"]
    (name,) = files(folder)
    assert name.endswith(".npz") and not name.startswith(".") and name.isascii()
    with np.load(folder / name) as trace:
        assert str(trace["request_id"]) == request_id


def test_odd_names_do_not_meet(tmp_path: Path) -> None:
    request_ids = ["a/b", "a_b", "a:b", "x" * 200 + "1", "x" * 200 + "2"]
    write(TraceWriter(str(tmp_path), HEADS, 0, 1), make_evictions(request_ids))
    assert len(files(tmp_path)) == 5
    assert "a_b.npz" in files(tmp_path)


def test_a_preempted_request_replaces_its_file(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path), HEADS, 0, 1)
    write(writer, make_evictions(["r"]), seed=1)
    write(writer, make_evictions(["r"]), seed=2)
    assert files(tmp_path) == ["r.npz"]
    with np.load(tmp_path / "r.npz") as trace:
        assert trace["kept_0"].tolist() == kept(2, 4).tolist()


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(str(tmp_path), HEADS, 0, 1)
    write(writer, make_evictions(["r"]), seed=1)

    def break_off(file, **arrays) -> None:  # type: ignore[no-untyped-def]
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", break_off)
    write(writer, make_evictions(["r"]), seed=2)
    with np.load(tmp_path / "r.npz") as trace:
        assert trace["kept_0"].tolist() == kept(1, 4).tolist()


def test_later_evictions_are_written_as_positions_of_the_sequence(tmp_path: Path) -> None:
    policy = load_policy("h2o", 4, {"interval": 4, "fill_blocks": False})
    tracker = EvictionTracker(policy, NUM_LAYERS, 16, 2)
    tracker.add("r", 6, None)
    writer = TraceWriter(str(tmp_path), HEADS, 0, 1)

    def compute(computed: int, scheduled: int, *places: list[int]) -> None:
        columns = [np.array([n], np.int32) for n in (6, computed, scheduled)]
        step = tracker.begin_step(["r"], *columns)
        assert step.evictions is not None
        for layer in range(NUM_LAYERS):
            kept = torch.tensor(places, dtype=torch.int32)
            writer.record(step.evictions, 0, layer, kept, torch.full((2,), np.nan))
        writer.finish_step(step.evictions)

    for _ in range(2):  # as after a preemption
        compute(0, 6, [0, 2, 4, 5], [1, 2, 4, 5])
        compute(9, 1, [1, 3, 5, 7], [0, 3, 6, 7])
        compute(13, 1, [0, 1, 2, 3], [3, 4, 5, 7])
        assert files(tmp_path) == ["r.npz", "r@10.npz", "r@14.npz"]
        with np.load(tmp_path / "r@10.npz") as file:
            assert int(file["computed"]) == 10 and "prompt_len" not in file
            assert file["kept_2"].tolist() == [[2, 5, 7, 9], [1, 5, 8, 9]]
            assert np.isnan(file["recall_2"]).all()
        with np.load(tmp_path / "r@14.npz") as file:
            assert file["kept_0"].tolist() == [[2, 5, 7, 9], [9, 10, 11, 13]]
            assert file["held"].tolist() == [4] * NUM_LAYERS
    writer.forget("r")
    assert not writer._holds and not writer._open


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError("no")])
def test_a_file_that_cannot_be_written_is_left_out_and_counted(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TraceWriter(str(tmp_path), HEADS, 0, 1)

    def fail(file: Any, **arrays: Any) -> None:
        file.write(b"half of it")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(np, "savez_compressed", fail)
        assert writer.finish_step(make_evictions(["r0", "r1"])) == 2
    assert list(tmp_path.iterdir()) == []  # no half of a file either
    assert writer.finish_step(make_evictions(["r0", "r1"])) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r0.npz", "r1.npz"]


def test_a_trace_that_is_cut_off_is_not_resumed(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path), HEADS, 0, 1)
    writer.finish_step(make_evictions(["r0"]))
    path = tmp_path / "r0.npz"
    path.write_bytes(path.read_bytes()[:100])
    writer.resume("later", "r0", 12)
    assert "later" in writer._untraceable


def test_a_failed_request_has_no_trace(tmp_path: Path) -> None:
    writer, evictions = TraceWriter(str(tmp_path), HEADS, 0, 1), make_evictions(["r0", "r1"])
    evictions.failures.add(["r0"], Failure("scores", "NaN"))
    assert writer.finish_step(evictions) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["r1.npz"]
