# SPDX-License-Identifier: Apache-2.0
"""Requests of an attacker, well-formed and not, each drawn from a seed and a number of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Body = dict[str, Any]

MAX_MODEL_LEN = 2048
VOCAB_SIZE = 2048
LARGEST = 64 << 10  # bytes of a body
JSON = "application/json"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Stands in a body for as many nines: Python writes no integer of more than 4,300 digits.
DIGITS = "<digits>"
NUM_DIGITS = 5000


@dataclass(frozen=True)
class Attack:
    """One request, and what is known about its answer.

    Attributes:
        expected: `refused` with a status from 400 to 499, `served` with 200, or `either`; never one
            of 500 and more.
        disconnect_after: pieces of the stream after which the client closes its connection.
    """

    kind: str
    path: str
    body: bytes
    expected: Literal["refused", "served", "either"] = "either"
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": JSON})
    disconnect_after: int | None = None

    def accepts(self, status: int) -> bool:
        """Whether a status is one that the request may be answered with."""
        refused, served = 400 <= status < 500, 200 <= status < 300
        return {"refused": refused, "served": served, "either": refused or served}[self.expected]


# Values that a field of another type, size or range would have.
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 16, 513, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64),
    *(-(2**63), 10**400, 10**4000, DIGITS, 0.5, -0.0, 1e308, 1e-308, float("nan"), float("inf")),
    *(float("-inf"), "", " ", "0", "-1", "1", "full", "pyramidkv", "none", "snapkv", "\x00"),
    *("\ud800", "\u202e%05", "\U0001f600" * 50, "é" * 300, "a" * 257, "b" * 30_000, "nan", "1e3"),
    *("../../etc/passwd", "'; drop table", "{{7*7}}", "%n%s%x", "null", "true", [], [[]], {}),
    *([0], [1], [-1], [1, 1], [2, 1], [1.5], ["1"], [None], [True], [2**63], ["a" * 9000]),
    *(list(range(1, 512)), list(range(1, 514)), list(range(1, 9000)), {"a": {"b": []}}),
)
WRONG_BUDGETS: tuple[Any, ...] = (
    *(0, -1, -(2**63), "-5%", "0%", "120%", "1e9%", "nan%", "inf%", "-nan%", "%", "%%", "", "x"),
    *("12." + "3" * 4200 + "%", "0." + "0" * 9000 + "1%", "9" * 4200, "1" * 30_000 + "%", 1.5),
    *(float("nan"), float("inf"), [64], ["25%"], "25 percent", "0x40", "64;64"),
)
WRONG_POLICIES = ("snapkv", "h2o", "nonsense", "", "Full", "full ", "pyramidkv\x00", 1, ["full"])
WRONG_TURNS: tuple[Any, ...] = (
    *([0], [-1], [2, 1], [5, 5], [1.5], ["8"], [1, "8"], 8, "8", 1.5, [2**63]),
    *(list(range(1, 600)), list(range(1, 9000)), [10**9]),
)
WRONG_FLOORS: tuple[Any, ...] = (-1, -(2**63), 1.5, "x", [64], float("nan"), 2**64, 10**400)
WRONG_SPANS: tuple[Any, ...] = (
    *([0], [3, 3], [4, 2], [0, 4, 3, 6], [-1, 4], [0, 2**31], [0, 1.5], ["0", "4"], 8, "0-4"),
    *(list(range(9000)), [10**8, 10**8 + 1], [0, 10**400]),
)
UNKNOWN_KEYS = (
    *("kv-budget", "kvBudget", "KV_BUDGET", "Kv_Budget", "kv_budgt", "kvbudget", "kv.budget"),
    *("kv_7x", "kv_", "kv", "kv_polcy", "KV-POLICY", "kvPolicy", "kv_turn", "kv_" + "x" * 30_000),
    *("kv__budget", "kv_budget ", "kv budget", "kvTurns", "kv_policy\x00", "kv_\u0431udget"),
)
OUR_KEYS = (
    *("kv_policy", "kv_budget", "kv_min_tokens", "kv_application", "kv_top_n", "kv_turns"),
    *("kv_keep", "kv_attend_budget", "kv_turn_mode", "kv_session"),
)
# Fields of both endpoints. A value of `HOSTILE` makes none of them a request for hours of work.
FIELDS = (
    *("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs"),
    *("prompt_logprobs", "frequency_penalty", "presence_penalty", "repetition_penalty", "user"),
    *("logit_bias", "stop_token_ids", "min_tokens", "skip_special_tokens", "ignore_eos", "echo"),
    *("truncate_prompt_tokens", "allowed_token_ids", "bad_words", "response_format", "priority"),
    *("structured_outputs", "cache_salt", "request_id", "vllm_xargs", "kv_transfer_params"),
    *("stream_options", "suffix", "add_special_tokens", "return_token_ids", "logits_processors"),
    *("prompt_embeds", "session_id", "truncation_side", "length_penalty", "messages", "prompt"),
    *("top_logprobs", "tools", "tool_choice", "chat_template", "documents", "best_of", "stream"),
    *("return_tokens_as_token_ids", "include_stop_str_in_output", "repetition_detection"),
)


def draw(seed: int, number: int, model: str) -> Attack:
    """The request of that number: the same on every call."""
    source = random.Random(f"{seed}/{number}")
    kind = source.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
    return KINDS[kind][1](source, kind, model)


def encode(body: Any) -> bytes:
    """JSON as a careless client sends it: NaN, halves of surrogates, integers of any length."""
    text = json.dumps(body).encode()
    return text.replace(json.dumps(DIGITS).encode(), b"9" * NUM_DIGITS)


def _prompt(source: random.Random, most: int = 300) -> list[int]:
    """Token ids; one prompt in two begins as many others do."""
    length = source.choice([1, 8, 9, 64, source.randint(1, most)])
    trunk = [100 + index % 900 for index in range(length)]
    leaves = source.choice([0, 0, length // 2, length])
    return trunk[:leaves] + [source.randrange(8, VOCAB_SIZE) for _ in range(length - leaves)]


def _body(source: random.Random, model: str) -> tuple[str, Body]:
    """A request that is served: the endpoint and its body."""
    common: Body = {"model": model, "max_tokens": source.choice([1, 1, 2, 4, 8, 16])}
    for name, values in (
        ("temperature", [0, 0.7, 2]),
        ("top_k", [1, 40]),
        ("seed", [1, 2**62]),
        ("ignore_eos", [True]),
        ("n", [2, 3]),
        ("stop", ["e", ["a", "the"]]),
        ("cache_salt", ["a", "b"]),
    ):
        if source.random() < 0.2:
            common[name] = source.choice(values)
    if common.get("temperature") == 0:
        common.pop("n", None)
    if source.random() < 0.25:
        text = source.choice(
            ["Hello", "The quick brown fox. " * source.randint(1, 30), "\u4f60\x00"]
        )
        return CHAT, {**common, "messages": [{"role": "user", "content": text}]}
    return COMPLETIONS, {**common, "prompt": _prompt(source)}


def _served(source: random.Random, kind: str, model: str) -> Attack:
    path, body = _body(source, model)
    choices: list[Body] = [
        {},
        {"kv_budget": source.randint(9, 400)},
        {"kv_budget": f"{source.randint(1, 100)}%"},
        {"kv_budget": f"{source.uniform(1, 100):.2f}%", "kv_min_tokens": source.randint(0, 256)},
        {"kv_policy": "full"},
        {"kv_policy": "pyramidkv"},
        {"kv_turns": []},
        {"kv_turns": [], "kv_turn_mode": "exact"},
        {"kv_session": f"session-{source.randint(0, 9)}"},
        {"kv_session": "one", "kv_turn_mode": "exact"},
    ]
    if path == COMPLETIONS:
        ends = range(1, len(body["prompt"]))
        turns = sorted(source.sample(ends, min(source.randint(0, 6), len(ends))))
        choices.append({"kv_turns": turns})
        if source.random() < 0.1:
            body["logprobs"] = source.randint(0, 5)
    body["vllm_xargs"] = source.choice(choices)
    return Attack(kind, path, encode(body), "served")


def _mixed_settings(source: random.Random, kind: str, model: str) -> Attack:
    """Several settings in one request, each valid alone; prompts are long enough to evict."""
    path, body = _body(source, model)
    length = source.randint(40, 900)
    if path == COMPLETIONS:
        body["prompt"] = [source.randrange(8, VOCAB_SIZE) for _ in range(length)]
    start = source.randrange(length)
    ends = sorted(source.sample(range(1, length), source.randint(1, 3)))
    settings: Body = {
        "kv_budget": source.choice([source.randint(40, 400), f"{source.randint(10, 100)}%"]),
        "kv_min_tokens": source.randint(0, 256),
        "kv_keep": source.choice([[0, 8], [start, start + source.randint(1, 8)], [0, 4, 20, 27]]),
        "kv_turns": ends,
        "kv_turn_mode": "exact",
        "kv_session": f"session-{source.randint(0, 9)}",
        "kv_policy": source.choice(["full", "pyramidkv"]),
        "kv_application": source.choice(["a", "b"]),
    }
    names = source.sample(list(settings), source.randint(1, 3))
    body["vllm_xargs"] = {name: settings[name] for name in names}
    return Attack(kind, path, encode(body))


def _disconnect(source: random.Random, kind: str, model: str) -> Attack:
    path, body = _body(source, model)
    body |= {"stream": True, "max_tokens": source.choice([32, 200, 1500]), "ignore_eos": True}
    after = source.choice([0, 0, 1, 2, source.randint(0, 30)])
    return Attack(kind, path, encode(body), disconnect_after=after)


def _wrong_settings(source: random.Random, kind: str, model: str) -> Attack:
    """Settings that must be refused: each is outside what docs/usage.md says."""
    path, body = _body(source, model)
    if source.random() < 0.5:
        body["vllm_xargs"] = {source.choice(UNKNOWN_KEYS): source.choice([1, "25%", "full"])}
    else:
        key, values = source.choice(
            [
                ("kv_budget", WRONG_BUDGETS),
                ("kv_policy", WRONG_POLICIES),
                ("kv_turns", WRONG_TURNS),
                ("kv_turn_mode", ("", "Exact", "exact ", 1, ["exact"], "exact")),
                ("kv_session", ("", "-a", "a b", "é", "a" * 129, 1, ["a"], {"a": 1}, "a\n", True)),
                ("kv_min_tokens", WRONG_FLOORS),
                ("kv_keep", WRONG_SPANS),
                ("kv_application", (1, "a" * 257, ["a"], "a")),
                ("kv_top_n", (0, -1, 1.5, "1", 2**31, [1], 64)),
                ("kv_attend_budget", (*WRONG_BUDGETS, 64)),
            ]
        )
        body["vllm_xargs"] = {key: source.choice(values)}
    return Attack(kind, path, encode(body), "refused")


def _any_settings(source: random.Random, kind: str, model: str) -> Attack:
    path, body = _body(source, model)
    names = (*OUR_KEYS, "other", "\U0001f600")
    count = source.choice([1, 1, 2, len(names)])
    body["vllm_xargs"] = {name: source.choice(HOSTILE) for name in source.sample(names, count)}
    return Attack(kind, path, encode(body))


def _large(source: random.Random, kind: str, model: str) -> Attack:
    """As much as fits into 64 KiB: keys, digits, turns, nesting."""
    path, body = _body(source, model)
    prefix = source.choice(["kv_", "kv", "x", "\u00e9"])
    xargs: Any = source.choice(
        [
            {f"{prefix}{index}": 1 for index in range(3500)},
            {prefix + "y" * 50_000: 1},
            {"kv_budget": "12." + "3" * 50_000 + "%"},
            {"kv_budget": DIGITS},
            {"kv_turns": list(range(1, 9000)), "kv_budget": 64},
            {"kv_turns": list(range(1, 510)), "kv_budget": "1%"},
            {"kv_application": "\U0001f600" * 4000},
            {"kv_policy": "f" * 50_000},
            {"other": ["z"] * 9000},
            {f"kv_budge{index}": "1%" for index in range(2500)},
        ]
    )
    body["vllm_xargs"] = xargs
    data = encode(body)
    assert len(data) <= 2 * LARGEST
    return Attack(kind, path, data)


def _mutated(source: random.Random, kind: str, model: str) -> Attack:
    """One to three fields with values of other types, sizes and ranges."""
    path, body = _body(source, model)
    for name in source.sample(FIELDS, source.randint(1, 3)):
        if source.random() < 0.1:
            body.pop(name, None)
        else:
            body[name] = source.choice(HOSTILE)
    if source.random() < 0.05:
        body["n"] = source.choice([0, -1, "2", 2.5, 10**6, 2**63, None])
    if source.random() < 0.05:
        # Each token of each beam is a request of its own: a thousand of them take minutes.
        body |= {"use_beam_search": True, "n": source.choice([1, 2, 4]), "temperature": 0}
        body["max_tokens"] = source.choice([1, 4, 0, -1, "3"])
    return Attack(kind, path, encode(body))


def _prompts(source: random.Random, kind: str, model: str) -> Attack:
    """Prompts that are empty, too long, out of the vocabulary or no prompts."""
    refused: list[Any] = [[], [VOCAB_SIZE + 9], [2**31], [2**63], [-1], [8] * MAX_MODEL_LEN, [[]]]
    refused += [None, {}, [[8, 2**40]], [8] * 12_000, "word " * 12_000, [[8] * 3000, [8]]]
    other: list[Any] = ["", "\x00", "\ud800", " " * 9000, [True], [8.0], ["a", [8]], [[8], [9]]]
    other += ["<|begin|><|end|>", [0], [1, 1, 1], ["a"] * 40, [8] * (MAX_MODEL_LEN - 1)]
    other.append("\n" * 60_000)
    is_refused = source.random() < 0.6
    prompt = source.choice(refused if is_refused else other)
    body = {"model": model, "prompt": prompt, "max_tokens": source.choice([0, 1, 4])}
    if not is_refused and source.random() < 0.3:
        body["prompt_logprobs" if source.random() < 0.5 else "echo"] = 1
    if isinstance(prompt, list) and len(prompt) == MAX_MODEL_LEN and not body["max_tokens"]:
        is_refused = False
    return Attack(kind, COMPLETIONS, encode(body), "refused" if is_refused else "either")


def _malformed(source: random.Random, kind: str, model: str) -> Attack:
    path, body = _body(source, model)
    whole = encode(body)
    cut = source.randrange(len(whole))
    junk = bytes(source.randrange(256) for _ in range(source.choice([0, 1, 50, 3000])))
    data = source.choice(
        [
            whole[:cut],
            junk,
            b"\xff\xfe" + whole,
            whole[:cut] + junk + whole[cut:],
            b"[" * 60_000,
            b'{"a":' * 10_000,
            b'{"prompt":' + b"[" * 9000 + b"]" * 9000 + b"}",
            b"null",
            b"[]",
            b'"text"',
            b"{}",
            whole.replace(b'"max_tokens"', b'"max_tokens": 1, "max_tokens"'),
        ]
    )
    return Attack(kind, path, data)


def _headers(source: random.Random, kind: str, model: str) -> Attack:
    path, body = _body(source, model)
    kinds = ("text/plain", "application/xml", "", "multipart/form-data; boundary=x")
    headers = source.choice(
        [
            *({"Content-Type": kind} for kind in (*kinds, f"{JSON}; charset=utf-16")),
            *({"Content-Type": JSON, "X-data-parallel-rank": rank} for rank in ("-1", "nan")),
            *({"Content-Type": JSON, "X-Request-Id": name} for name in ("r" * 7000, "always one")),
            {"Content-Type": JSON, "Content-Encoding": "gzip"},
        ]
    )
    return Attack(kind, path, encode(body), headers=headers)


def _other_endpoints(source: random.Random, kind: str, model: str) -> Attack:
    path, key = source.choice(
        [("/tokenize", "prompt"), ("/detokenize", "tokens"), ("/v1/nothing", "prompt")]
    )
    body: Body = {"model": model, key: source.choice(HOSTILE)}
    if source.random() < 0.3:
        body = {"model": model, "messages": source.choice(HOSTILE)}
    return Attack(kind, path, encode(body))


HONEST = "honest"
# The share of each kind, and what draws it; the client knows the honest ones.
KINDS: dict[str, tuple[float, Callable[[random.Random, str, str], Attack]]] = {
    HONEST: (4, lambda source, kind, model: Attack(kind, COMPLETIONS, b"", "served")),
    "served": (12, _served),
    "mixed settings": (12, _mixed_settings),
    "disconnect": (3, _disconnect),
    "wrong settings": (25, _wrong_settings),
    "any settings": (12, _any_settings),
    "large": (6, _large),
    "mutated": (20, _mutated),
    "prompts": (5, _prompts),
    "malformed": (8, _malformed),
    "headers": (2, _headers),
    "other endpoints": (3, _other_endpoints),
}
