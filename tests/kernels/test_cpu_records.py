# SPDX-License-Identifier: Apache-2.0
"""The records of the C++ kernels: names, sizes, and the field that each value fills."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_pyramid.kernels.cpu import checks as cpu_checks
from vllm_pyramid.kernels.cpu import library as cpu_library
from vllm_pyramid.kernels.cpu import structs as cpu_records

HEADER = Path(__file__).parents[2] / "csrc" / "cpu" / "abi.h"


def test_the_largest_head_size_is_the_librarys() -> None:
    """Compare the constant with the one that sizes arrays in C++."""
    text = HEADER.with_name("kernels.h").read_text()
    assert re.findall(r"kMaxHeadSize = (\d+);", text) == [str(cpu_checks.MAX_HEAD_SIZE)]


def swapped(fields: list[str], first: int) -> list[str]:
    return [*fields[:first], fields[first + 1], fields[first], *fields[first + 2 :]]


SELECT, KEY_MASS = cpu_records.SELECT.fields, cpu_records.KEY_MASS.fields


def test_a_definition_in_cpp_is_read() -> None:
    text = "void* out; const int32_t* table; int64_t R, M ; double scale; PyrAttention attention;"
    assert cpu_records.parse_fields(text) == [
        *("pointer out", "pointer table", "int64_t R", "int64_t M"),
        *("double scale", "PyrAttention attention"),
    ]
    assert KEY_MASS[:2] == ["PyrAttention attention", "pointer mass"]
    assert cpu_records.KEY_MASS.size == cpu_records.ATTENTION.size + 5 * 8


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("PyrSelect", swapped(SELECT, 10), "10 .*`int64_t window`, .* packs `int64_t sinks`"),
        ("PyrSelect", swapped(SELECT, 2), "2 .*`pointer prompt_lens`, .* packs `pointer keeps`"),
        ("PyrKeyMass", swapped(KEY_MASS, 0), "0 .*`PyrAttention .*`, .* packs `pointer mass`"),
        (
            *("PyrSelect", [*SELECT[:4], "double R", *SELECT[5:]]),
            "4 .*`int64_t R`, .* packs `double R`",
        ),
        ("PyrSelect", [*SELECT, "int64_t more"], "13 .*`nothing`, .* packs `int64_t more`"),
        ("PyrSelect", SELECT[:-1], "12 .*`int64_t threads`"),
        ("PyrUnknown", SELECT, ""),
    ],
)
def test_another_record_is_an_error(monkeypatch, name, fields, message) -> None:
    """Refuse two fields of one size in another order, too, which no size tells apart."""
    others = [kept for kept in cpu_records.RECORDS if kept.name != name]
    changed = SimpleNamespace(name=name, fields=fields, size=0)
    monkeypatch.setattr(cpu_library, "RECORDS", (*others, changed))
    said = f"field {message}" if message else f"has no record {name}"
    with pytest.raises(cpu_library.LibraryError, match=f"{said}.*; rebuild it"):
        cpu_library.load.__wrapped__()


def test_another_size_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    size = cpu_records.ATTENTION.size
    monkeypatch.setattr(cpu_records.ATTENTION, "size", 8)  # as if it were packed otherwise
    with pytest.raises(cpu_library.LibraryError, match=f"PyrAttention in {size} bytes.*into 8;"):
        cpu_library.load.__wrapped__()
