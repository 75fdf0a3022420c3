# SPDX-License-Identifier: Apache-2.0
"""The command line: output that can be read by people and programs, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_pyramid.policy import load_policy, policy_names
from vllm_pyramid.tools.cli import main


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def write_config(folder: Path, **changes: Any) -> str:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "dtype": "float32",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_policies_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    out = capsys.readouterr().out
    for name in policy_names():
        policy = load_policy(name)
        assert name in out
        assert name == "random" or policy.paper.split()[-1] in out
        assert str(policy.budget) in out
    assert [row["name"] for row in run_json(capsys, "policies")] == policy_names()


def test_budgets_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(
        capsys,
        *("budgets", "--num-layers", "3", "--prompt-len", "1000", "--kv-policy", "pyramidkv"),
        *("--kv-budget", "12%", "--kv-policy-args", '{"beta": 10}'),
        *("--kv-min-tokens", "100"),
        *("--block-size", "32", "--num-kv-heads", "4", "--head-size", "64", "--dtype", "float32"),
    )
    plan = load_policy("pyramidkv", "12%", {"beta": 10}).plan(1000, 3, 32)
    assert [row["keep"] for row in report["layers"]] == plan.end.keep.tolist()
    assert [row["blocks"] for row in report["layers"]] == plan.end.blocks.tolist()
    assert report["total"]["keep"] == 3 * 120
    block_mib = 2 * 32 * 4 * 64 * 4 / 2**20
    assert report["total"]["mib"] == pytest.approx(plan.end.blocks.sum() * block_mib)
    assert report["full"] == {"keep": 3000, "blocks": 96, "mib": pytest.approx(96 * block_mib)}
    assert report["blocks_share"] == pytest.approx(plan.end.blocks.sum() / 96)


def test_budgets_with_a_system_prompt_that_stays(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["budgets", "--num-layers", "3", "--prompt-len", "20000", "--kv-policy", "auto"]
    argv += ["--kv-budget", "12%"]
    assert run_json(capsys, *argv)["protected_tokens"] == 0
    argv += ["--keep-first", "2545"]
    report = run_json(capsys, *argv)
    assert (report["budget_tokens"], report["protected_tokens"]) == (2096, 2541)
    assert [row["keep"] for row in report["layers"]] == [4637] * 3
    assert main(argv) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2096 on average beside 2541 tokens that stay in any case" in out


def test_budgets_with_v_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """(m + L) / 2m of the blocks on the device; V of the swapped pages on the host."""
    argv = ("budgets", "--num-layers", "32", "--prompt-len", "8192", "--kv-policy", "kcache")
    report = run_json(capsys, *argv)
    assert [row["blocks"] for row in report["layers"]] == [512] + [256] * 31
    assert report["block_size"] == 16 and report["full"]["blocks"] == 32 * 512
    assert report["blocks_share"] == 33 / 64
    page_mib = report["full"]["mib"] / report["full"]["blocks"]
    assert report["host_mib"] == pytest.approx(31 * 256 * page_mib)
    assert main([*argv]) == 0
    assert f"V in host memory: {report['host_mib']:.2f} MiB" in capsys.readouterr().out
    solved = ("--kv-policy", "xkv", "--kv-budget", "50%", "--kv-policy-args", '{"values": "host"}')
    report = run_json(capsys, *argv[:5], *solved)
    assert report["full"]["blocks"] == 32 * 512
    assert report["total"]["blocks"] <= 512 + 31 * 256


def test_budgets_of_heads_that_share_a_total(capsys: pytest.CaptureFixture[str]) -> None:
    """What a head may hold is what the other heads of its own layer leave."""
    argv = ("budgets", "--num-layers", "3", "--num-kv-heads", "4", "--prompt-len", "4000")
    report = run_json(capsys, *argv, "--kv-policy", "adakv", "--kv-budget", "200")
    least, most = report["layer"]["least"], report["layer"]["most"]
    assert report["num_layers"] == 12 and most == 4 * 200 - 3 * least


def test_budgets_of_streaming_heads_speak_of_heads(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["budgets", "--num-layers", "2", "--num-kv-heads", "4", "--prompt-len", "4096"]
    argv += ["--kv-policy", "duoattention"]
    argv += ["--kv-policy-args", json.dumps({"mask": [[1, 0, 0, 0], [1, 1, 0, 1]]})]
    report = run_json(capsys, *argv)
    streaming = 128 + 256
    # A layer's means, of the heads that keep everything and of those that stream.
    kept = [(4096 * whole + streaming * (4 - whole)) / 4 for whole in (1, 3)]
    assert [row["keep"] for row in report["layers"]] == kept
    assert main(argv) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Each KV head has a length of its own" in said
    assert "a block holds 64 tokens of one head" in said


def test_budgets_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_config(tmp_path)
    report = run_json(capsys, "budgets", "--model", model, "--kv-budget", "64")
    shape = {key: report[key] for key in ("num_layers", "num_kv_heads", "head_size", "dtype")}
    assert shape == {"num_layers": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}
    report = run_json(capsys, "budgets", "--model", model, "--dtype", "float16")
    assert report["dtype"] == "float16"


def test_only_full_attention_layers_are_counted(capsys, tmp_path) -> None:
    model = write_config(
        tmp_path,
        model_type="qwen3",
        architectures=["Qwen3ForCausalLM"],
        layer_types=["full_attention", "sliding_attention"] * 2,
        use_sliding_window=True,
        sliding_window=128,
    )
    report = run_json(capsys, "budgets", "--model", model)
    assert report["num_layers"] == 2
    assert "2 full-attention layers of 4 evict" in report["source"]
    assert [row["layer"] for row in report["layers"]] == [0, 2]
    (companion,) = report["other_layers"]
    assert (companion["kind"], companion["layers"], companion["sees"]) == ("sliding", 2, 128)
    page = report["full"]["mib"] / report["full"]["blocks"]
    assert companion["held"] == 144 and companion["mib"] == pytest.approx(2 * 9 * page)
    assert main(["budgets", "--model", model]) == 0
    assert "2 layers with a window of 128 tokens hold 144 each" in capsys.readouterr().out


def write_states(folder: Path) -> str:
    """A configuration of 4 layers, of which 2 keep states."""
    return write_config(
        folder,
        model_type="granitemoehybrid",
        architectures=["GraniteMoeHybridForCausalLM"],
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=16,
        mamba_d_head=32,
        mamba_d_state=32,
    )


def test_states_make_blocks_long(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The size is vLLM's, unless the user gives one; the states' pages are as large."""
    argv = ["budgets", "--model", write_states(tmp_path), "--prompt-len", "3000"]
    argv += ["--kv-policy", "snapkv", "--kv-budget", "300"]
    report = run_json(capsys, *argv)
    assert report["block_size_from"] == "vllm" and report["block_size"] > 16
    given = run_json(capsys, *argv, "--block-size", "544")
    assert given["block_size"] == 544 and given["block_size_from"] == "given"
    page = given["full"]["mib"] / given["full"]["blocks"]
    assert [row["layer"] for row in given["layers"]] == [1, 3]
    assert [row["blocks"] for row in given["layers"]] == [2, 2]
    (states,) = given["other_layers"]
    assert (states["kind"], states["layers"], states["blocks"]) == ("state", 2, 2)
    assert states["mib"] == pytest.approx(2 * page)
    assert given["request"]["mib"] == pytest.approx(6 * page)
    assert given["request"]["full_mib"] == pytest.approx(14 * page)
    assert main([*argv, "--block-size", "544"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "vLLM may make blocks longer than 544 tokens" in out
    assert "33.3 % of them stay for 10.0 % of the tokens" in out
    assert "42.9 %: 2.3 times as many fit" in out


def test_a_state_of_unknown_size(capsys, tmp_path, monkeypatch) -> None:
    """Where vLLM cannot be asked the output says so, and no total contains a guess."""

    def refuse(model: str, dtype: str) -> int:
        raise ValueError("no vLLM here")

    monkeypatch.setattr("vllm_pyramid.tools.budgets.other_layers.state_block_size", refuse)
    argv = ["budgets", "--model", write_states(tmp_path)]
    report = run_json(capsys, *argv)
    assert report["block_size"] == 16 and report["other_layers"][0]["mib"] is None
    assert report["request"] is None and report["block_size_unknown"] == "no vLLM here"
    assert main(argv) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "(no vLLM here)" in out and "give --block-size as the server's log says it" in out
    assert "times as many fit" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kv-policy", "nope"], "unknown policy 'nope'"),
        (["--kv-budget", "5"], "at least 9"),
        (["--kv-policy-args", "{"], "not valid JSON"),
        (["--kv-policy", "xkv", "--keep-first", "9"], "does not work with --keep-first"),
        (["--prompt-len", "8", "--keep-first", "9"], "9 is more than the prompt's 8 tokens"),
    ],
)
def test_errors_are_one_line(capsys, argv, message) -> None:
    assert main(["budgets", "--num-layers", "4", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("vllm-pyramid: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("changes", "argv", "message"),
    [
        (None, [], "there is no config.json"),
        ({"model_type": "no-such-model"}, [], "cannot read the configuration"),
        ({"dtype": None}, [], "give --dtype"),
        ({}, ["--head-size", "64"], "come from the model"),
    ],
)
def test_model_errors(capsys, tmp_path, changes, argv, message) -> None:
    model = str(tmp_path) if changes is None else write_config(tmp_path, **changes)
    assert main(["budgets", "--model", model, *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["budgets", "--num-layers", "2", "--model", "x"],
        ["budgets", "--num-layers", "2", "--prompt-len", "-1"],
    ],
)
def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: vllm-pyramid" in capsys.readouterr().err


def test_budgets_count_what_drafts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A draft model's layers keep all, an EAGLE head's or an MTP module's one layer likewise."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    for name, layers in (("model", 8), ("draft", 2)):
        LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", **sizes).save_pretrained(
            tmp_path / name
        )
    given = ["budgets", "--model", str(tmp_path / "model"), "--kv-policy", "snapkv"]
    given += ["--kv-budget", "512", "--prompt-len", "4096", "--speculative-config"]
    draft = str(tmp_path / "draft")
    for speculation, layers in (
        ({"method": "draft_model", "model": draft}, 2),
        ({"method": "mtp"}, 1),
        ({"method": "ngram", "prompt_lookup_max": 3}, 0),
    ):
        assert main([*given, json.dumps(speculation), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["total"]["blocks"] == 8 * 512 // 16
        assert [kind["blocks"] for kind in report.get("other_layers", [])] == (
            [layers * 4096 // 16] if layers else []
        )
        if layers:
            share = (8 * 512 + layers * 4096) / ((8 + layers) * 4096)
            assert report["request"]["share"] == pytest.approx(share)
    assert main([*given, json.dumps({"method": "mtp"})]) == 0
    assert "Draft model, 1 layer: it keeps all tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*given, "mtp"])
    assert "'mtp' is not a JSON object" in capsys.readouterr().err


def test_budgets_show_what_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """12 % of the prompt in whole pages, all of it in dense layers, and the page of the token."""
    command = ("budgets", "--num-layers", "4", "--prompt-len", "8192", "--kv-policy")
    report = run_json(capsys, *command, "select")
    assert report["pages_visible"] == [513] * 4 and report["pages_read"] == [513, 513, 62, 62]
    half = run_json(capsys, *command, "select-evicted")
    assert half["pages_visible"] == [257] * 4 and half["pages_read"] == [257, 257, 62, 62]
    assert "pages_read" not in run_json(capsys, *command, "snapkv")
    assert main([*command, "select"]) == 0
    assert "reads 1150 of 2052 pages (blocks), 56.0 %" in " ".join(capsys.readouterr().out.split())
