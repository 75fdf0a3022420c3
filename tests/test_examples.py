# SPDX-License-Identifier: Apache-2.0
"""Every example runs as its first lines say."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import yaml

from tests.plumbing.server import Server, free_port, members, serving
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.tools.eval.haystack import topics

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.usefixtures("prepared_programs")]

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
LAYERS = 8
# `vllm` and `vllm-pyramid` are those of this Python, and the package is that of this checkout.
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
}
# The random model's own template knows no tools. Behind a special token, whose neighbours no token
# can join, an answer leaves the prompt before it as it was.
TEMPLATE = (
    "{% if tools %}<|begin|>tools<|pad|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|begin|>{{ message.role }}<|pad|>{{ message.content }}"
    "{{ message.tool_calls | tojson if message.tool_calls }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant<|pad|>{% endif %}"
)


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


def test_server_client_and_trace(random_model, tmp_path, monkeypatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    traces = tmp_path / "traces"
    template = tmp_path / "tools.jinja"
    template.write_text(TEMPLATE)
    flags = ("--kv-trace", str(traces), "--enforce-eager", "--max-model-len", "4096")
    flags += ("--chat-template", str(template), "--enable-auto-tool-choice")
    flags += ("--tool-call-parser", "hermes")
    # By default the server keeps these chats whole, and computes the later turns anew.
    flags += ("--kv-keep", "none", "--kv-turn-mode", "resume")
    flags += ("--max-num-seqs", "16", "--kv-cache-memory-bytes", str(256 << 20))
    command = (str(EXAMPLES / "server.sh"),)
    started = {"log": tmp_path / "log", "command": command, "fresh": True}
    with serving(random_model, *flags, **started) as server:
        client = str(EXAMPLES / "client.py")
        printed = run(sys.executable, client, "--base-url", f"{server.url}/v1", folder=tmp_path)
        plot(traces, files=3)
        check_other_clients(server.url, random_model, tmp_path)
        check_agents(server, tmp_path)
        check_tools(server.url)
    found = re.findall(
        r"(\d+) kept in the first layer, (\d+) in the last, (\d+) blocks before, (\d+) after",
        printed,
    )
    small, half, full = ([int(number) for number in line] for line in found)
    assert 256 <= small[0] < half[0] < full[0], "of some 900 tokens"
    assert all(of[0] == of[1] for of in (small, half, full)), "equally much in every layer"
    assert small[3] < half[3] < full[3] == full[2]


def check_other_clients(url: str, model: Path, folder: Path) -> None:
    """A conversation, LangChain, and vLLM's load generator."""
    place = ("--base-url", f"{url}/v1")
    printed = run(sys.executable, str(EXAMPLES / "conversation.py"), *place, folder=folder)
    turns = re.findall(r"turn (\d): (\d+) tokens in the prompt, (\d+) resumed", printed)
    assert [int(turn) for turn, _, _ in turns] == [1, 2, 3]
    # A random model's answers are other tokens when they come back: tests/e2e/test_page.py has a
    # conversation that resumes.
    assert turns[0][2] == "0", printed
    printed = run(sys.executable, str(EXAMPLES / "langchain_chat.py"), *place, folder=folder)
    assert re.findall(r"budget (\S+): [1-9]\d+ tokens", printed) == ["12%", "50%"]
    few = {"INPUT": "500", "OUTPUT": "8", "PROMPTS": "4"}
    command = ("env", *(f"{name}={value}" for name, value in few.items()))
    printed = run(*command, str(EXAMPLES / "bench_serve.sh"), url, str(model), folder=folder)
    assert re.search(r"Successful requests: +4\b", printed), printed


def check_agents(server: Server, folder: Path) -> None:
    """One server, both clients: the same prompts, evicted, in sessions, with the tools in them."""
    before = server.metrics()["vllm_pyramid:evictions_total"][-1]
    seen = {}
    for name, url in (("agent_openai.py", f"{server.url}/v1"), ("agent_anthropic.py", server.url)):
        printed = run(sys.executable, str(EXAMPLES / name), "--base-url", url, folder=folder)
        seen[name] = [
            tuple(map(int, numbers))
            for numbers in re.findall(
                r"turn (\d+): (\d+) tokens in the prompt, (\d+) kept in a layer, "
                r"(\d+) turns in the session, (\d+) tool calls",
                printed,
            )
        ]
    turns = seen["agent_openai.py"]
    assert turns == seen["agent_anthropic.py"], "greedy, and rendered alike"
    # The model calls no tools: each task ends with its first answer.
    assert [(turn, number, calls) for turn, _, _, number, calls in turns] == [
        *((1, 1, 0), (2, 2, 0), (3, 3, 0))
    ]
    assert all(256 <= kept < tokens // 2 for _, tokens, kept, _, _ in turns)
    assert server.metrics()["vllm_pyramid:evictions_total"][-1] >= before + 6
    log = server.log.read_text()
    for path in ("/v1/messages", "/v1/chat/completions"):
        assert log.count(f'"POST {path} HTTP/1.1" 200 OK') >= 3, path
        assert f'"POST {path} HTTP/1.1" 4' not in log and f'"POST {path} HTTP/1.1" 5' not in log


def check_tools(url: str) -> None:
    """Tools are in the prompt, and so are a call and its result, whichever client sends them."""
    tools = runpy.run_path(str(EXAMPLES / "agent_tools.py"))
    (tool, *_), system = tools["TOOLS"], tools["SYSTEM"]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    asked: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": "?"}]
    call = {"type": "function", "function": {"name": tool["name"], "arguments": "{}"}}
    asked += [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", **call}]},
        {"role": "tool", "tool_call_id": "1", "content": "two files"},
    ]
    function = {"name": tool["name"], "parameters": tool["schema"]}
    given: list[Any] = [{"type": "function", "function": function}]
    lengths = [
        client.chat.completions.create(
            model=model, messages=asked, max_tokens=2, **more
        ).usage.prompt_tokens
        for more in ({}, {"tools": given})
    ]
    assert lengths[1] > lengths[0] + 20
    used = {"type": "tool_use", "id": "1", "name": tool["name"], "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "two files"}
    blocks: list[Any] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    answer = anthropic.Anthropic(base_url=url, api_key="none").messages.create(
        model=model,
        system=system,
        messages=blocks,
        tools=[{"name": tool["name"], "input_schema": tool["schema"]}],
        max_tokens=2,
    )
    assert answer.usage.input_tokens == lengths[1]


def test_engines_that_prefill_and_that_decode(random_model: Path, tmp_path: Path) -> None:
    """Also through "disaggregated_router.py", which tests/e2e/test_disaggregated.py tests."""
    port, log, folder = free_port(), tmp_path / "log", tmp_path / "states"
    command = [
        *(str(EXAMPLES / "disaggregated.sh"), str(random_model), "--enforce-eager"),
        *("--max-model-len", "4096", "--max-num-seqs", "4", "--dtype", "float32"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--kv-min-tokens", "0"),
    ]
    own = {"PORT": str(port), "FOLDER": str(folder)}
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, **own},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + 400
        while "the router is at" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=9)
        model = client.models.list().data[0].id
        question = "The quick brown fox jumps over the lazy dog. " * 40
        said = [
            client.completions.create(
                model=model, prompt=question, max_tokens=8, temperature=0, logprobs=logprobs
            )
            for logprobs in (None, None, 0)
        ]
        handed = [one.model_extra["kv_transfer_params"].get("handed") for one in said]
        length = said[0].usage.prompt_tokens
        assert handed == [{"tokens": length}, {"tokens": length}, None]
        assert len({one.choices[0].text for one in said}) == 1, "the last one is computed by one"
        assert not list(folder.iterdir())
    finally:
        process.terminate()
        process.wait(60)
    assert not members(process.pid), "engines are left"
    assert not folder.exists()


def test_lm_eval(random_model: Path, tmp_path: Path) -> None:
    """lm-eval's own command with a task over a local file."""
    pytest.importorskip("lm_eval")
    texts = [text[:2500] for text in topics().values() if len(text) > 2500][:3]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text, "end": "x"}) + "\n" for text in texts))
    task = {
        "task": "local_text",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{end}}",
        "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    printed = run(
        *("env", "MAX_MODEL_LEN=2048", "VLLM_CPU_KVCACHE_SPACE=1"),
        *(str(EXAMPLES / "lm_eval.sh"), str(random_model), "local_text"),
        *("--include_path", str(tmp_path), "--output_path", str(tmp_path / "results")),
        folder=tmp_path,
    )
    assert "exact_match" in printed
    (result,) = (tmp_path / "results").rglob("results_*.json")
    assert json.loads(result.read_text())["n-samples"]["local_text"]["effective"] == 3


def test_the_kubernetes_example_is_valid() -> None:
    """By the published schema, where kubernetes-validate is installed; our flags by our parser."""
    documents = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text("utf-8")))
    kinds = {document["kind"]: document for document in documents}
    assert set(kinds) == {"Deployment", "PersistentVolumeClaim", "Service"}
    spec = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    check_settings(
        {
            name.removeprefix("--").replace("-", "_"): value
            for name, _, value in (word.partition("=") for word in container["args"])
            if name.startswith("--kv-")
        }
    )
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"].items() <= labels.items()
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents:
        validate.validate(document, "1.30", strict=True)


def test_the_ray_serve_example_is_valid() -> None:
    """Its engine arguments are vLLM's, and the policy's settings are ours; Ray is not started."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    (application,) = yaml.safe_load((EXAMPLES / "ray_serve.yaml").read_text("utf-8"))[
        "applications"
    ]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    (config,) = application["args"]["llm_configs"]
    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set(config["engine_kwargs"]) <= names
    check_settings(config["engine_kwargs"]["additional_config"])


def check_settings(config: dict[str, object]) -> None:
    """The settings are accepted, and there is a policy."""
    settings = KVSettings.from_additional_config(config)
    assert settings is not None and settings.served() is not None


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
