# SPDX-License-Identifier: Apache-2.0
"""Every row of the matrix has every property of the battery, on one engine.

`make test` runs the rows of `Case.core`, `make test-all` the others too. A new preset needs a row
in `matrix.py`, and nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine import battery, battery_blocks, battery_prefixes
from tests.engine.bench import Bench, edge_jobs
from tests.engine.families import make_family
from tests.engine.matrix import BESIDE, CASES, ENGINE, MODEL, Case
from tests.engine.models import SHAPES
from tests.engine.support import EnginePool, Models, Outcome, is_compiled, is_cpu_build
from vllm_pyramid.policy import load_policy, policy_names
from vllm_pyramid.policy.capabilities import Feature

Property = Callable[[Bench], None]
# What a row must be able to do for a property.
BATTERY: dict[Property, Callable[[Case], Any]] = {
    battery.a_budget_beyond_the_prompt_is_full: lambda case: case.beyond,
    battery.opting_out_is_full: lambda case: case.like_full,
    battery.a_floor_beyond_the_prompt_is_full: lambda case: (
        case.evicts and str(case.budget).endswith("%") and case.beyond
    ),
    battery.it_bites: lambda case: case.evicts or case.beyond,
    battery.decode_attends_to_what_was_kept: lambda case: case.oracle,
    battery.order_of_arrival_changes_nothing: lambda case: True,
    battery.chunks_change_nothing: lambda case: True,
    battery.settings_of_requests_mix_in_a_batch: lambda case: True,
    battery.preempted_is_not_preempted: lambda case: True,
    battery.aborted_anywhere_leaves_nothing: lambda case: True,
    battery.sleep_changes_nothing: lambda case: True,
    battery_prefixes.a_hit_is_a_miss: lambda case: case.shares,
    battery_prefixes.hits_are_as_long_as_they_can_be: lambda case: case.resumes,
    battery_prefixes.salts_are_apart: lambda case: case.shares,
    battery_prefixes.a_resumed_turn_is_a_computed_one: lambda case: case.resumes,
    battery_prefixes.what_does_not_go_on_is_a_miss: lambda case: case.resumes,
    battery_blocks.nan_ends_one_request: lambda case: case.evicts,
    battery_blocks.a_raising_scorer_ends_one_request: lambda case: case.evicts and case.scored,
    battery_blocks.the_report_counts_blocks: lambda case: True,
    battery_blocks.a_pool_of_one_prompts_peak_is_enough: lambda case: True,
}
ROWS = {**CASES, **BESIDE}
TESTS = [
    pytest.param(
        name, check, marks=() if case.core else pytest.mark.slow, id=f"{name}-{check.__name__}"
    )
    for name, case in ROWS.items()
    for check, applies in BATTERY.items()
    if applies(case)
]
pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_every_preset_has_a_row() -> None:
    assert set(CASES) == set(policy_names())


@pytest.mark.parametrize("name", ROWS)
def test_rows_say_what_their_policies_cannot_do(name: str) -> None:
    """A property must not silently leave out a policy that has it."""
    case = ROWS[name]
    policy = load_policy(case.policy or name, case.budget, case.args)
    assert case.evicts == policy.evicts
    for has, feature in ((case.shares, Feature.PREFIX_CACHING), (case.resumes, Feature.KV_TURNS)):
        why = policy.why_not(feature)
        assert has == (why is None), why


@pytest.fixture(scope="session")
def full(tiny_model: Models) -> list[Outcome]:
    """What `full` answers, once for all rows."""
    pool = EnginePool()
    outcomes = pool.get(tiny_model(MODEL), kv_policy="full", **ENGINE).run(edge_jobs())
    pool.close()
    return outcomes


@pytest.fixture(scope="module")
def benches(full, engines, tiny_model, tmp_path_factory) -> Callable[[str], Bench]:
    """`benches(name)`: the row's engine, running; the one before ends."""
    current: dict[str, Bench] = {}
    folder = tmp_path_factory.mktemp("battery")

    def get(name: str) -> Bench:
        case = ROWS[name]
        if case.model in ("llama4", "gpt-oss") and not is_cpu_build():
            pytest.skip("this build of vLLM has no CPU kernels for experts")
        of_row = folder / "".join(filter(str.isalnum, name))
        if case.model in SHAPES:
            path = tiny_model(case.model)
        elif not (path := folder / case.model).exists():
            make_family(case.model, path)
        engine = engines.get(path, **case.engine(name, of_row))
        if name not in current or current[name].engine is not engine:
            current.clear()
            assert is_compiled(engine) != case.settings.get("enforce_eager", True)
            current[name] = Bench(engine, case, of_row, path, full if case.like_full else None)
        return current[name]

    return get


@pytest.mark.parametrize(("name", "check"), TESTS)
def test_battery(benches: Callable[[str], Bench], name: str, check: Property) -> None:
    bench = benches(name)
    bench.engine.broken = True  # unless this comes to its end: the next test starts another
    check(bench)
    bench.engine.check_nothing_left()
    bench.engine.broken = False
