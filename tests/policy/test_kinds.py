# SPDX-License-Identifier: Apache-2.0
"""From a `kind` to its class: all that are in the package are found, and classes of the user's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_pyramid.methods
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.kinds import built_in_kinds, parse_component, resolve_kind
from vllm_pyramid.policy.page_scorer import PageScorer
from vllm_pyramid.policy.policy import SECTIONS, Policy
from vllm_pyramid.policy.scorer import Scorer

FOLDER = Path(vllm_pyramid.methods.__file__).parent
# Some of each section: what users have in their files.
KINDS = {
    "scorer": {
        "none",
        "recency",
        "observation_window",
        "accumulated_attention",
        "persistence",
        "recent_ensemble",
    },
    "allocator": {*("uniform", "shares", "arithmetic"), *("global", "decay")},
    "selector": {"top_k", "top_k_shared"},
    "schedule": {"prompt_end", "interval", "pressure", "thin_generated"},
    "chunk": {"points"},
    "values": {"device", "host", "ridge"},
    "attend": {"all", "pages"},
    "heads": {"adaptive", "alike", "streaming"},
}


def _written() -> list[str]:
    """All kinds that the source says, wherever in the two folders but for kernels."""
    folders = (FOLDER, FOLDER.parent / "policy")
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    texts = [path.read_text() for path in paths if "kernels" not in path.parts]
    return [kind for text in texts for kind in re.findall(r"^    kind: .*= \"(\w+)\"", text, re.M)]


def test_every_kind_of_the_package_is_found_once() -> None:
    bases = (*SECTIONS.values(), PageScorer)  # which is a part of a part
    found = [kind for base in bases for kind in built_in_kinds(base)]
    assert sorted(found) == sorted(_written()) and len(found) >= 20


@pytest.mark.parametrize("section", SECTIONS)
def test_the_kinds_of_a_section(section: str) -> None:
    base = SECTIONS[section]
    kinds = built_in_kinds(base)
    assert base.section == section and KINDS[section] <= kinds.keys()
    assert list(kinds) == sorted(kinds)
    for kind, cls in kinds.items():
        assert issubclass(cls, base) and cls.__module__.startswith(
            ("vllm_pyramid.methods.", "vllm_pyramid.policy.")
        )
        assert resolve_kind(base, kind) is cls
        cls.check_class()
        if all(field == "kind" or not f.is_required() for field, f in cls.model_fields.items()):
            part = parse_component(base, kind)
            assert type(part) is cls and part.kind == kind


def test_the_kinds_are_found_by_whoever_asks_first() -> None:
    """A worker that only reads a policy has imported nothing else of the package."""
    code = (
        "from vllm_pyramid.policy.kinds import built_in_kinds;"
        "from vllm_pyramid.policy.scorer import Scorer;"
        "print(*built_in_kinds(Scorer))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == list(built_in_kinds(Scorer))


# Classes of the user's ----------------------------------------------------------------------------

MODULE = '''
from vllm_pyramid.methods.accumulated import AccumulatingScorer
from vllm_pyramid.policy.allocator import Allocator, CurveAllocator
from vllm_pyramid.policy.schedules import Schedule
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.policy.selectors import Selector
from vllm_pyramid.policy.values import Values


class Norms(Scorer):
    power: float = 2.0

    def score(self, view):
        return view.keys.norm(dim=-1) ** self.power


class Scoreless(Scorer):
    """A slip of the pen."""

    def scoer(self, view):
        return view.keys.norm(dim=-1)


class Blind(AccumulatingScorer):
    pass


class Curveless(CurveAllocator):
    count: int = 2


class Undecided(Selector):
    pass


class OnceOnly(Schedule):
    pass


class Somewhere(Values):
    pass


class Nothing:
    pass


def function(view):
    return view.keys
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of the user's, in a folder that Python looks into."""
    name = f"own_methods_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def _preset(folder: Path, **sections: str) -> str:
    lines = ["budget: 64", *(f"{key}: {value!r}" for key, value in sections.items())]
    path = folder / "mine.yaml"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_scorer_of_the_users(own: str, tmp_path: Path) -> None:
    path = _preset(tmp_path, scorer=f"{own}:Norms")
    policy = load_policy(path, 32, {"power": 3.0})
    assert type(policy.scorer).__name__ == "Norms" and policy.scorer.kind == f"{own}:Norms"
    assert policy.scorer.model_dump() == {"kind": f"{own}:Norms", "power": 3.0}
    assert load_policy("snapkv", 32, {"scorer": f"{own}:Norms", "power": 3.0}).scorer == (
        policy.scorer
    )
    again = Policy.model_validate(policy.as_data())
    assert again == policy and type(again.scorer) is type(policy.scorer)
    # It is nobody else's: neither a kind of the package nor found under a short name.
    assert not any("Norms" in cls.__name__ for cls in built_in_kinds(Scorer).values())


CLASSES = [
    ("scorer", "Scoreless", r"the scorer OWN:Scoreless has no method `score\(self, inputs\)`"),
    (
        "allocator",
        "Curveless",
        r"the allocator OWN:Curveless has no method `curve\(self, mean, num_layers, capacity\)`",
    ),
    ("scorer", "Curveless", "the scorer 'OWN:Curveless' is not a subclass of Scorer"),
    ("allocator", "Norms", "the allocator 'OWN:Norms' is not a subclass of Allocator"),
    ("scorer", "Nroms", "the scorer 'OWN:Nroms': .*no attribute 'Nroms'.*PYTHONPATH"),
]


@pytest.mark.parametrize(("section", "name", "message"), CLASSES)
@pytest.mark.parametrize("way", ["file", "arguments"])
def test_a_class_that_cannot_work_is_named_in_one_sentence(
    own: str, tmp_path: Path, section: str, name: str, message: str, way: str
) -> None:
    parts = {section: f"{own}:{name}"}
    policy, args = "snapkv", parts
    if way == "file":
        policy, args = _preset(tmp_path, **{"scorer": "recency", **parts}), {}
    with pytest.raises(ValueError, match=message.replace("OWN", own)) as caught:
        load_policy(policy, args=args)
    said = str(caught.value)
    assert "\n" not in said and "pydantic" not in said and "validation error" not in said
    if way == "file":
        assert re.match(rf"policy '.*mine\.yaml': {section} \(line \d\): ", said)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no_such_module_at_all:Thing", "No module named 'no_such_module_at_all'.*PYTHONPATH"),
        (":Thing", "cannot import the scorer ':Thing'"),
        ("no_such_module_at_all", "unknown scorer kind .*valid kinds: .*recency.*package.module"),
    ],
)
def test_modules_that_are_not_there(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy("snapkv", 64, {"scorer": kind})


def test_fields_of_plain_types_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuples, sets and enumerations are lists and strings in JSON, and come back as they were."""
    (tmp_path / "travellers.py").write_text(
        "from enum import Enum\n"
        "from vllm_pyramid.policy.scorer import Scorer\n"
        "class How(Enum):\n    A = 'a'\n    B = 'b'\n"
        "class Travels(Scorer):\n"
        "    layers: tuple[int, ...] | None = (0, 1)\n"
        "    pairs: tuple[tuple[int, int], ...] = ((1, 2),)\n"
        "    how: How = How.B\n"
        "    names: frozenset[str] = frozenset({'x'})\n"
        "    def score(self, view):\n        return view.keys.norm(dim=-1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    policy = load_policy(
        "keydiff", None, {"scorer": {"kind": "travellers:Travels", "pairs": [[3, 4]]}}
    )
    assert policy.scorer.pairs == ((3, 4),)  # type: ignore[attr-defined]
    again = Policy.model_validate(json.loads(json.dumps(policy.as_data())))
    assert again == policy and again.scorer == policy.scorer


def test_a_class_in_a_script_is_refused() -> None:
    with pytest.raises(ValueError, match="is defined in the script that is run"):
        load_policy("keydiff", None, {"scorer.kind": "__main__:Mine"})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"schedule": "interval"}, "the schedule 'interval' would have no effect"),
        ({"recent": 0.5}, "selector.recent"),
    ],
)
def test_what_solved_lengths_would_ignore_is_refused(args: dict[str, Any], message: str) -> None:
    scorer = {"kind": "future_attention", "queries": 1}
    parts = {"window": 1, "scorer": scorer, "allocator": "global"}
    with pytest.raises(ValueError, match=message):
        load_policy("snapkv", 512, {**parts, **args})
