# SPDX-License-Identifier: Apache-2.0
"""Records that the C++ kernels take: the classes mirror the structs of `csrc/cpu/abi.h`.

`abi.h` documents what a field holds. Every field has 8 bytes, so there is no padding.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

Fields = list[tuple[str, type]]

_CODES = {ctypes.c_void_p: "Q", ctypes.c_int64: "q", ctypes.c_double: "d"}
_KINDS = {ctypes.c_void_p: "pointer", ctypes.c_int64: "int64_t", ctypes.c_double: "double"}


def _pointers(names: str) -> Fields:
    return [(name, ctypes.c_void_p) for name in names.split()]


def _integers(names: str) -> Fields:
    return [(name, ctypes.c_int64) for name in names.split()]


def _doubles(names: str) -> Fields:
    return [(name, ctypes.c_double) for name in names.split()]


class Record(ctypes.Structure):
    """A struct of the header."""


class PyrAttention(Record):
    _fields_ = [
        *_pointers("out query key value table query_start seq_lens skips sinks log_sum_exp"),
        *_integers("out_dtype query_dtype cache_dtype sinks_dtype"),
        *_integers("T H G D N P R M"),
        *_integers("out_t out_h query_t query_h"),
        *_integers("key_p key_g key_n value_p value_g value_n table_r table_g"),
        *_integers("sliding_window threads"),
        *_doubles("scale soft_cap value_scale"),
    ]


class PyrKeyMass(Record):
    _fields_ = [
        ("attention", PyrAttention),
        *_pointers("mass first_queries"),
        *_integers("mass_p mass_g kind"),
    ]


class PyrTopn(Record):
    _fields_ = [
        ("attention", PyrAttention),
        *_pointers("top_n value_rows"),
        *_integers("renormalize"),
    ]


class PyrShared(Record):
    _fields_ = [("attention", PyrAttention), *_integers("fewest_keys")]


class PyrScores(Record):
    _fields_ = [
        *_pointers("out log_sum_exp query key table query_ends prompt_lens sinks"),
        *_integers("query_dtype cache_dtype sinks_dtype"),
        *_integers("T H G D N P R M out_len"),
        *_integers("query_t query_h key_p key_g key_n table_r"),
        *_integers("window reduce pooling kernel_size threads"),
        *_doubles("scale soft_cap"),
    ]


class PyrObservedExpected(Record):
    _fields_ = [
        ("scores", PyrScores),
        *_pointers("value future starts"),
        *_integers("value_p value_g value_n first last"),
        *_doubles("expected"),
    ]


class PyrFutureQueries(Record):
    _fields_ = [
        *_pointers("out query cos_sin query_ends last_positions"),
        *_integers("query_dtype cos_sin_dtype"),
        *_integers("T H D R window positions rows rotated halves"),
        *_integers("query_t query_h cos_sin_t threads"),
    ]


class PyrRecentMass(Record):
    _fields_ = [
        *_pointers("out log_sum_exp query key table query_ends seq_lens skips recents contexts"),
        *_pointers("sinks"),
        *_integers("query_dtype cache_dtype sinks_dtype"),
        *_integers("T H G D N P R M out_len"),
        *_integers("query_t query_h key_p key_g key_n table_r threads"),
        *_doubles("scale soft_cap distance_weight"),
    ]


class PyrSelect(Record):
    _fields_ = [
        *_pointers("out scores prompt_lens keeps"),
        *_integers("R G out_len scores_len scores_r scores_g window sinks threads"),
    ]


class PyrCompact(Record):
    _fields_ = [
        *_pointers("key value table kept prompt_lens keeps"),
        *_integers("item_size G D N P R M kept_len"),
        *_integers("key_p key_g key_n value_p value_g value_n table_r kept_r kept_g threads"),
    ]


class PyrCacheWrite(Record):
    _fields_ = [
        *_pointers("key value key_cache value_cache slots"),
        *_integers("source_dtype cache_dtype"),
        *_integers("item_size T G D N P"),
        *_integers("key_t key_h value_t value_h"),
        *_integers("key_p key_g key_n value_p value_g value_n threads"),
        *_doubles("key_scale value_scale"),
    ]


class PyrSummaries(Record):
    _fields_ = [
        *_pointers("summaries key table starts seq_lens skips"),
        *_integers("kind cache_dtype summary_dtype"),
        *_integers("G D N P R M"),
        *_integers("key_p key_g key_n summary_p summary_g table_r threads"),
    ]


class PyrPageScores(Record):
    _fields_ = [
        *_pointers("out query pool table requests positions skips sinks"),
        *_integers("kind combine query_dtype pool_dtype sinks_dtype"),
        *_integers("S H G D N P R M n out_len"),
        *_integers("query_t query_h pool_p pool_g pool_n table_r threads"),
        *_doubles("scale soft_cap"),
    ]


class PyrPageSelect(Record):
    _fields_ = [
        *_pointers("blocks pages counts seq_lens hidden"),
        *_pointers("scores table requests positions skips budgets"),
        *_integers("S G N P R M out_len scores_len scores_s scores_g table_r"),
        *_integers("sinks recent threads"),
    ]


RECORDS: tuple[type[ctypes.Structure], ...] = tuple(Record.__subclasses__())


def fields_of(record: type[ctypes.Structure]) -> list[str]:
    """List kind and name of a record's fields, such as "pointer out" and "int64_t T"."""
    return [
        f"{_KINDS.get(kind, kind.__name__)} {name}"
        for name, kind in ((field[0], field[1]) for field in record._fields_)
    ]


def parse_fields(text: str) -> list[str]:
    """List, as `fields_of` does, fields of C++ such as "const int32_t* table; int64_t R, M;"."""
    found = []
    for declaration in filter(None, (part.strip() for part in text.split(";"))):
        kind, _, names = declaration.removeprefix("const ").partition(" ")
        kind = "pointer" if kind.endswith("*") else kind
        found += [f"{kind} {name.strip()}" for name in names.split(",")]
    return found


def packer(record: type[ctypes.Structure]) -> Callable[..., bytes]:
    """Return a function that packs a record's values, in the order of its fields, into bytes.

    A record that is a field of another is passed as its bytes.
    """
    layout = struct.Struct("=" + "".join(_code(field[1]) for field in record._fields_))
    assert layout.size == ctypes.sizeof(record), (record, layout.size, ctypes.sizeof(record))
    return layout.pack


def _code(kind: Any) -> str:
    return f"{ctypes.sizeof(kind)}s" if issubclass(kind, ctypes.Structure) else _CODES[kind]
