# SPDX-License-Identifier: Apache-2.0
"""The file of `vllm-pyramid show` in a real browser: shades, layers, keys, light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plumbing.browser import browser, complaints
from vllm_pyramid.tools.show.engine import Shown
from vllm_pyramid.tools.show.page import page

pytestmark = pytest.mark.cpu

COUNTS = [[2, 1, 0, 2], [2, 0, 0, 2], [2, 0, 0, 1]]


def shown(policy: str, counts: list[list[int]]) -> Shown:
    return Shown(
        policy=policy,
        answer="<b>so</b>",
        report={"kv_budget": 2, "kept_tokens": [3, 2, 2], "blocks_before": 3, "blocks_after": 2},
        pieces=["One", " <i>two", " three", " four\n"],
        layers=[0, 2, 5],
        heads=[2, 2, 2],
        counts=counts,
    )


def shades(running: Any, policy: int) -> list[float]:
    """The strength of each token's shade."""
    found: list[float] = running.execute_script(
        "return [...document.querySelectorAll('section')[arguments[0]]"
        ".querySelectorAll('.text span')].map(s => Number(s.style.getPropertyValue('--s')))",
        policy,
    )
    return found


def test_layers_tokens_and_keys(tmp_path: Path) -> None:
    file = tmp_path / "kept.html"
    everything = [[2] * 4 for _ in range(3)]
    file.write_text(page([shown("pyramidkv", COUNTS), shown("full", everything)], "m"), "utf-8")
    with browser() as running:
        from selenium.webdriver.common.by import By
        from selenium.webdriver.common.keys import Keys

        running.get(file.as_uri())
        assert running.title == "What is kept: pyramidkv, full"
        body = running.find_element(By.TAG_NAME, "body")
        words = running.find_elements(By.CSS_SELECTOR, "section:first-of-type .text span")
        assert [word.get_attribute("textContent") for word in words] == shown("", COUNTS).pieces

        def shade(share: float) -> float:
            return pytest.approx(0.1 + 0.65 * share if share else 0, abs=2e-3)

        assert shades(running, 0) == [shade(1), shade(1 / 6), 0, shade(5 / 6)]
        assert shades(running, 1) == [shade(1)] * 4
        assert "gone" in (words[2].get_attribute("class") or "")
        body.send_keys(Keys.ARROW_RIGHT)
        assert running.find_element(By.ID, "which").text == "layer 0 of the model"
        assert shades(running, 0) == [shade(1), shade(0.5), 0, shade(1)]
        body.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        assert running.find_element(By.ID, "which").text == "layer 5 of the model"
        body.send_keys("j", "j")
        about = running.find_element(By.ID, "about").text
        assert 'token 1 " <i>two" is kept by pyramidkv: 1 of 3 layers, 1 of 6 heads' in about
        assert "here 0 of 2 heads" in about and "full: 3 of 3 layers, 6 of 6 heads" in about
        body.send_keys("a")
        assert running.find_element(By.ID, "which").text == "all layers"
        running.find_elements(By.CSS_SELECTOR, ".bars button")[1].click()
        assert running.find_element(By.ID, "which").text == "layer 2 of the model"
        colour = "return getComputedStyle(document.body).backgroundColor"
        before = running.execute_script(colour)
        body.send_keys("d")
        assert running.execute_script(colour) != before
        body.send_keys("d")
        assert running.execute_script(colour) == before
        assert "<b>so</b>" in running.find_element(By.CSS_SELECTOR, ".answer").text
        assert complaints(running) == []
