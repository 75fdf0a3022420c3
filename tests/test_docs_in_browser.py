# SPDX-License-Identifier: Apache-2.0
"""The built site in a browser: a search finds pages, and it can be dark."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.plumbing.browser import browser, complaints

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


def test_search_and_dark_mode(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    with browser() as running:
        from selenium.webdriver.common.by import By

        build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        handler = functools.partial(Quiet, directory=str(tmp_path))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                running.get(f"http://127.0.0.1:{server.server_port}/index.html")
                colour = "return getComputedStyle(document.body).backgroundColor"
                themes = set()
                for theme in ("light", "dark"):
                    running.execute_script(
                        "document.querySelector(`[data-bs-theme-value=${arguments[0]}]`).click()",
                        theme,
                    )
                    time.sleep(1)  # it fades over
                    themes.add(running.execute_script(colour))
                assert len(themes) == 2, themes
                running.find_element(
                    By.CSS_SELECTOR, "[data-bs-target='#mkdocs_search_modal']"
                ).click()
                field = running.find_element(By.ID, "mkdocs-search-query")
                found: list[str] = []
                end = time.monotonic() + 60
                while not found and time.monotonic() < end:
                    field.clear()
                    field.send_keys("streaming-llm")
                    time.sleep(1)
                    links = running.find_elements(By.CSS_SELECTOR, "#mkdocs-search-results a")
                    found = [str(link.get_attribute("href")) for link in links]
                assert any("policies.html" in link for link in found), found
                assert complaints(running) == []
            finally:
                server.shutdown()
