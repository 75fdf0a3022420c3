# SPDX-License-Identifier: Apache-2.0
"""Records that the C++ kernels take: the structs of `csrc/cpu/abi.h`, which documents the fields.

Every field has 8 bytes, so there is no padding.
"""

from __future__ import annotations

import struct

RECORDS: list[Record] = []


class Record:
    """A struct of the header: maybe another record, then pointers, integers and doubles, by name.

    `pack` packs the values in the order of the fields; a record that is a field is passed as its
    bytes. `fields` has kind and name of each field, such as "pointer out" and "int64_t T".
    """

    size: int  # in bytes

    def __init__(
        self,
        name: str,
        pointers: str,
        integers: str,
        doubles: str = "",
        inner: Record | None = None,
    ) -> None:
        self.name, codes = name, "="
        self.fields: list[str] = []
        if inner is not None:
            self.fields.append(f"{inner.name} {inner.name.removeprefix('Pyr').lower()}")
            codes += f"{inner.size}s"
        for kind, code, names in (
            ("pointer", "Q", pointers),
            ("int64_t", "q", integers),
            ("double", "d", doubles),
        ):
            self.fields += [f"{kind} {field}" for field in names.split()]
            codes += code * len(names.split())
        layout = struct.Struct(codes)
        self.pack, self.size = layout.pack, layout.size
        RECORDS.append(self)


ATTENTION = Record(
    "PyrAttention",
    "out query key value table query_start seq_lens skips sinks log_sum_exp",
    "out_dtype query_dtype cache_dtype sinks_dtype T H G D N P R M out_t out_h query_t query_h "
    "key_p key_g key_n value_p value_g value_n table_r table_g sliding_window threads",
    "scale soft_cap value_scale",
)
KEY_MASS = Record("PyrKeyMass", "mass first_queries", "mass_p mass_g kind", inner=ATTENTION)
TOPN = Record("PyrTopn", "top_n value_rows", "renormalize", inner=ATTENTION)
SHARED = Record("PyrShared", "", "fewest_keys", inner=ATTENTION)
SCORES = Record(
    "PyrScores",
    "out log_sum_exp query key table query_ends prompt_lens sinks",
    "query_dtype cache_dtype sinks_dtype T H G D N P R M out_len query_t query_h "
    "key_p key_g key_n table_r window reduce pooling kernel_size threads",
    "scale soft_cap",
)
OBSERVED_EXPECTED = Record(
    "PyrObservedExpected",
    "value future starts",
    "value_p value_g value_n first last",
    "expected",
    inner=SCORES,
)
FUTURE_QUERIES = Record(
    "PyrFutureQueries",
    "out query cos_sin query_ends last_positions",
    "query_dtype cos_sin_dtype T H D R window positions rows rotated halves "
    "query_t query_h cos_sin_t threads",
)
RECENT_MASS = Record(
    "PyrRecentMass",
    "out log_sum_exp query key table query_ends seq_lens skips recents contexts sinks",
    "query_dtype cache_dtype sinks_dtype T H G D N P R M out_len "
    "query_t query_h key_p key_g key_n table_r threads",
    "scale soft_cap distance_weight",
)
SELECT = Record(
    "PyrSelect",
    "out scores prompt_lens keeps",
    "R G out_len scores_len scores_r scores_g window sinks threads",
)
COMPACT = Record(
    "PyrCompact",
    "key value table kept prompt_lens keeps",
    "item_size G D N P R M kept_len "
    "key_p key_g key_n value_p value_g value_n table_r kept_r kept_g threads",
)
CACHE_WRITE = Record(
    "PyrCacheWrite",
    "key value key_cache value_cache slots",
    "source_dtype cache_dtype item_size T G D N P key_t key_h value_t value_h "
    "key_p key_g key_n value_p value_g value_n threads",
    "key_scale value_scale",
)
SUMMARIES = Record(
    "PyrSummaries",
    "summaries key table starts seq_lens skips",
    "kind cache_dtype summary_dtype G D N P R M "
    "key_p key_g key_n summary_p summary_g table_r threads",
)
PAGE_SCORES = Record(
    "PyrPageScores",
    "out query pool table requests positions skips sinks",
    "kind combine query_dtype pool_dtype sinks_dtype S H G D N P R M n out_len "
    "query_t query_h pool_p pool_g pool_n table_r threads",
    "scale soft_cap",
)
PAGE_SELECT = Record(
    "PyrPageSelect",
    "blocks pages counts seq_lens hidden scores table requests positions skips budgets",
    "S G N P R M out_len scores_len scores_s scores_g table_r sinks recent threads",
)


def parse_fields(text: str) -> list[str]:
    """List, as `Record.fields`, fields of C++ such as "const int32_t* table; int64_t R, M;"."""
    found = []
    for declaration in filter(None, (part.strip() for part in text.split(";"))):
        kind, _, names = declaration.removeprefix("const ").partition(" ")
        kind = "pointer" if kind.endswith("*") else kind
        found += [f"{kind} {name.strip()}" for name in names.split(",")]
    return found
