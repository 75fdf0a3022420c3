# SPDX-License-Identifier: Apache-2.0
"""Times our attention on the CPU beside vLLM's own, and PyTorch's for prompts.

The same queries, keys and values, each side with the blocks that it uses by default (16 and 128
tokens, at random places) and its own layout. Both sides alternate; a ratio is taken within a round.
Decoding walks through copies of the caches that together exceed the last-level cache, as the layers
of a model do (`--cold-mib 0`: one cache, again and again). Needs a CPU build of vLLM.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from vllm import _custom_ops as vllm_ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.tools.bench.prepare import processor

OURS, STOCK = 16, 128  # tokens of a block


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Case:
    """`requests` of `context` tokens, of which the last `queries` are asked for.

    k, v: [requests, context, G, D].
    """

    def __init__(self, shape: tuple[int, int, int], requests: int, context: int, queries: int):
        self.G, group, self.D = shape
        self.requests, self.context, self.queries = requests, context, queries
        self.query = torch.randn(requests * queries, self.G * group, self.D).bfloat16()
        kv = (2, requests, context, self.G, self.D)
        self.k, self.v = torch.randn(kv).bfloat16()
        self.starts = torch.arange(requests + 1).int() * queries
        self.lens = integers(*[context] * requests)
        self.scale = self.D**-0.5

    def cache(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """An empty cache [blocks, G, 2 * block, D], and the block table."""
        each = -(-self.context // block)
        table = torch.randperm(self.requests * each).int().view(self.requests, each)
        return torch.zeros(self.requests * each, self.G, 2 * block, self.D).bfloat16(), table

    def slots(self, table: torch.Tensor, block: int) -> torch.Tensor:
        positions = torch.arange(self.context)
        return (table[:, positions // block].long() * block + positions % block).flatten()

    def ours(self) -> Callable[[], torch.Tensor]:
        cache, table = self.cache(OURS)
        key, value = cache.split(OURS, dim=2)
        cpu.reshape_and_cache(
            self.k.flatten(0, 1), self.v.flatten(0, 1), key, value, self.slots(table, OURS)
        )
        nothing = torch.zeros(self.requests, dtype=torch.int32)
        batch = AttentionBatch(self.query, key, value, table, self.starts, self.lens, nothing)
        out = torch.empty_like(self.query)

        def run() -> torch.Tensor:
            cpu.paged_attention(out, batch, Softmax(self.scale))
            return out

        return run

    def stock(self) -> Callable[[], torch.Tensor]:
        cache, table = self.cache(STOCK)
        key, value = cache.chunk(2, dim=2)
        isa = _get_attn_isa(torch.bfloat16, STOCK, self.D)
        new = (self.k.flatten(0, 1), self.v.flatten(0, 1))
        vllm_ops.cpu_attn_reshape_and_cache(*new, key, value, self.slots(table, STOCK), isa)
        plan = vllm_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=self.requests, num_heads=self.query.shape[1], num_kv_heads=self.G,
            head_dim=self.D, seq_lens=self.lens, dtype=torch.bfloat16,
            query_start_loc=self.starts, causal=True, sliding_window_size=-1, isa=isa,
            enable_kv_split=True,
        )  # fmt: skip
        out = torch.empty_like(self.query)

        def run() -> torch.Tensor:
            vllm_ops.cpu_attention_with_kv_cache(
                self.query, key, value, out, self.starts, self.lens, self.scale, True, None, -1,
                table, 0.0, plan, None,
            )  # fmt: skip
            return out

        return run

    def sdpa(self) -> Callable[[], torch.Tensor]:
        """Of a whole prompt."""
        q, k, v = (x.movedim(-2, -3)[None].contiguous() for x in (self.query, self.k[0], self.v[0]))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def timed(function: Callable[[], torch.Tensor]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--shapes", nargs="+", default=["4x2x64", "3x3x64", "4x2x128", "2x8x128"],
        help="KV heads x query heads of each x head size",
    )  # fmt: skip
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument(
        "--batches", nargs="*", default=["1x2048", "8x2048"], help="REQUESTSxCONTEXT"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold-mib", type=int, default=600)
    args = parser.parse_args()
    cases = [(1, n, n) for n in args.prompts]
    for batch in args.batches:
        requests, context = map(int, batch.split("x"))
        cases.append((requests, context, 1))
    table = Table(title=f"attention, bfloat16, {cpu.current_isa()}, {processor()}")
    for column in ("threads", "shape", "case", "ours, ms", "/ vLLM", "range", "/ SDPA", "range"):
        table.add_column(column, justify="right")
    for threads in args.threads:
        torch.set_num_threads(threads)
        for name in args.shapes:
            for requests, context, queries in cases:
                kv_heads, group, head_size = map(int, name.split("x"))
                case = Case((kv_heads, group, head_size), requests, context, queries)
                prompt = queries > 1
                size = case.k.nbytes * 2
                copies = 1 if prompt else max(1, args.cold_mib * 2**20 // size)
                ours = [case.ours() for _ in range(copies)]
                stock = [case.stock() for _ in range(copies)]
                torch.testing.assert_close(ours[0](), stock[0](), rtol=0.05, atol=0.03)
                sdpa = case.sdpa() if prompt else None
                rows: list[tuple[float, float, float]] = []
                for _ in range(args.rounds):
                    mine = statistics.fmean(timed(one) for one in ours)
                    theirs = statistics.fmean(timed(one) for one in stock)
                    rows.append((mine, theirs, timed(sdpa) if sdpa else 0.0))
                cells = [
                    str(threads),
                    name,
                    f"{requests}x{context}" + (" prompt" if prompt else ""),
                ]
                cells.append(f"{statistics.median(row[0] for row in rows) * 1e3:.2f}")
                for other in (1, 2) if prompt else (1,):
                    ratios = [row[0] / row[other] for row in rows]
                    cells.append(f"{statistics.median(ratios):.2f}")
                    cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
                table.add_row(*cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
