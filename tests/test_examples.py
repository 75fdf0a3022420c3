# SPDX-License-Identifier: Apache-2.0
"""Every example runs as its first lines say. Three starts of an engine, one for each that needs it.

The server and the offline example write traces, which the plotting example reads.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.plumbing.server import serving
from vllm_pyramid.tools.eval.haystack import topics

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
LAYERS = 8
# `vllm` and `vllm-pyramid` are those of this Python, and the package is that of this checkout.
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
}


def run(*command: str, folder: Path) -> str:
    """Run a command in a folder; what it printed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},  # a faster start
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def plot(traces: Path, files: int) -> None:
    """Run the plotting example on a folder of traces."""
    picture = traces.parent / "kept.png"
    printed = run(
        *(sys.executable, str(EXAMPLES / "plot_trace.py"), str(traces)),
        *("--picture", str(picture)),
        folder=traces.parent,
    )
    assert printed.count("budget") == files
    assert len(re.findall(r"layer +\d+: +\d+ tokens kept, \d+% of", printed)) == files * LAYERS
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_example_is_run() -> None:
    """This file names each; the tests below run them."""
    text = Path(__file__).read_text(encoding="utf-8")
    usage = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        if path.is_file():
            assert f'"{path.name}"' in text, f"{path.name} is not run here"
            assert f"examples/{path.name}" in usage, f"docs/usage.md does not name {path.name}"


def test_own_scorer(random_model: Path, tmp_path: Path) -> None:
    printed = run(
        *(sys.executable, str(EXAMPLES / "own_scorer.py"), str(random_model)), folder=tmp_path
    )
    found = re.search(r"prompt (\d+) tokens, kept by layer: (\[.*\])", printed)
    assert found is not None, printed
    tokens, kept = int(found.group(1)), json.loads(found.group(2))
    assert tokens > kept[0] > kept[-1] > 8 + 4, "budgets fall with depth"
    (positions,) = re.findall(r"KV head 0 kept the positions (\[.*\])", printed)
    places = json.loads(positions)
    assert len(places) == kept[0] and places[:4] == [0, 1, 2, 3]
    assert places[-8:] == list(range(tokens - 8, tokens))


def test_the_example_is_the_page(tmp_path: Path) -> None:
    """`examples/own_scorer.py` serves the class and the policy of docs/write_a_method.md."""
    page = (ROOT / "docs" / "write_a_method.md").read_text(encoding="utf-8")
    text = (EXAMPLES / "own_scorer.py").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    assert code.removeprefix("# my_methods.py\n").strip() in text
    shown, served = (
        re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0],
        re.findall(r'POLICY = """\n(.*?)"""', text, re.DOTALL)[0],
    )
    assert yaml.safe_load(shown) == yaml.safe_load(served)


def test_server_client_and_trace(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    traces = tmp_path / "traces"
    flags = ("--kv-trace", str(traces), "--enforce-eager", "--max-model-len", "2048")
    flags += ("--max-num-seqs", "16", "--kv-cache-memory-bytes", str(256 << 20))
    command = (str(EXAMPLES / "server.sh"),)
    with serving(random_model, *flags, log=tmp_path / "log", command=command) as server:
        client = str(EXAMPLES / "client.py")
        printed = run(sys.executable, client, "--base-url", f"{server.url}/v1", folder=tmp_path)
    found = re.findall(
        r"(\d+) kept in the first layer, (\d+) in the last, (\d+) blocks before, (\d+) after",
        printed,
    )
    small, half, full = ([int(number) for number in line] for line in found)
    assert 256 <= small[0] < half[0] < full[0], "of some 900 tokens"
    assert all(of[0] == of[1] for of in (small, half, full)), "equally much in every layer"
    assert small[3] < half[3] < full[3] == full[2]
    plot(traces, files=3)


def test_offline_and_trace(tmp_path: Path) -> None:
    """On the built-in model, as a reader starts it."""
    traces = tmp_path / "traces"
    offline = str(EXAMPLES / "offline.py")
    printed = run(sys.executable, offline, "--trace", str(traces), folder=tmp_path)
    found = re.findall(r"blocks: (\d+) before, (\d+) after", printed)
    assert len(found) == 2 and all(int(after) < int(before) for before, after in found)
    plot(traces, files=2)


def test_notebook(tmp_path: Path) -> None:
    """The cells of explore.ipynb, one after the other, as a kernel would run them."""
    notebook = json.loads((EXAMPLES / "explore.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) > 5
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells), "kept without what it printed"
    script = tmp_path / "explore.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells), encoding="utf-8")
    printed = run(sys.executable, str(script), folder=tmp_path)
    found = re.search(r"blocks: (\d+) before, (\d+) after", printed)
    assert found is not None and int(found[2]) < int(found[1]), printed
    assert re.search(r"kept by none: \d+% of the tokens", printed)
    assert "kept most: ['" in printed


def test_calibrate(random_model: Path, tmp_path: Path) -> None:
    texts = [text[:3000] for text in topics().values() if len(text) > 3000][:4]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "mine.yaml"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    engine = {"max_model_len": 2048, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    printed = run(
        *(str(EXAMPLES / "calibrate.sh"), str(random_model), str(prompts), str(output)),
        *("--engine-args", json.dumps(engine)),
        folder=tmp_path,
    )
    assert f"{LAYERS} layers over {len(texts)} prompts" in printed
    assert f"--kv-policy {output}" in printed
    policy = yaml.safe_load(output.read_text())
    assert policy["allocator"]["kind"] == "shares"
    assert len(policy["allocator"]["shares"]) == LAYERS
