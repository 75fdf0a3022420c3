# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for tests of pages; Debian's packages `chromium` and `chromium-driver`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Names the folder that pictures of the documentation are written to: docs/pictures.
PICTURES = "VLLM_PYRAMID_PICTURES"


@contextmanager
def browser(width: int = 1300, height: int = 850) -> Iterator[Any]:
    """A browser that has opened nothing yet. The test is skipped where there is none."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs a browser: install chromium and chromium-driver (apt) to run this test")
    pytest.importorskip("selenium", reason="needs selenium: pip install 'vllm-pyramid[dev]'")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield running
    finally:
        running.quit()


def complaints(running: Any) -> list[str]:
    """What the page's scripts complained of, and what could not be loaded."""
    return [
        entry["message"]
        for entry in running.get_log("browser")
        if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
    ]


def take_picture(running: Any, name: str, folder: Path) -> Path:
    """Save what is seen, among the documentation's pictures where `PICTURES` names them."""
    path = Path(os.environ.get(PICTURES) or folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    running.save_screenshot(str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    return path
