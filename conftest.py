# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests, in tests/ and lab/. vLLM is not imported: most do not need it (8 s)."""

from __future__ import annotations

import gc
import os
import secrets
import subprocess
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.plumbing import prepared
from tests.plumbing.budgets import Budgets, used_seconds
from tests.plumbing.shards import shard_members
from tests.plumbing.site.avx2_alone import pretend as pretend_avx2

MARKS = ("cpu", "engine", "gpu")
OF_ENGINES = ("tests/engine/", "tests/e2e/")
# TEST_BUDGET_SCALE multiplies what a test may take: processors differ, and a shared one with AVX2
# alone takes up to four times what the budgets assume. TEST_TIMES names a folder for what each
# test took.
BUDGETS = Budgets(float(os.environ.get("TEST_BUDGET_SCALE", "4")))

# Before anything imports vLLM, transformers or torch; children inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# vLLM imports a package of CUDA kernels that compiles C++ in the background of every process in
# which it has not succeeded yet: without CUDA in each, for half a minute of a core.
os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="N/M", help="run shard N of M of the slow tests")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its own option
def pytest_configure(config: pytest.Config) -> None:
    """What tests start has `site/sitecustomize.py`; no process of pytest itself does."""
    _draw_seed(config)
    gc.enable()  # one that a test started
    pretend_avx2()
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        site = Path(__file__).parent / "tests" / "plumbing" / "site"
        paths = [str(site), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    prepared.environment()


def _draw_seed(config: pytest.Config) -> None:
    """Every run draws other examples; `--hypothesis-seed` repeats those of an earlier one.

    Processes of pytest-xdist get the option of the one that starts them. Hypothesis draws the same
    examples in every run where it finds a CI system, unless a profile says otherwise. There is no
    deadline of an example: `BUDGETS` bounds tests.
    """
    from hypothesis import settings

    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(secrets.randbelow(1 << 32))
    settings.register_profile("tests", deadline=None, derandomize=False, print_blob=True)
    settings.load_profile("tests")


def pytest_report_header(config: pytest.Config) -> str:
    return _how_to_repeat(config)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """With `-q` there is no header."""
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(_how_to_repeat(config))


def _how_to_repeat(config: pytest.Config) -> str:
    return f"examples drawn with --hypothesis-seed={config.option.hypothesis_seed}"


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, for tests that draw without Hypothesis."""
    return int(request.config.option.hypothesis_seed)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test without a mark gets `engine` in the folders of engines and servers, else `cpu`.

    Where pytest-xdist hands out whole files in this order, the long ones go first: the short ones
    then fill what is left of the time, and all workers end together.
    """
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in MARKS):
            item.add_marker("engine" if item.nodeid.startswith(OF_ENGINES) else "cpu")
        if item.nodeid.startswith("lab/"):
            item.add_marker(pytest.mark.slow)
    if shard := config.getoption("--shard"):
        number, count = (int(part) for part in shard.split("/"))
        slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
        chosen = shard_members(slow, number, count)
        items[:] = [item for item in items if item.nodeid in chosen]
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test fails that takes longer than its tier allows."""
    before, start = BUDGETS.imported(), used_seconds()
    result = yield
    seconds, imports = used_seconds() - start, BUDGETS.imported() != before
    if over := BUDGETS.judge(item, seconds, imports=imports):
        pytest.fail(f"{over}: make it faster, or mark it slow (make test-all)", pytrace=False)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    if folder := os.environ.get("TEST_TIMES"):
        BUDGETS.write(Path(folder), os.environ.get("PYTEST_XDIST_WORKER", "main"))


def _turn(item: pytest.Item) -> int:
    """Files that take longest, files with engines, all others."""
    if item.get_closest_marker("long"):
        return 0
    return 1 if item.get_closest_marker("engine") else 2


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    elif item.get_closest_marker("engine") and (reason := taken_by_gpu()):
        pytest.skip(reason)


@cache
def taken_by_gpu() -> str | None:
    """Why engines of the tests, which are for the CPU, would not start there; None: they do.

    vLLM built for CUDA takes a GPU that the machine has, also one that is hidden from PyTorch.
    """
    from vllm.platforms import builtin_platform_plugins

    if builtin_platform_plugins["cuda"]() is None:
        return None
    return (
        "this vLLM would start the engine on this machine's GPU, and the test is for the CPU: "
        "run it with a CPU build (VLLM_BUILD=cpu make test), and scripts/gpu_check.sh for the GPU"
    )


@pytest.fixture(scope="module")
def prepared_programs() -> Iterator[None]:
    """Python programs that this process starts need not import vLLM again (`prepared.py`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", prepared.EitherPopen)
        yield


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model: 8 layers, 8 query and 4 KV heads, head size 32."""
    from tests.random_model import Shape, write_model
    from vllm_pyramid.tools.eval.haystack import topics

    folder = tmp_path_factory.mktemp("random-model")
    write_model(folder, Shape(), list(topics().values()))
    return folder
