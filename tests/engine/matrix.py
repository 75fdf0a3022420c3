# SPDX-License-Identifier: Apache-2.0
"""One row for each preset, with which it bites on short prompts; `battery.py` tests all rows.

`test_battery.py` fails for a preset without a row. To add one: choose a budget and arguments so
that prompts of 130 tokens lose some of theirs (or read less than all), and say what it cannot do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.models import SHAPES, write_centres
from tests.engine.support import NEAR_TIE

MODEL, BLOCK = "mistral", 16
# Without any setting of a policy.
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
}
WHOLE: dict[str, Any] = {"kv_policy": "full"}


@dataclass(frozen=True)
class Case:
    """A policy as the battery serves it.

    Attributes:
        budget, args: of the policy.
        beyond: a request's own settings with which nothing is left out; None: it has none.
        own: other settings of requests, which one batch mixes.
        policy: the preset, if the row's name is another.
        model: of `models.SHAPES`, or a family of `families.FAMILIES`.
        settings: of the engine.
        exact: the prompt attends to all of itself, so the first token is that of `full`.
        tokens: of an answer.
        least_step: the fewest tokens of a step.
        shares: whether requests share prefixes. resumes: whether turns resume the turn before.
        evicts: whether it ever drops a token. traced: whether traces say which.
        oracle: whether Transformers with hidden keys says what decoding gives.
        scored: whether a scorer ranks a prompt in a step in which no other evicts.
        best: whether kept positions are those that the scorer ranks best.
        near: how far rounding may move a log probability. Where the 12 likeliest keys are read, it
            decides between the last of them and the next.
        core: runs in `make test`; the others in `make test-all`.
    """

    budget: str | int | None = None
    args: dict[str, Any] = field(default_factory=dict)
    beyond: dict[str, Any] | None = field(default_factory=lambda: {"kv_budget": 4096})
    own: tuple[dict[str, Any], ...] = ({"kv_budget": 90}, {"kv_budget": "60%"})
    policy: str = ""
    model: str = MODEL
    settings: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    tokens: int = 12
    least_step: int = 48
    shares: bool = True
    resumes: bool = True
    evicts: bool = True
    traced: bool = True
    oracle: bool = True
    scored: bool = True
    best: bool = True
    near: float = NEAR_TIE
    core: bool = False

    @property
    def like_full(self) -> bool:
        """Whether the engine of `full` runs the same model in the same way."""
        return self.model == MODEL and self.settings.get("enforce_eager", True)

    def engine(self, name: str, folder: Path) -> dict[str, Any]:
        """Return the settings of the row's engine. `folder` takes its traces."""
        found = {**ENGINE, "kv_policy": self.policy or name, **self.settings}
        if self.budget is not None:
            found["kv_budget"] = self.budget
        if self.args:
            found["kv_policy_args"] = self.args
        if "centres" in self.args:
            file = write_centres(folder, SHAPES[self.model])
            found["kv_policy_args"] = {**self.args, "centres": str(file)}
        if self.evicts and self.traced:
            found["kv_trace"] = str(folder)
        return found


def keeps_all(**changes: Any) -> Case:
    """Return the row of a policy that evicts nothing."""
    return Case(**{"own": (), "evicts": False, "resumes": False, "best": False, **changes})


def inside(budget: int, args: dict[str, Any], **changes: Any) -> Case:
    """Return the row of a policy that evicts inside the prompt too."""
    return Case(budget, args, exact=False, resumes=False, **changes)


def gathers(budget: int, args: dict[str, Any], **changes: Any) -> Case:
    """Return the row of a policy that adds up attention, and evicts what is generated too."""
    return Case(budget, args, tokens=60, shares=False, resumes=False, **changes)


def of_answers(budget: int, args: dict[str, Any], **changes: Any) -> Case:
    """Return the row of a policy that keeps prompts whole, and evicts what is generated."""
    own = {"kv_budget": budget + 8}, {"kv_budget": 2 * budget}
    return Case(budget, args, **{"own": own, "tokens": 60, "resumes": False, **changes})


def of_heads(**changes: Any) -> Case:
    """Return the row of a policy whose KV heads have lengths of their own."""
    return Case(**{"own": (), "resumes": False, **changes})


_ATTEND = {"budget": 96, "dense_layers": 1, "sinks": 16, "recent": 16}
_PAGES: dict[str, Any] = {
    "oracle": False,
    "beyond": {"kv_attend_budget": 4096},
    "own": ({"kv_attend_budget": 160}, {"kv_attend_budget": "60%"}),
}
_HEADS = {"mask": [[0.9, 0.1], [0.2, 0.8], [0.3, 0.4], [0.7, 0.6]], "share": 0.5}
_WIDE = {"window": 16, "queries": 8}

CASES: dict[str, Case] = {
    "full": keeps_all(beyond=None, core=True),
    # Positions.
    "streaming-llm": Case(40, {"fill_blocks": False}, resumes=False, core=True),
    "random": Case("25%", {"window": 8}, resumes=False),
    # The attention of the prompt's end, or keys, in all layers alike or not.
    "snapkv": Case(40, core=True),
    "snapkv-max": Case("25%", {"window": 16}),
    "snapkv-expected": Case("25%", _WIDE, policy="auto", core=True),
    "pyramidkv": Case(40, core=True),
    "pyramidkv-wide": Case("25%", settings={"kv_min_tokens": 64}),
    "keydiff": Case("25%", {"window": 8}),
    # Lengths of the scores.
    "xkv": Case("20%", resumes=False, core=True),
    # Inside the prompt too.
    "snapkv-chunked": inside(48, {"chunk.tokens": 64, "chunk.keep": 64, **_WIDE}, core=True),
    "pyramidkv-chunked": inside(40, {"chunk.tokens": 80, "chunk.keep": 80}),
    "keydiff-chunked": inside(48, {"chunk.tokens": 64, "chunk.keep": 48, "window": 8}),
    # While generating too.
    "h2o": gathers(40, {"interval": 32}, core=True),
    "scissorhands": gathers(40, {"interval": 48, "queries": 30, "window": 4}),
    "keyformer": gathers(64, {"interval": 16}),
    # While generating alone.
    "r-kv": of_answers(16, {"interval": 16, "window": 8}, core=True),
    "triattention": of_answers(16, {"interval": 16, "window": 8, "centres": "made up"}),
    # Pages.
    "select": keeps_all(args={"attend": _ATTEND}, **_PAGES, core=True),
    "quest": keeps_all(args={"attend.budget": 96}, **_PAGES),
    "select-evicted": Case(
        "50%",
        {"attend": _ATTEND, **_WIDE},
        resumes=False,
        oracle=False,
        beyond={"kv_budget": 4096, "kv_attend_budget": 4096},
    ),
    # V in host memory.
    "kcache": keeps_all(
        args={"top_n": 12},
        beyond={"kv_top_n": 4096},
        own=({"kv_top_n": 6},),
        oracle=False,
        near=0.03,
        core=True,
    ),
    # KV heads.
    "duoattention": of_heads(
        args={**_HEADS, "heads.sinks": 8, "heads.recent": 40}, beyond=None, core=True
    ),
    "razorattention": of_heads(
        args={**_HEADS, "heads.recent": 40, "heads.recent_share": 0.25}, beyond=None
    ),
    "adakv": of_heads(
        budget="25%",
        args={"window": 16},
        beyond={"kv_budget": "100%"},
        own=({"kv_budget": "60%"},),
        shares=False,
        traced=False,  # refused
        oracle=False,
        best=False,
    ),
    # Prompts that are not computed in full.
    "pyramidinfer": Case(
        args={"decay_ratio": 0.5, "interval": 1, "min_context": 24, "piece_tokens": 128},
        beyond=None,
        own=({"kv_budget": "70%"},),
        exact=False,
        least_step=160,
        shares=False,
        resumes=False,
        oracle=False,
        scored=False,
        best=False,
    ),
}
# Features beside a policy, and models in which not every layer evicts.
_COMPILED = {"enforce_eager": False}
_SNAPKV: dict[str, Any] = {"budget": 64, "policy": "snapkv", "oracle": False, "best": False}
BESIDE: dict[str, Case] = {
    "snapkv, steps overlap": Case(
        40, policy="snapkv", settings={"async_scheduling": True}, core=True
    ),
    "snapkv-chunked, steps overlap": inside(
        48,
        {"chunk.tokens": 64, "chunk.keep": 64, **_WIDE},
        policy="snapkv-chunked",
        settings={"async_scheduling": True},
    ),
    "pyramidkv, a longer window inside": inside(
        40,
        {"chunk.tokens": 64, "chunk.keep": 64, "chunk.scorer": None, "chunk.window": 24},
        policy="pyramidkv",
    ),
    "snapkv, sums inside": inside(
        40,
        {"chunk.tokens": 64, "chunk.keep": 48, "chunk.scorer": "accumulated_attention"},
        policy="snapkv",
        shares=False,
    ),
    "h2o, inside the prompt": inside(
        40,
        {"chunk.tokens": 64, "chunk.keep": 48, "chunk.scorer": None, "schedule": "prompt_end"},
        policy="h2o",
        shares=False,
    ),
    "h2o, the prompt stays": of_answers(
        16, {"interval": 16, "schedule.prompt": "keep"}, policy="h2o", core=True
    ),
    "scissorhands, the prompt stays": of_answers(
        16,
        {"interval": 16, "queries": 12, "window": 4, "schedule.prompt": "keep"},
        policy="scissorhands",
    ),
    "r-kv, the prompt too": Case(
        64, {"interval": 48, "schedule.prompt": "evict"}, policy="r-kv", tokens=60, resumes=False
    ),
    # The paper's own: one token in, one out.
    "h2o, every token": gathers(
        40, {"interval": 1, "fill_blocks": False}, policy="h2o", scored=False
    ),
    "duoattention, inside the prompt": of_heads(
        args={**_HEADS, "heads.sinks": 8, "heads.recent": 40, "chunk.tokens": 100},
        policy="duoattention",
        beyond=None,
        exact=False,
        best=False,  # later evictions: its heads hold different numbers of tokens
    ),
    "pyramidkv, V in host memory": Case(
        40,
        {"values": {"kind": "host", "device_layers": 2, "top_n": 12}},
        policy="pyramidkv",
        beyond={"kv_budget": 4096, "kv_top_n": 4096},
        own=({"kv_budget": 90}, {"kv_top_n": 6}),
        resumes=False,
        oracle=False,
    ),
    "auto, ridge values": Case("25%", {**_WIDE, "values": "ridge"}, policy="auto", oracle=False),
    "snapkv, gemma3": Case(**_SNAPKV, model="gemma3", core=True),
    "snapkv, llama4": Case(**_SNAPKV, model="llama4"),
    "snapkv, gpt-oss": Case(**_SNAPKV, model="gpt-oss"),
    "snapkv, gemma3n": Case(**_SNAPKV, model="gemma3n"),
    "pyramidkv, compiled": Case(40, policy="pyramidkv", settings=_COMPILED),
    "snapkv, gemma3, compiled": Case(**_SNAPKV, model="gemma3", settings=_COMPILED),
    "xkv, compiled": Case("20%", policy="xkv", resumes=False, settings=_COMPILED),
    "kcache, compiled": keeps_all(
        args={"top_n": 12},
        beyond={"kv_top_n": 4096},
        own=({"kv_top_n": 6},),
        policy="kcache",
        oracle=False,
        near=0.03,
        settings=_COMPILED,
    ),
    "select, compiled": keeps_all(
        args={"attend": _ATTEND}, **_PAGES, policy="select", settings=_COMPILED
    ),
}
