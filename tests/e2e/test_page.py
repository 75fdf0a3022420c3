# SPDX-License-Identifier: Apache-2.0
"""One server with `--kv-page` and an API key: the page in a browser under load, `top`, clients."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.plumbing.browser import browser, complaints, take_picture
from tests.plumbing.server import Server, serving
from vllm_pyramid.tools.cli import main
from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.demo.run import build_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
LAYERS, KEY = 8, "the-key-of-this-test"
FLAGS = (
    *("--kv-policy", "pyramidkv", "--kv-budget", "15%", "--kv-min-tokens", "0", "--kv-page"),
    *("--api-key", KEY, "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", str(24 << 20), "--enable-prompt-tokens-details"),
    # By itself a turn goes the way that computes fewer tokens, which is not always what it names.
    *("--kv-turn-mode", "resume"),
)
# Of requests in the pictures, so that they show a load.
STRIPS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with serving(model_path(), *FLAGS, log=log) as running:
        yield running


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=300)


def get(url: str, key: str | None = None) -> tuple[int, str, Any]:
    """Status, text and headers of an answer."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as a:
            return a.status, a.read().decode(), a.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def data_of(server: Server) -> dict[str, Any]:
    status, text, _ = get(f"{server.url}/pyramid/data", KEY)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


@contextmanager
def load(server: Server, requests: int) -> Iterator[None]:
    """Requests that run until the block ends: prompts of several lengths, long answers."""
    stop = threading.Event()
    failures: list[Exception] = []

    prompts = [build_prompt(model_path(), 300 + 150 * index)[0] for index in range(6)]

    def ask(number: int) -> None:
        prompt = prompts[number % 6]
        while not stop.is_set():
            try:
                with client(server).completions.create(
                    model=str(model_path()),
                    prompt=f"Number {number}. {prompt}",
                    max_tokens=500 + 30 * number,  # so that they do not end together
                    stream=True,
                    extra_body={"ignore_eos": True},
                ) as answer:
                    for _ in answer:
                        if stop.is_set():
                            break
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(requests)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures


def wait_for(what: str, found: Any, seconds: float = 400) -> Any:
    """What `found()` returns once it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.2)
    raise AssertionError(f"never: {what}")


def test_keys_and_paths(server: Server) -> None:
    status, page, headers = get(f"{server.url}/pyramid")
    assert status == 200 and "<title>vllm-pyramid</title>" in page
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not re.search(r"(?:src|href)=\"(?!data:)|@import|https?://", page), "nothing is loaded"
    for key in (None, "wrong", KEY[:-1]):
        status, text, _ = get(f"{server.url}/pyramid/data", key)
        assert status == 401 and "API key" in text
    status, text, _ = get(f"{server.url}/pyramid/elsewhere", KEY)
    assert status == 404 and "no 'elsewhere'" in text


def test_the_numbers_are_those_of_the_requests(server: Server) -> None:
    """A request's strip is the eviction that its report tells of; idle again, nothing is held."""
    prompt, _ = build_prompt(model_path(), 900)
    seen: list[dict[str, Any]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(data_of(server))
            time.sleep(0.3)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        report = (
            client(server)
            .completions.create(
                model=str(model_path()),
                prompt=prompt,
                max_tokens=1000,
                extra_body={"ignore_eos": True, "vllm_xargs": {"kv_budget": "20%"}},
            )
            .kv_transfer_params
        )
    finally:
        stop.set()
        watcher.join()
    rows = [row for data in seen for row in data["engines"][0]["requests"] if any(row["freed"])]
    assert rows, "nothing was seen of it while it ran"
    for row in rows:
        assert row["policy"] == "pyramidkv" and row["prompt"] == report["prompt_tokens"]
        freed = [report["prompt_tokens"] - kept for kept in report["kept_tokens"]]
        assert row["freed"] == freed and row["budget"] == report["kv_budget"]
        for blocks, gone in zip(row["blocks"], freed, strict=True):
            held = row["computed"] - gone
            assert held <= 16 * blocks <= held + 3 * 16, "one block more may be allocated ahead"
    idle = wait_for("idle", lambda: (d := data_of(server)["engines"][0])["running"] == 0 and d)
    assert idle["pool"]["held"] == 0 and idle["pool"]["blocks"] > 1000
    assert 0 < idle["pool"]["cached"] < idle["pool"]["blocks"], "its prompt can be found again"
    assert idle["stats"]["evictions"] >= 1 and idle["layers"] == list(range(LAYERS))


def test_viewers_share_an_answer(server: Server) -> None:
    with ThreadPoolExecutor(8) as viewers:
        answers = list(viewers.map(lambda _: data_of(server), range(8)))
    assert len({answer["time"] for answer in answers}) < 8


def test_the_page_in_a_browser(server: Server, tmp_path: Path) -> None:
    with browser() as running, load(server, 12):
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.by import By
        from selenium.webdriver.common.keys import Keys

        def text(css: str) -> str:
            return str(running.find_element(By.CSS_SELECTOR, css).text)

        running.get(f"{server.url}/pyramid")
        wait_for("the question for the key", lambda: "API key" in text("#state"))
        running.find_element(By.ID, "key").send_keys(KEY, Keys.ENTER)
        wait_for("live", lambda: text("#state") == "live")
        assert not running.find_element(By.ID, "ask").is_displayed()
        assert text("#policy") == "pyramidkv, budget 15%"

        def buttons() -> list[Any]:
            found: list[Any] = running.find_elements(By.CSS_SELECTOR, "#requests button")
            return found

        wait_for("twelve strips", lambda: len(buttons()) >= 12)
        wait_for("an eviction", lambda: re.search(r"[1-9]\d? % held", text("#requests")))

        def tiles() -> dict[str, str]:
            """All of one moment."""
            pairs: list[list[str]] = running.execute_script(
                "return [...document.querySelectorAll('#tiles div')]"
                ".map(tile => [...tile.children].map(part => part.textContent))"
            )
            return dict(pairs)

        busy = wait_for("requests that run", lambda: (t := tiles())["running"] != "0" and t)
        assert float(busy["pool in use"].removesuffix(" %")) > 0 and busy["failed"] == "0"
        time.sleep(8)  # so that the picture has a history
        for theme in ("light", "dark"):
            now = running.execute_script("return document.documentElement.dataset.theme")
            if now != theme:
                ActionChains(running).send_keys("d").perform()
            time.sleep(1.5)
            wait_for(f"what page-{theme}.png shows", lambda: len(buttons()) >= STRIPS)
            take_picture(running, f"page-{theme}.png", tmp_path)
        # Something is drawn: the strip of a request that evicted and decodes has three colours.
        colours = (
            "return Math.max(0, ...[...document.querySelectorAll('#requests canvas')].map(c => {"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "const s = new Set();"
            "for (let i = 0; i < d.length; i += 4) s.add(d.slice(i, i + 4).join());"
            "return s.size}))"
        )
        wait_for("three colours", lambda: running.execute_script(colours) >= 3)
        # An answer on its way when a pause begins neither ends it nor changes what is seen.
        body = running.find_element(By.TAG_NAME, "body")
        running.execute_script(
            "window.answers = 0; window.real = fetch; window.fetch = async (...of) => {"
            "const answer = await window.real(...of); if (!paused) pause(); window.seen ??="
            "at('requests').textContent; window.answers++; return answer}"
        )
        wait_for("an answer while paused", lambda: running.execute_script("return window.answers"))
        time.sleep(1)
        still = "return window.seen === at('requests').textContent"
        assert text("#state") == "paused" and running.execute_script(still)
        # Answers that are compared are counted in /metrics alone.
        agreement = running.execute_script(
            "window.fetch = async () => new Response(arguments[0]);"
            "return askMetrics().then(() => agreement)",
            'vllm_pyramid:shadow_tokens_total{cache="evicted",a="b"} 8.0\n'
            'vllm_pyramid:shadow_agreed_tokens_total{cache="evicted",a="b"} 6.0\n'
            'vllm_pyramid:shadow_tokens_total{cache="whole",a="b"} 8.0\n'
            'vllm_pyramid:shadow_agreed_tokens_total{cache="whole",a="b"} 8.0\n',
        )
        assert agreement == 0.75
        running.execute_script("window.fetch = window.real; agreement = null")
        body.send_keys("p")
        wait_for("live again", lambda: text("#state") == "live")
        # The keyboard, on a page that stands still: a request may end at any time.

        def paused_with_requests() -> bool:
            body.send_keys("p")
            assert text("#state") == "paused"
            if buttons():
                return True
            body.send_keys("p")
            return False

        wait_for("a request that runs", paused_with_requests)
        body.send_keys(Keys.ARROW_DOWN)
        running.switch_to.active_element.send_keys(Keys.ENTER)
        wait_for("an opened request", lambda: "budget" in text("#title"))
        assert len(running.find_elements(By.CSS_SELECTOR, "#layers tr")) == LAYERS + 1
        running.find_element(By.ID, "close").click()
        body.send_keys("p")
        # An opened request that ends stays open and says so.
        opened = (
            "const b = document.querySelector('#requests button'); if (b) b.click(); return !!b"
        )
        wait_for("a request to open", lambda: running.execute_script(opened))
        wait_for("its end", lambda: text("#title").startswith("ended: "))
        assert len(running.find_elements(By.CSS_SELECTOR, "#layers tr")) == LAYERS + 1
        running.find_element(By.ID, "close").click()
        assert not running.find_element(By.ID, "one").is_displayed()
        # 503: on a machine this slow a step may take longer than the page waits; it asks again.
        expected = re.compile(r"status of (401|503)")
        said = [line for line in complaints(running) if not expected.search(line)]
        assert said == []


def turn(
    server: Server, tokens: list[int], salt: str, session: str | None = None, **settings: Any
) -> tuple[list[int], int, dict[str, Any]]:
    """Answer, cached tokens and report of a prompt; the session is named in the header."""
    answer: Any = client(server).completions.create(
        model=str(model_path()),
        prompt=tokens,
        max_tokens=40,
        temperature=0,
        extra_headers={} if session is None else {"X-KV-Session": session},
        extra_body={
            "vllm_xargs": settings,
            "cache_salt": salt,
            "return_token_ids": True,
            "ignore_eos": True,
        },
    )
    cached = answer.usage.prompt_tokens_details
    report = answer.kv_transfer_params
    return answer.choices[0].token_ids, cached.cached_tokens if cached else 0, report


def test_turns_of_a_named_session_are_those_of_carried_turns(server, capsys, monkeypatch) -> None:
    """Tokens, hits, reports; along a branch and an edit, with another salt, once forgotten."""
    numbers: Iterator[int] = iter(range(10**6))

    def words(count: int) -> list[int]:
        return [100 + 7919 * next(numbers) % 900 for _ in range(count)]

    questions = [words(500), words(200), words(200)]

    def check(tokens: list[int], turns: list[int], **settings: Any) -> list[int]:
        """Ask with carried turns and by name, each under a salt of its own; the answer."""
        carried = turn(server, tokens, "carried", kv_turns=turns, **settings)
        answer, cached, report = turn(server, tokens, "named", kv_session="talk", **settings)
        assert report.pop("kv_session") == "talk"
        # Of another prompt the server only knows where turns are named.
        said, of_carried = report.pop("resumed"), carried[2].pop("resumed")
        assert {**said, "because": ""} == {**of_carried, "because": ""}
        assert (answer, cached, report) == carried
        assert report["kv_turns"] == [*turns, len(tokens)]
        return answer

    turns: list[int] = []
    prompts: list[list[int]] = []
    said: list[int] = []
    for question in questions:
        prompts.append([*said, *question])
        said = [*prompts[-1], *check(prompts[-1], turns)]
        turns.append(len(prompts[-1]))
    resumed = turn(server, prompts[-1], "named", session="talk")[2]
    assert resumed["kv_session"] == "talk" and resumed["kv_turns"] == turns
    assert resumed["resumed_tokens"] > turns[0], "the third turn did resume"

    check([*said, *words(150)], turns, kv_turn_mode="exact")
    branch = [*prompts[1], *words(300)]
    check(branch, turns[:2])
    check([*branch, *words(100)], [*turns[:2], len(branch)])
    check([1, *prompts[2][1:]], [])
    edited = [*prompts[1][:-1], 1, *words(250)]
    check(edited, turns[:1])
    assert turn(server, prompts[2], "third salt", session="talk")[2]["kv_turns"] == [turns[2]]

    for name, status in (("no spaces", 400), ("x" * 129, 400), ("a", 400)):
        with pytest.raises(openai.BadRequestError, match=r"kv_session|X-KV-Session") as error:
            turn(server, prompts[0], "named", session=name, kv_session="b")
        assert error.value.status_code == status

    for method in ("GET", "DELETE"):
        request = urllib.request.Request(f"{server.url}/pyramid/sessions", method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert refused.value.code == 401
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["sessions", server.url]) == 0
    table = capsys.readouterr().out
    assert table.count(" talk ") == 2 and "named" not in table and "salt" not in table
    assert main(["sessions", server.url, "--json", "--session", "talk"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["turns"] for row in rows} == {1, 8}
    (tenant,) = [row["tenant"] for row in rows if row["turns"] == 8]
    forget = ["sessions", server.url, "--forget", "--session", "talk", "--tenant", tenant]
    assert main(forget) == 0 and main(forget) == 1
    assert capsys.readouterr().out == "forgotten: 1\nforgotten: 0\n"
    assert turn(server, prompts[2], "named", session="talk")[2]["kv_turns"] == [turns[2]]
    assert main(["sessions", server.url, "--api-key", "wrong"]) == 2
    assert "this server needs its API key" in capsys.readouterr().err


def test_top_shows_the_server(server, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["top", "--once", server.url]) == 0
    out = capsys.readouterr().out
    assert "pyramidkv 15%" in out and "blocks held" in out


def test_the_conversation_of_the_examples_resumes(server, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    example = ROOT / "examples" / "conversation.py"
    command = [sys.executable, str(example), "--base-url", f"{server.url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    turns = re.findall(r"turn (\d): (\d+) tokens in the prompt, (\d+) resumed", done.stdout)
    assert [int(turn) for turn, _, _ in turns] == [1, 2, 3], done.stdout
    assert turns[0][2] == "0" and any(int(resumed) for _, _, resumed in turns), done.stdout


@pytest.mark.usefixtures("prepared_programs")
def test_wrong_use_of_the_flag_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model_path())]
    done = subprocess.run([*command, "--kv-page"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "choose one with --kv-policy" in done.stderr
