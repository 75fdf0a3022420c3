# SPDX-License-Identifier: Apache-2.0
"""Every limit of what a request may ask for with its own settings, as docs/usage.md lists them."""

from __future__ import annotations

from vllm_pyramid.plan.budget import MAX_TOKENS

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
