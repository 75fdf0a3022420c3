# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid top`: numbers of recorded metrics, several servers, one that is down."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from vllm_pyramid.tools.cli import main
from vllm_pyramid.tools.top.frame import frame
from vllm_pyramid.tools.top.samples import PARTS, POLICY, SIMPLE, Reading, parse

# Three requests to `vllm serve` with `pyramidkv` and a budget of 64 on the built-in model.
RECORDED = (Path(__file__).parent / "recorded_metrics.txt").read_text(encoding="utf-8")


def busy() -> str:
    """Requests hold blocks, one has failed, and two prompts wait."""
    text = RECORDED
    for name, value in (
        ("vllm:num_requests_running", 3),
        ("vllm:num_requests_waiting", 2),
        ("vllm:num_preemptions_total", 1),
        ("vllm_pyramid:evictions_total", 13),
        ("vllm:generation_tokens_total", 124),
    ):
        text, count = re.subn(rf"^({name}\{{.*\}}) \S+$", rf"\g<1> {value}", text, flags=re.M)
        assert count == 1, name
    for layer, blocks in enumerate((4000, 3000, 2500, 2000, 1000, 500, 200, 0)):
        name = f'vllm_pyramid:blocks_held{{engine="0",layer="{layer}"}}'
        assert f"{name} 0.0" in text
        text = text.replace(f"{name} 0.0", f"{name} {blocks}.0")
    kind = "# TYPE vllm_pyramid:requests_by_level gauge\n"
    levels = (("whole", 2), ("50%", 0), ("lowest", 1))
    sample = 'vllm_pyramid:requests_by_level{{engine="0",level="{}"}} {}\n'
    text = text.replace(kind, kind + "".join(sample.format(*one) for one in levels))
    return text.replace('reason="scores"} 0.0', 'reason="scores"} 1.0')


@pytest.fixture
def server() -> Iterator[str]:
    """A server that answers the recorded metrics."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(busy().encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def text_of(now: list[Reading], before: list[Reading] | None = None) -> str:
    console = Console(width=170, no_color=True, force_terminal=False, record=True)
    with console.capture() as capture:
        console.print(frame(now, before))
    return capture.get()


def test_recorded_numbers() -> None:
    (engine,) = parse(RECORDED).values()
    assert (engine.policy, engine.budget) == ("pyramidkv", "64")
    assert engine.of("evictions") == 3 and engine.of("pool_blocks") == 16383
    assert engine.parts["blocks_freed"] == {
        str(layer): float(blocks) for layer, blocks in enumerate(range(66, 88, 3))
    }
    assert engine.of("blocks_freed") == sum(range(66, 88, 3))
    assert engine.of("prefix_hits") / engine.of("prefix_queries") == pytest.approx(928 / 1446)
    assert engine.used_blocks == 0 and engine.of("failed") == 0


def test_every_name_is_one_that_a_server_exports() -> None:
    exported = set(re.findall(r"^# TYPE (\S+)", RECORDED, re.M))
    wanted = {*SIMPLE.values(), *(metric for metric, _ in PARTS.values()), POLICY}
    assert wanted <= exported


def test_a_frame_since_the_start() -> None:
    out = text_of([Reading("http://a:8000", 0.0, parse(busy()))])
    line = next(line for line in out.splitlines() if "pyramidkv 64" in line)
    assert "81% 13,200/16,383" in line and "64%" in line
    assert "3 (2 whole, 1 lowest)" in line
    assert line.split()[-7:] == ["2", "64%", "13", "612", "124", "1", "1"]
    layers = next(line for line in out.splitlines() if "4,000" in line)
    assert "█" in layers and layers.split()[-2:] == ["4,000", "0"]


def test_rates_between_frames_and_a_server_that_was_started_anew() -> None:
    before = [Reading("a", 10.0, parse(RECORDED)), Reading("b", 10.0, parse(busy()))]
    now = [Reading("a", 14.0, parse(busy())), Reading("b", 14.0, parse(RECORDED))]
    lines = text_of(now, before).splitlines()
    cells = [line.split() for line in lines if "pyramidkv" in line]
    assert cells[0][-5:] == ["2.5", "0.0", "25.0", "1", "1"]  # (13 - 3) / 4, (124 - 24) / 4
    assert cells[1][-5:-2] == ["3", "0.0", "24"], "it counts from 0 again"
    assert "evictions/s" in lines[0]


def test_several_servers_and_one_that_is_down(server, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "170")
    assert main(["top", "--once", server]) == 0
    assert "13,200/16,383" in capsys.readouterr().out
    assert main(["top", "--once", f"{server}/v1", "http://127.0.0.1:9"]) == 1
    out = capsys.readouterr().out
    assert "13,200/16,383" in out and "refused" in out.lower()
    assert main(["top", "--once", f"{server}/elsewhere"]) == 1
    assert "404" in capsys.readouterr().out
    assert main(["top", "--once", "http://127.0.0.1:port"]) == 1
    assert "nonnumeric port" in capsys.readouterr().out


def test_a_server_without_a_policy() -> None:
    lines = [line for line in RECORDED.splitlines() if "vllm_pyramid" not in line]
    out = text_of([Reading("a", 0.0, parse("\n".join(lines) + "\n"))])
    assert "none" in out and "blocks held" not in out


def test_several_engines_of_one_server_are_in_order() -> None:
    lines = []
    for number in (10, 2, 0):
        lines += [line.replace('engine="0"', f'engine="{number}"') for line in busy().splitlines()]
    samples = parse("\n".join(lines) + "\n")
    assert list(samples) == ["0", "2", "10"]
    assert all(engine.used_blocks == 13200 for engine in samples.values())
    assert "a #10" in text_of([Reading("a", 0.0, samples)])
