# SPDX-License-Identifier: Apache-2.0
"""Threads and memory that the CPU platform chooses where the user left them open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

GIB = 2**30
# Variables that an engine with a policy chooses for its processes.
# What another test's engine may have decided (`frontend/weights.py`).
DECIDED = "PYRAMID_CPU_WEIGHTS"
CHOSEN = ("PYRAMID_CPU_PLATFORM", "THP_MEM_ALLOC_ENABLE", "VLLM_CPU_OMP_THREADS_BIND")


@pytest.fixture
def defaults() -> Iterator[Any]:
    """The module, with nothing left in the environment of what it chose for other tests' engines.

    It comes before `monkeypatch`, which would put such a variable back, as if it were the user's.
    """
    from vllm_pyramid.compat.platform import defaults

    defaults.withdraw()
    yield defaults
    defaults.withdraw()


@pytest.mark.parametrize(
    ("replicas", "workers", "nodes", "bind"),
    [
        (1, 1, [[0, 1]], "0,1"),  # both cores compute
        (1, 1, [[0, 1, 2, 3], [4, 5, 6, 7]], "0,1,2,3"),  # a worker stays on a node, as in vLLM
        (1, 2, [[0, 1], [2, 3]], "0,1|2,3"),
        # vLLM alone would refuse to start: more workers than nodes, each on one node.
        (1, 2, [[0, 1, 2, 3]], "0,1|2,3"),
        (1, 3, [[0, 1, 2, 3], [4, 5, 6, 7]], "0,1|2,3|4,5,6,7"),
        (1, 4, [[0, 1], [2, 3]], "0|1|2|3"),
        (1, 2, [[*range(20)]], "0,1,2,3,4,5,6,7,8|10,11,12,13,14,15,16,17,18"),
        (1, 3, [[0, 1]], "nobind"),
        (1, 1, [[*range(16)]], None),  # one core of many for the front end: vLLM's own rule
        (1, 2, [[*range(16)], [16, 17]], ",".join(map(str, range(16))) + "|16,17"),
        (2, 1, [[0, 1]], "0|1"),
        (2, 2, [[0, 1], [2, 3]], "0|1|2|3"),
        (3, 1, [[0, 1]], "nobind"),
        # vLLM's own rule would bind both to the first node.
        (2, 1, [[*range(10)], [*range(10, 20)]], "0,1,2,3,4,5,6,7,8|10,11,12,13,14,15,16,17,18"),
    ],
)
def test_threads(defaults, replicas, workers, nodes, bind) -> None:
    assert defaults.threads_to_bind({}, workers, nodes, replicas) == bind


@pytest.mark.parametrize(
    ("arguments", "replicas"),
    [
        ({}, 1),
        ({"data_parallel_size": 3}, 3),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, 2),
        ({"data_parallel_size": 2, "data_parallel_size_local": 0}, 0),  # engines on other hosts
        ({"data_parallel_size": 2, "data_parallel_rank": 1}, 1),  # a command for each
    ],
)
def test_replicas_share_the_host(defaults, monkeypatch, random_model, arguments, replicas) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv(defaults.BIND, "nobind")
    args = EngineArgs(str(random_model), **arguments)
    assert defaults.replicas_here(args) == replicas
    defaults.choose(args)
    assert args.additional_config == {defaults.MEMORY_KEY: max(1, replicas)}


@pytest.mark.parametrize(
    ("environment", "bind"),
    [
        ({"VLLM_CPU_OMP_THREADS_BIND": "0"}, None),
        ({"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}, None),
        ({"VLLM_CPU_SIM_MULTI_NUMA": "1"}, None),
        ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, None),
        ({"OMP_NUM_THREADS": "1"}, "nobind"),  # vLLM would bind, and set another number
    ],
)
def test_threads_that_the_user_chose(defaults, environment, bind) -> None:
    assert defaults.threads_to_bind(environment, 1, [[0, 1]]) == bind


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ([], True),
        (["--gpu-memory-utilization", "0.5"], False),
        (["--gpu-memory-utilization", "0.92"], False),  # vLLM's default, but written by the user
        (["--kv-cache-memory-bytes", "1000000"], False),
    ],
)
def test_memory_is_chosen_where_the_command_line_leaves_it_open(
    defaults: Any,
    monkeypatch: pytest.MonkeyPatch,
    random_model: Path,
    flags: list[str],
    chosen: bool,
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setenv(defaults.BIND, "nobind")
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", str(random_model), *flags]))
    defaults.choose(args)
    assert args.additional_config == ({defaults.MEMORY_KEY: 1} if chosen else {})
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", str(random_model), *flags]))
    defaults.choose(args)
    assert args.additional_config == {}


def test_memory_is_chosen_where_python_leaves_it_open(defaults, monkeypatch, random_model) -> None:
    """`LLM` has a default of its own, which it hands on like a value of the user's."""
    import vllm
    from vllm.entrypoints import llm as module

    made: list[Any] = []

    class Enough(Exception):
        pass

    def stop(engine_args: Any, **_: Any) -> Any:
        made.append(engine_args)
        raise Enough

    monkeypatch.setattr(module.LLMEngine, "from_engine_args", stop)
    monkeypatch.setenv(defaults.BIND, "nobind")
    for arguments, chosen in (
        ({}, True),
        ({"gpu_memory_utilization": float("0.92")}, False),
        ({"kv_cache_memory_bytes": 1 << 20}, False),
    ):
        with pytest.raises(Enough):
            vllm.LLM(str(random_model), **arguments)
        args = made.pop()
        defaults.choose(args)
        assert args.additional_config == ({defaults.MEMORY_KEY: 1} if chosen else {})


@pytest.mark.parametrize(
    ("total", "free", "replicas", "ranks", "own", "asked"),
    [
        (13, 9, 1, 1, 0.5, 0.8 * 9 + 0.5),  # vLLM would ask for 11.96 GiB and refuse to start
        (13, 9, 1, 1, 4, 9),  # never more than is free
        (256, 250, 1, 1, 0.5, 0.8 * 250 + 0.5),
        (256, 250, 1, 2, 0.5, 0.4 * 250 + 0.5),
        (256, 250, 2, 1, 0.5, 0.4 * 250 + 0.5),
        (256, 250, 2, 2, 0.5, 0.2 * 250 + 0.5),
    ],
)
def test_a_worker_asks_for_what_is_free(
    defaults: Any,
    monkeypatch: pytest.MonkeyPatch,
    total: int,
    free: int,
    replicas: int,
    ranks: int,
    own: float,
    asked: float,
) -> None:
    """A share of what is free, and what the process has already: vLLM takes that out of it."""
    monkeypatch.setattr(
        defaults.psutil,
        "Process",
        lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=int(own * GIB))),
    )
    monkeypatch.setattr(
        defaults, "memory_of_worker_node", lambda workers: (total * GIB, free * GIB, workers)
    )
    config = SimpleNamespace(
        additional_config={defaults.MEMORY_KEY: replicas},
        parallel_config=SimpleNamespace(local_world_size=ranks),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.92),
    )
    defaults.take_free_memory(config)
    assert config.cache_config.gpu_memory_utilization * total == pytest.approx(asked)

    config.additional_config = {}
    config.cache_config.gpu_memory_utilization = 0.3  # the user's
    defaults.take_free_memory(config)
    assert config.cache_config.gpu_memory_utilization == 0.3


def test_what_was_chosen_for_an_earlier_engine_is_not_the_users(
    defaults: Any, monkeypatch: pytest.MonkeyPatch, random_model: Path
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(defaults, "cores_by_node", lambda: [[0, 1]])
    for name in (defaults.BIND, "OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    for workers, bind in ((1, "0,1"), (2, "0|1")):
        defaults.choose(EngineArgs(str(random_model), tensor_parallel_size=workers))
        assert os.environ[defaults.BIND] == bind
    defaults.choose(EngineArgs(str(random_model), data_parallel_size=2))
    assert os.environ[defaults.BIND] == "0|1"
    defaults.choose(EngineArgs(str(random_model), distributed_executor_backend="ray"))
    assert defaults.BIND not in os.environ
    defaults.choose(EngineArgs(str(random_model)))
    monkeypatch.setenv(defaults.BIND, "1")  # now it is
    defaults.choose(EngineArgs(str(random_model), tensor_parallel_size=2))
    assert os.environ[defaults.BIND] == "1"


def test_an_engine_without_a_policy_gets_nothing_of_it(defaults, monkeypatch, random_model) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.plugin import register

    register()
    monkeypatch.setattr(defaults, "cores_by_node", lambda: [[0, 1]])
    for name in (*CHOSEN, DECIDED, "OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    defaults.withdraw()  # what other tests chose
    before = dict(os.environ)
    defaults.choose(EngineArgs(str(random_model)))
    assert os.environ[defaults.BIND] == "0,1"
    EngineArgs(str(random_model)).create_engine_config()
    # vLLM's own platform sets some for itself.
    assert {name for name in os.environ if name in CHOSEN or "PYRAMID" in name} == set()
    assert before.items() <= os.environ.items()


def test_a_started_process_chooses_for_itself(defaults, monkeypatch, random_model) -> None:
    """What it inherits from an engine of the process that started it is not the user's."""
    from vllm.engine.arg_utils import EngineArgs

    for name in (*CHOSEN, defaults.CHOSEN, "OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)  # and `monkeypatch` deletes them afterwards
    monkeypatch.setattr(defaults, "cores_by_node", lambda: [[0, 1]])
    defaults.choose(EngineArgs(str(random_model)))
    monkeypatch.setattr(defaults, "_chosen", {})  # as in a started process
    monkeypatch.setattr(defaults, "cores_by_node", lambda: [[2, 3]])
    defaults.choose(EngineArgs(str(random_model)))
    assert os.environ[defaults.BIND] == "2,3"
    monkeypatch.setattr(defaults, "_chosen", {})
    monkeypatch.setenv(defaults.BIND, "3")  # its user's
    defaults.choose(EngineArgs(str(random_model)))
    assert os.environ[defaults.BIND] == "3"
    defaults.withdraw()
    # vLLM's own processes, such as a second front end, are a part of the engine.
    monkeypatch.setenv(defaults.BIND, "0,1")
    monkeypatch.setenv(defaults.CHOSEN, f'{{"{defaults.BIND}": "0,1"}}')
    monkeypatch.setattr(defaults.multiprocessing, "parent_process", lambda: object())
    defaults.choose(EngineArgs(str(random_model)))
    assert os.environ[defaults.BIND] == "0,1"
    defaults.withdraw()


@pytest.mark.parametrize(("users", "for_children"), [(None, "1"), ("0", "0")])
def test_processes_of_an_engine_with_a_policy_ask_for_huge_pages(
    defaults: Any,
    monkeypatch: pytest.MonkeyPatch,
    random_model: Path,
    users: str | None,
    for_children: str,
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv(defaults.BIND, "nobind")
    monkeypatch.delenv(defaults.HUGE_PAGES, raising=False)
    if users is not None:
        monkeypatch.setenv(defaults.HUGE_PAGES, users)
    defaults.choose(EngineArgs(str(random_model)))
    assert os.environ[defaults.HUGE_PAGES] == for_children
    assert os.environ[defaults.ACTIVE] == "1"  # and choose our platform
    defaults.withdraw()
    assert os.environ.get(defaults.HUGE_PAGES) == users
    assert defaults.ACTIVE not in os.environ
