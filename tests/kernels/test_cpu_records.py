# SPDX-License-Identifier: Apache-2.0
"""The records of the C++ kernels: names, sizes, and the field that each value fills."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_pyramid.kernels.cpu import checks as cpu_checks
from vllm_pyramid.kernels.cpu import library as cpu_library
from vllm_pyramid.kernels.cpu import structs as cpu_records

pytestmark = pytest.mark.cpu

HEADER = Path(__file__).parents[2] / "csrc" / "cpu" / "abi.h"


def test_the_largest_head_size_is_the_librarys() -> None:
    """Compare the constant with the one that sizes arrays in C++."""
    text = HEADER.with_name("kernels.h").read_text()
    assert re.findall(r"kMaxHeadSize = (\d+);", text) == [str(cpu_checks.MAX_HEAD_SIZE)]


def record(name: str, fields: list[tuple[str, type]]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def swapped(fields: list[Any], first: int, second: int) -> list[Any]:
    fields = list(fields)
    fields[first], fields[second] = fields[second], fields[first]
    return fields


SELECT = list(cpu_records.PyrSelect._fields_)
KEY_MASS = list(cpu_records.PyrKeyMass._fields_)


def test_a_definition_in_cpp_is_read() -> None:
    text = "void* out; const int32_t* table; int64_t R, M ; double scale; PyrAttention attention;"
    assert cpu_records.parse_fields(text) == [
        *("pointer out", "pointer table", "int64_t R", "int64_t M"),
        *("double scale", "PyrAttention attention"),
    ]
    assert cpu_records.fields_of(cpu_records.PyrKeyMass)[:2] == [
        "PyrAttention attention",
        "pointer mass",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            record("PyrSelect", swapped(SELECT, 10, 11)),
            "field 10 of PyrSelect to be `int64_t window`, and this package packs `int64_t sinks`",
        ),
        (
            record("PyrSelect", swapped(SELECT, 2, 3)),
            "field 2 of PyrSelect to be `pointer prompt_lens`, .* packs `pointer keeps`",
        ),
        (
            record("PyrKeyMass", swapped(KEY_MASS, 0, 1)),
            "field 0 of PyrKeyMass to be `PyrAttention attention`, .* packs `pointer mass`",
        ),
        (
            record("PyrSelect", [*SELECT[:4], ("R", ctypes.c_double), *SELECT[5:]]),
            "field 4 of PyrSelect to be `int64_t R`, and this package packs `double R`",
        ),
        (
            record("PyrSelect", [*SELECT, ("more", ctypes.c_int64)]),
            "field 13 of PyrSelect to be `nothing`, and this package packs `int64_t more`",
        ),
        (record("PyrSelect", SELECT[:-1]), "field 12 of PyrSelect to be `int64_t threads`"),
        (record("PyrUnknown", SELECT), "has no record PyrUnknown"),
    ],
)
def test_another_record_is_an_error(
    monkeypatch: pytest.MonkeyPatch, changed: type[ctypes.Structure], message: str
) -> None:
    """Refuse two fields of one size in another order, too, which no size tells apart."""
    others = [kept for kept in cpu_records.RECORDS if kept.__name__ != changed.__name__]
    monkeypatch.setattr(cpu_library, "RECORDS", (*others, changed))
    with pytest.raises(cpu_library.LibraryError, match=f"{message}.*; rebuild it"):
        cpu_library.load.__wrapped__()


def test_another_size_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    size = ctypes.sizeof(cpu_records.PyrAttention)
    monkeypatch.setattr(ctypes, "sizeof", lambda record: 8)  # as if it were packed otherwise
    with pytest.raises(cpu_library.LibraryError, match=f"PyrAttention in {size} bytes.*into 8;"):
        cpu_library.load.__wrapped__()
