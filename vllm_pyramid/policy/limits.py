# SPDX-License-Identifier: Apache-2.0
"""Every limit of what a request may ask for with its own settings; docs/usage.md shows `TABLE`."""

from __future__ import annotations

from vllm_pyramid.plan.budget import MAX_DECIMALS, MAX_TEXT, MAX_TOKENS

# Keys of `vllm_xargs` or `extra_args`, those of other software included.
MAX_KEYS = 128
# Characters of a key that begins with `kv`; a longer one is none of ours.
MAX_KEY = 64
# Characters of a name: a policy's or an application's.
MAX_NAME = 256
# Applications whose averages a scheduler keeps; the one that was used least recently goes first.
MAX_APPLICATIONS = 1024
# Keys that a query head reads V of.
MAX_TOP_N = MAX_TOKENS
# Turns in `kv_turns`.
MAX_TURNS = 512
# Characters of a session's name.
MAX_SESSION_NAME = 128
# Sessions that a front end remembers, the turns of each (branches included), and of all together.
MAX_SESSIONS = 4096
MAX_SESSION_TURNS = 1024
MAX_SESSIONS_TURNS = 1 << 18
# Spans in `kv_keep`, and spans of a chat's template that a server keeps (`--kv-keep`).
MAX_SPANS = 1024
# Turn ends of a prompt that may evict, whatever its length, and the tokens that buy one more.
FREE_EVICTIONS = 64
TOKENS_PER_EVICTION = 1024
# Bytes of each cache of plans or policies in a process.
CACHE_BYTES = 16 << 20

# The settings of a request and their limits, as the documents list them.
TABLE: tuple[tuple[str, str], ...] = (
    (
        "all of `vllm_xargs`",
        f"at most {MAX_KEYS} keys, other software's included; a key that begins with `kv`, however "
        "it is spelt, is one of these or refused",
    ),
    (
        "`kv_budget`",
        f"1 to {MAX_TOKENS:,} tokens, or above 0 to 100 % with at most {MAX_DECIMALS} decimals; as "
        f"text at most {MAX_TEXT} characters",
    ),
    ("`kv_min_tokens`", f"0 to {MAX_TOKENS:,} tokens"),
    ("`kv_policy`", f"at most {MAX_NAME} characters"),
    (
        "`kv_application`",
        f"at most {MAX_NAME} characters; a scheduler keeps {MAX_APPLICATIONS:,} averages in all, "
        "each for a salt and an application",
    ),
    ("`kv_top_n`", f"1 to {MAX_TOP_N:,} keys"),
    (
        "`kv_attend_budget`",
        "as `kv_budget`; at least the sinks and recent tokens of the policy's `attend`, and one",
    ),
    (
        "`kv_turns`",
        f"at most {MAX_TURNS} turns, each ending inside the prompt; {FREE_EVICTIONS} of them may "
        f"evict, and one more for each {TOKENS_PER_EVICTION} tokens",
    ),
    (
        "`kv_keep`",
        f"at most {MAX_SPANS:,} spans, in order, each inside the prompt; their tokens count beside "
        "the budget",
    ),
    ("`kv_turn_mode`", "`auto`, `resume` or `exact`, only with `kv_turns` or `kv_session`"),
    (
        "`kv_session`",
        f"1 to {MAX_SESSION_NAME} letters, digits and `._:@/+=~-`, a letter or digit first; at "
        f"most {MAX_TURNS} turns in a row, behind which it begins anew, and "
        f"{MAX_SESSION_TURNS:,} with branches; a server remembers {MAX_SESSIONS:,} sessions with "
        f"{MAX_SESSIONS_TURNS:,} turns in all",
    ),
)
