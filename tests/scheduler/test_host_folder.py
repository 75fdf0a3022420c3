# SPDX-License-Identifier: Apache-2.0
"""Whatever the bytes of a bundle depend on changes the name of the folder that its file is in."""

from __future__ import annotations

import copy
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config.multimodal import MultiModalConfig

from tests.scheduler.harness import Setup, make_scheduler, vllm_config
from vllm_pyramid.methods.pages import SelectPages
from vllm_pyramid.policy.presets import load_policy
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.scheduler import host_folder
from vllm_pyramid.scheduler.host_folder import namespace_of, namespace_of_engines, weight_samples

SETUP = Setup(prefix_caching=True)


def name_of(config: Any, specs: Any = None) -> str:
    settings = ServedSettings.of(config)
    assert settings is not None
    return namespace_of(
        config, settings, specs or make_scheduler(SETUP, 90).coordinator.layer_specs
    )


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """A configuration of its own, of a model whose files may be changed."""
    made = copy.deepcopy(vllm_config(SETUP))
    shutil.copytree(made.model_config.model, tmp_path / "model")
    made.model_config.model = str(tmp_path / "model")
    return made


def test_it_is_the_same_after_a_restart(config: Any) -> None:
    assert name_of(config) == name_of(copy.deepcopy(config))


def one_weight_of_a_file_of_the_same_size_and_time(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next(Path(config.model_config.model).glob("*.safetensors"))
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def weights_written_again(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(Path(config.model_config.model).glob("*.safetensors"))
    os.utime(path, (1, 1))


def another_path_of_the_configuration(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.model_config.hf_config_path = "elsewhere"


def another_type_of_cache(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.cache_config.cache_dtype = "fp8"


def another_rope(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.model_config.hf_config.update({"rope_theta": 123.0})


def another_seed_of_the_hashes(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "77")


def another_version(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_folder, "__version__", "9.9")


def another_processor(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_folder, "units_of_processor", lambda: "other units")


def ranks_that_divide_the_heads(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.parallel_config.tensor_parallel_size = 2


@pytest.mark.parametrize(
    "change",
    [
        ranks_that_divide_the_heads,
        another_path_of_the_configuration,
        *(
            weights_written_again,
            one_weight_of_a_file_of_the_same_size_and_time,
            another_type_of_cache,
            another_rope,
            another_version,
        ),
        *(another_seed_of_the_hashes, another_processor),
    ],
)
def test_what_changes_it(config: Any, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    before = name_of(config)
    change(config, monkeypatch)
    assert name_of(config) != before


def test_engines_of_other_ranks_share_a_name(config: Any) -> None:
    """Their blocks differ in KV heads, which parts of a state name; not in tokens or types."""
    settings = ServedSettings.of(config)
    assert settings is not None
    specs = make_scheduler(SETUP, 90).coordinator.layer_specs

    def name(ranks: int, **own: Any) -> str:
        config.parallel_config.tensor_parallel_size = ranks
        return namespace_of_engines(config, settings, [replace(spec, **own) for spec in specs])

    heads = specs[0].num_kv_heads
    assert name(1) == name(2, num_kv_heads=2 * heads)
    others = [{"head_size": 2 * specs[0].head_size}, {"dtype": torch.float16}]
    others.append({"block_size": 2 * specs[0].block_size})
    assert len({name(1), *(name(1, **own) for own in others)}) == 4


def test_each_setting_of_images_changes_it(config: Any) -> None:
    names = set()
    for given in ({}, {"mm_processor_kwargs": {"crops": 4}}, {"mm_encoder_attn_dtype": "fp8"}):
        config.model_config.multimodal_config = MultiModalConfig(**given)
        names.add(name_of(config))
    assert len(names) == 3


def test_a_link_that_leads_back_ends_the_walk(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.json").write_text("{}")
    (tmp_path / "part" / "back").symlink_to(tmp_path)
    assert [name for name, *_ in weight_samples(tmp_path)] == ["part/a.json"]


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_large_files_are_told_by_samples(tmp_path: Path, suffix: str) -> None:
    """A tensor's first, middle or last bytes; also in a folder below, and behind a link."""
    content = torch.arange(2 << 20, dtype=torch.int32)
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    (folder / "part").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "linked").symlink_to(elsewhere)
    for place in (folder / "part", elsewhere):
        save_file({"a": content.clone(), "b": content[:9].clone()}, place / f"model{suffix}")

    def samples() -> str:
        return str([(name, size, sample) for name, size, _, sample in weight_samples(folder)])

    seen = {samples()}
    for place in (folder / "part", elsewhere):
        for index in (0, 1 << 20, -1):
            changed = content.clone()
            changed[index] = 7
            save_file({"a": changed, "b": content[:9].clone()}, place / f"model{suffix}")
            seen.add(samples())
    # Samples at equal distances see no place but by chance: the file's time tells the rest.
    assert len(seen) == 7 if suffix == ".safetensors" else len(seen) > 1


def test_what_makes_the_summaries_of_pages_changes_it(config: Any) -> None:
    """The scorer, and which layers have any; the budget by which pages are chosen does not."""
    settings = ServedSettings.of(config)
    assert settings is not None
    specs = make_scheduler(SETUP, 90).coordinator.layer_specs

    def name(**attend: Any) -> str:
        policy = load_policy("select").model_copy(update={"attend": SelectPages(**attend)})
        return namespace_of(config, replace(settings, policy=policy), specs)

    assert name(budget="6%", sinks=0) == name()
    scorers = [name(scorer="spread"), name(scorer="box"), name(dense_layers=1)]
    assert len({*scorers, name_of(config, specs)}) == 4


def test_the_layout_changes_it(config: Any) -> None:
    specs = make_scheduler(SETUP, 90).coordinator.layer_specs
    larger = [replace(spec, head_size=2 * spec.head_size) for spec in specs]
    assert name_of(config, specs) != name_of(config, larger)


def test_weights_that_are_not_known(config: Any) -> None:
    config.model_config.model = "organisation/model"
    config.model_config.hf_config._commit_hash = None
    with pytest.raises(ValueError, match="not known which weights organisation/model has"):
        name_of(config)
    config.model_config.hf_config._commit_hash = "abc"
    first = name_of(config)
    config.model_config.hf_config._commit_hash = "abd"
    assert name_of(config) != first
