# SPDX-License-Identifier: Apache-2.0
"""Servers on several devices are compared with one device, and asked by one client."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.plumbing.one_device import LENGTHS, Answers, answers_of_one_device, client_of, complete
from tests.plumbing.server import Server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def one_device(random_model: Path, folder: Path) -> Answers:
    """Its traces are in `folder / "one"`."""
    return answers_of_one_device(random_model, folder / "one")


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


def check_answers(
    client: openai.OpenAI,
    model: Path,
    expected: Answers,
    lengths: Iterable[int] = LENGTHS,
    **own: Any,
) -> None:
    """Send prompts one by one: tokens and reports are those of one device."""
    for length in lengths:
        answer = complete(client, model, length, **own)
        assert (answer.choices[0].token_ids, answer.kv_transfer_params) == expected[length]
