# SPDX-License-Identifier: Apache-2.0
"""The schedulers that the machine runs: policies and features of an engine, a line each."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tests.scheduler.beside import Beside
from tests.scheduler.harness import Setup
from tests.scheduler.head_lengths import CHUNKED_KIND, KIND, SOME_KIND

# What a word of a variant's name sets. Other words say what the variant is to meet.
WORDS: dict[str, dict[str, Any]] = {
    "async": {"asynchronous": True},
    "v2": {"runner_v2": True},
    "shared": {"prefix_caching": True},
    "forecast": {"admission": "forecast"},
    "priorities": {"priorities": True},
    "turns": {"prefix_caching": True, "turns": True, "max_model_len": 288},
    "solved": {"policy": "xkv"},
    "inside": {"budget": 14, "max_model_len": 192},
    "mixed": {"budget": "100%"},
    "folder": {"host_folder": True},
}
SMALL = {"max_num_batched_tokens": 11, "long_prefill_token_threshold": 7}
MEDIUM = {"max_num_batched_tokens": 24}
PARTLY = {"reserve_full_prompt": False}  # a prompt begins before all of it has room

Args = tuple[tuple[str, Any], ...]
WINDOW: Args = (("window", 6),)
INSIDE: Args = (("chunk.tokens", 24), ("chunk.keep", 18))
OWN_SCORER: Args = (*INSIDE, ("chunk.scorer", None))
AT_INTERVALS: Args = (("sinks", 2), ("schedule", "interval"), ("schedule.interval", 5))
LEVELS: Args = (*WINDOW, ("schedule", "pressure"), ("schedule.levels", ("70%", "45%")))
KEPT = ("schedule.prompt", "keep")

NOT_FILLED = {"policy_args": (*WINDOW, ("fill_blocks", False))}
ON_HOST = {"policy_args": (*WINDOW, ("values", "host"))}
KEYS_INSIDE = {"policy": "keydiff", "policy_args": (*INSIDE, ("window", 4), ("sinks", 1))}
OWN_INSIDE = {"policy_args": (*OWN_SCORER, *WINDOW)}
WINDOWS_INSIDE = {"policy_args": (*INSIDE, *WINDOW)}
H2O = {
    "policy": "h2o",
    "budget": 9,
    "policy_args": (("interval", 3), ("fill_blocks", False), ("allocator", "arithmetic")),
}
STREAMING = {"policy": "streaming-llm", "policy_args": AT_INTERVALS}
LANES = {
    "policy": "duoattention",
    "budget": "100%",
    "policy_args": (("heads", KIND),),
    "num_layers": 6,
}
SOME_LANES = {**LANES, "policy_args": (("heads", SOME_KIND),)}
CHUNKED_LANES = {**LANES, "policy_args": (("heads", CHUNKED_KIND), ("chunk.tokens", 24))}
ADAPTIVE = {"policy": "adakv", "policy_args": (("window", 4), ("sinks", 1)), "num_layers": 6}
PRESSURE = {"policy_args": LEVELS, "admission": "forecast"}
ANSWERS = {"policy_args": (*LEVELS, ("schedule.answers", 7)), "admission": "forecast"}

WINDOWS = (Beside("sliding", 10), Beside("sliding", 10), Beside("sliding", 21, 8))
CHUNKS = (Beside("chunked", 12), Beside("state", block_size=96))
CAUSAL = (Beside("sliding", 10), Beside("chunked", 12), Beside("sliding", 10))
DRAFT = Beside("draft")


def of(
    name: str, *settings: dict[str, Any], args: Args | None = None, **own: Any
) -> tuple[str, Setup]:
    """Return a variant: the settings of its name's words, then the others; later ones win."""
    found: dict[str, Any] = {}
    for each in (*(WORDS.get(word, {}) for word in name.split("-")), *settings, own):
        found.update(each)
    if args is not None:
        found["policy_args"] = args
    return name, Setup(**found)


VARIANTS: dict[str, Setup] = dict(
    [
        of("sync"),
        of("sync-small-chunks", SMALL, PARTLY),
        of("sync-v2", MEDIUM),
        of("sync-not-filled", NOT_FILLED),
        of("async"),
        of("async-small-chunks", SMALL),
        of("async-v2", MEDIUM, PARTLY),
        of("sync-solved"),
        of("sync-solved-not-filled", SMALL, NOT_FILLED),
        of("async-solved", SMALL),
        of(
            "async-v2-solved",
            MEDIUM,
            PARTLY,
            budget="60%",
            args=(("window", 6), ("retention", 0.9)),
        ),
        of("async-sampled", policy="xkv", args=(("window", 6), ("sample_share", 0.4))),
        of("sync-swapped", SMALL, ON_HOST),
        of(
            "async-swapped-all-layers-solved",
            args=(("window", 6), ("values", "host"), ("device_layers", 0)),
        ),
        of(
            "async-swapped-not-filled",
            PARTLY,
            args=(("window", 6), ("values", "host"), ("fill_blocks", False)),
        ),
        of("sync-later", SMALL, H2O),
        of(
            "async-later",
            SMALL,
            policy="scissorhands",
            budget=12,
            args=(("interval", 8), ("queries", 5), ("window", 3)),
        ),
        of("async-v2-later", MEDIUM, PARTLY, STREAMING),
        of("async-streaming-llm", policy="streaming-llm", args=(("sinks", 2),)),
        of("sync-forecast", SMALL, PARTLY),
        of("async-v2-forecast-solved"),
        of("async-forecast-swapped", SMALL, ON_HOST),
        of("sync-shared", SMALL, PARTLY),
        of("sync-v2-shared", MEDIUM, policy="snapkv"),
        of("async-shared"),
        of("async-v2-shared", SMALL, PARTLY, NOT_FILLED),
        of("async-shared-priorities", PARTLY),
        of("async-shared-solved"),
        of("sync-shared-mixed", SMALL),
        of("async-shared-swapped", ON_HOST),
        of("async-shared-later", SMALL, STREAMING),
        of("async-shared-forecast", SMALL),
        of("async-forecast-later", H2O),
        # Evictions inside prompts, which are longer than the pool.
        of("sync-inside", OWN_INSIDE),
        of(
            "sync-inside-small-chunks",
            SMALL,
            PARTLY,
            args=(*OWN_SCORER, ("window", 3), ("chunk.window", 6)),
        ),
        of("async-inside", SMALL, KEYS_INSIDE),
        of(
            "async-v2-inside", MEDIUM, PARTLY, args=(*INSIDE, ("window", 6), ("fill_blocks", False))
        ),
        of("sync-inside-later", PARTLY, policy="h2o", args=(*INSIDE, ("interval", 3))),
        of("async-inside-later-priorities", policy="streaming-llm", args=(*INSIDE, *AT_INTERVALS)),
        of("async-forecast-inside", SMALL, WINDOWS_INSIDE),
        of("sync-shared-inside", SMALL, PARTLY, OWN_INSIDE, policy="snapkv"),
        of("sync-v2-shared-inside-whole", MEDIUM, KEYS_INSIDE),
        of("async-shared-inside", WINDOWS_INSIDE),
        # Hybrid models: windows, chunks and states beside the layers that evict.
        of("sync-beside", SMALL, PARTLY, beside=WINDOWS),
        of("async-beside", SMALL, beside=(*CHUNKS, *WINDOWS)),
        of("async-v2-beside-solved", MEDIUM, PARTLY, beside=CHUNKS),
        of("sync-beside-larger", SMALL, block_size=8, beside=WINDOWS),
        of("async-beside-swapped", SMALL, ON_HOST, beside=WINDOWS),
        of("async-forecast-beside", SMALL, beside=(*CHUNKS, *WINDOWS)),
        of("async-beside-inside", SMALL, KEYS_INSIDE, beside=WINDOWS),
        of("sync-beside-later", SMALL, H2O, beside=(*CHUNKS, *WINDOWS)),
        # Prefixes that are found in windows, too.
        of("sync-shared-beside", SMALL, PARTLY, beside=CAUSAL),
        of("async-shared-beside", beside=CAUSAL),
        of("async-shared-beside-priorities", SMALL, beside=CAUSAL),
        of("sync-shared-beside-larger-solved", MEDIUM, block_size=8, beside=WINDOWS),
        of("sync-shared-beside-mixed", SMALL, beside=CAUSAL, drafts=2),
        of("async-shared-beside-inside", WINDOWS_INSIDE, beside=CAUSAL),
        # Drafts of which some are rejected.
        of("sync-drafts", SMALL, PARTLY, drafts=3),
        of("async-drafts", drafts=3),
        of("async-v2-drafts-solved", MEDIUM, PARTLY, drafts=2),
        of("sync-shared-drafts", SMALL, priorities=True, drafts=3),
        of("async-shared-drafts", PARTLY, budget="100%", drafts=3),
        of("async-forecast-drafts-beside", SMALL, beside=(CHUNKS[0], *WINDOWS), drafts=3),
        of("async-drafts-inside", SMALL, KEYS_INSIDE, drafts=2),
        # Conversations whose turns go on with what the turn before has left.
        of("sync-turns", PARTLY),
        of("sync-turns-small-chunks", SMALL, policy="snapkv"),
        of(
            "sync-v2-turns", MEDIUM, policy="keydiff", budget=16, args=(("window", 4), ("sinks", 1))
        ),
        of("async-turns"),
        of("async-turns-drafts", SMALL, PARTLY, drafts=3),
        of("async-v2-turns-priorities", min_tokens=48),
        of("async-forecast-turns", SMALL),
        # Pipeline stages, with a pool each; two steps are under way, asynchronous or not.
        of("stages", PARTLY, stages=(2, 1)),
        of("stages-small-chunks", SMALL, stages=(1, 2)),
        of("stages-v2", MEDIUM, PARTLY, stages=(1, 1, 1)),
        of("stages-forecast", SMALL, stages=(1, 2)),
        of("stages-later", SMALL, H2O, stages=(2, 1)),
        of("stages-inside", SMALL, PARTLY, OWN_INSIDE, stages=(1, 2)),
        of("stages-forecast-inside", SMALL, WINDOWS_INSIDE, stages=(2, 1)),
        # A draft model's layers, alone and beside others.
        of("sync-shared-draft", SMALL, budget="100%", beside=(DRAFT, DRAFT), drafts=2),
        of("async-shared-draft", SMALL, beside=(DRAFT, *CAUSAL), drafts=2),
        of("sync-draft", SMALL, PARTLY, beside=(DRAFT,), drafts=2),
        # Requests that share their prefix to the end, in a pool in which they wait.
        of("sync-shared-forecast-mixed", MEDIUM, max_num_seqs=12),
        of("async-shared-forecast-beside", SMALL, beside=CAUSAL),
        # Rows of all stages' blocks.
        of("stages-shared", SMALL, PARTLY, stages=(2, 1)),
        of("stages-v2-shared", MEDIUM, policy="snapkv", stages=(1, 1, 1)),
        of("stages-shared-priorities", PARTLY, NOT_FILLED, stages=(1, 2)),
        of("stages-shared-mixed", SMALL, stages=(2, 1)),
        of("stages-async-shared-later", SMALL, STREAMING, stages=(2, 1)),
        of("stages-shared-forecast", SMALL, stages=(1, 2)),
        of("stages-shared-inside", SMALL, PARTLY, OWN_INSIDE, stages=(1, 2)),
        # Requests that share their prefix until they evict inside their prompts.
        of(
            "async-shared-forecast-inside",
            SMALL,
            args=(("chunk.tokens", 40), ("chunk.keep", 16), ("window", 6)),
        ),
        # KV heads with lengths and tables of their own.
        of("sync-heads", LANES, lanes=2),
        of("async-heads", SMALL, LANES, block_size=6, lanes=3),
        of("async-heads-priorities", PARTLY, LANES, lanes=2),
        of("sync-forecast-heads", SMALL, LANES, lanes=2),
        # The same, sharing prefixes: some heads never evict (their bundles last), or all may.
        of("sync-shared-heads", SMALL, SOME_LANES, lanes=2),
        of("async-shared-heads", SMALL, SOME_LANES, block_size=6, lanes=3),
        of("async-shared-heads-priorities", PARTLY, SOME_LANES, lanes=2),
        of("sync-shared-forecast-heads", SMALL, SOME_LANES, lanes=2),
        of("sync-heads-inside", PARTLY, CHUNKED_LANES, lanes=2),
        of("async-shared-heads-inside", SMALL, PARTLY, CHUNKED_LANES, block_size=6, lanes=3),
        of("sync-shared-heads-all", SMALL, LANES, lanes=2),
        of("stages-shared-heads", SMALL, SOME_LANES, stages=(4, 2), lanes=2),
        of("stages-shared-heads-all", PARTLY, LANES, stages=(2, 4), lanes=2),
        # Conversations beside windows, and beside a draft model.
        of("sync-turns-beside", PARTLY, beside=CAUSAL),
        of("sync-turns-beside-larger", SMALL, policy="snapkv", block_size=8, beside=WINDOWS),
        of("async-turns-beside", beside=CAUSAL),
        of("async-v2-turns-beside-priorities", SMALL, PARTLY, beside=CAUSAL[:1]),
        of("async-turns-beside-drafts", SMALL, beside=CAUSAL, drafts=3),
        of("sync-turns-draft", SMALL, beside=(DRAFT, DRAFT), drafts=2),
        of("async-turns-draft", PARTLY, beside=(DRAFT, *CAUSAL), drafts=2),
        # Two tiers: rows that leave the pool go on in host memory, of a few slots or of many.
        of("sync-shared-host", SMALL, PARTLY, host_slots=40),
        of("async-shared-host-tiny", host_slots=7),
        of("sync-v2-shared-host-mixed", MEDIUM, drafts=2, host_slots=60),
        of("async-shared-host-solved", priorities=True, host_slots=40),
        of("async-shared-host-forecast", SMALL, host_slots=60),
        of("stages-shared-host", SMALL, PARTLY, stages=(2, 1), host_slots=40),
        of("stages-async-shared-host-mixed", stages=(1, 2), host_slots=12),
        of("sync-turns-host", PARTLY, host_slots=150),
        of("async-turns-host", SMALL, host_slots=60),
        of("async-shared-host-folder", host_slots=40),
        of("sync-turns-host-folder", PARTLY, host_slots=60),
        # Lengths of KV heads that the worker solves, layer by layer.
        of("sync-heads-solved", ADAPTIVE, lanes=2),
        of("async-heads-solved", SMALL, ADAPTIVE, block_size=6, lanes=3),
        of("sync-forecast-heads-solved", SMALL, ADAPTIVE, lanes=2),
        # Evictions that the scheduler orders when the pool lacks blocks.
        of("sync-pressure", SMALL, PRESSURE),
        of("async-pressure", PRESSURE),
        of("async-v2-pressure-at-once", SMALL, PARTLY, PRESSURE, admission="prompt"),
        of("sync-shared-pressure", SMALL, PRESSURE, priorities=True),
        of("async-shared-pressure-drafts", PRESSURE, drafts=3),
        of("async-shared-pressure-host", SMALL, PRESSURE, host_slots=60),
        of("sync-shared-pressure-beside", MEDIUM, PRESSURE, beside=CAUSAL),
        of("stages-shared-pressure", PRESSURE, stages=(2, 1)),
        # Prompts that stay, and are shared, while answers are evicted from.
        of(
            "sync-shared-kept-later",
            SMALL,
            policy="h2o",
            budget=9,
            args=(("interval", 3), KEPT, ("allocator", "arithmetic")),
        ),
        of(
            "async-shared-kept-forecast-later",
            SMALL,
            policy="r-kv",
            budget=6,
            args=(("interval", 5), ("window", 2)),
        ),
        of(
            "sync-shared-kept-beside-later",
            SMALL,
            policy="h2o",
            budget=9,
            args=(("interval", 3), KEPT),
            beside=CAUSAL,
        ),
        of(
            "stages-async-shared-kept-later",
            SMALL,
            policy="scissorhands",
            budget=9,
            args=(("interval", 4), ("queries", 3), ("window", 1), KEPT),
            stages=(2, 1),
        ),
        # Orders that evict from answers, too.
        of("sync-pressure-answers", SMALL, ANSWERS),
        of("async-shared-pressure-answers", ANSWERS),
        of("async-v2-pressure-answers-at-once", SMALL, PARTLY, ANSWERS, admission="prompt"),
        of("async-shared-pressure-answers-beside", ANSWERS, priorities=True, beside=CAUSAL),
    ]
)

# Fields of `Setup` that change numbers, and not which code runs.
NUMBERS = (
    *("budget", "min_tokens", "further", "block_size", "num_layers", "max_model_len"),
    *("long_prefill_token_threshold", "max_num_seqs"),
)


def features(setup: Setup) -> set[str]:
    """Return the settings of a variant that choose other code than the defaults do."""
    found = {f"beside {layer.kind}" for layer in setup.beside} | {f"policy {setup.policy}"}
    for name, value in setup.policy_args:
        if name not in ("window", "sinks"):
            found.add(f"{name} {value}" if isinstance(value, str) else name)
    for field in fields(setup):
        value = getattr(setup, field.name)
        if field.name in (*NUMBERS, "beside", "policy", "policy_args") or value == field.default:
            continue
        counts = field.name in ("stages", "drafts", "host_slots", "lanes")
        found.add(field.name if counts else f"{field.name} {value}")
    return found
