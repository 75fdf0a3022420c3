# SPDX-License-Identifier: Apache-2.0
"""One frame of `vllm-pyramid top`: a line for each engine, and where its blocks lie by layer."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vllm_pyramid.tools.top.samples import EngineSample, Reading

_STEPS = "▁▂▃▄▅▆▇█"
_POOL_WIDTH = 12
_LAYERS_WIDTH = 48


def frame(now: Sequence[Reading], before: Sequence[Reading] | None = None) -> Group:
    """Draw one reading for each server; rates are of the time since `before`, the frame before.

    Without it, and for a server that was started anew, the counts are those since its start.
    """
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("server", overflow="fold")
    for heading in ("policy", "pool"):
        table.add_column(heading, no_wrap=True)
    unit = "/s" if before else ""
    headings = ("run", "wait", "prefix hits", f"evictions{unit}", f"freed{unit}", f"tokens{unit}")
    for heading in (*headings, "preempted", "failed"):
        table.add_column(heading, justify="right", no_wrap=True)
    layers = Table(box=None, padding=(0, 1), header_style="bold")
    layers.add_column("server", overflow="fold")
    layers.add_column("blocks held, first layer to last", no_wrap=True)
    layers.add_column("most", justify="right")
    layers.add_column("least", justify="right")
    earlier = {reading.url: reading for reading in before or ()}
    for reading in now:
        if reading.error:
            table.add_row(reading.url, Text(reading.error, "red"))
        for number, engine in reading.engines.items():
            name = reading.url if len(reading.engines) == 1 else f"{reading.url} #{number}"
            last = earlier.get(reading.url)
            old = last.engines.get(number) if last else None
            seconds = reading.time - last.time if last and old else None
            table.add_row(name, *_cells(engine, old, seconds))
            if held := engine.parts.get("blocks_held"):
                values = [held[layer] for layer in sorted(held, key=int)]
                layers.add_row(
                    name, Text(sparks(values), "cyan"), f"{max(values):,.0f}", f"{min(values):,.0f}"
                )
    return Group(table, "", layers) if layers.row_count else Group(table)


def _cells(engine: EngineSample, old: EngineSample | None, seconds: float | None) -> list[Text]:
    def count(name: str) -> Text:
        value = engine.of(name)
        # A server that was started anew counts from 0 again.
        if old is None or not seconds or value < old.of(name):
            return Text(f"{value:,.0f}")
        return Text(f"{(value - old.of(name)) / seconds:,.1f}")

    failed = engine.of("failed")
    policy = f"{engine.policy} {engine.budget}" if engine.policy else "none"
    return [
        Text(policy),
        _pool(engine),
        _running(engine),
        Text(f"{engine.of('waiting'):.0f}"),
        _hits(engine, old),
        count("evictions"),
        count("blocks_freed"),
        count("generated_tokens"),
        Text(f"{engine.of('preemptions'):,.0f}", "yellow" * bool(engine.of("preemptions"))),
        Text(f"{failed:,.0f}", "bold red" * bool(failed)),
    ]


def _running(engine: EngineSample) -> Text:
    """Return how many requests run, and of those that orders can evict how many at each level."""
    by_level = engine.parts.get("by_level", {}).items()
    levels = ", ".join(f"{count:.0f} {level}" for level, count in by_level if count)
    return Text(f"{engine.of('running'):.0f}" + f" ({levels})" * bool(levels))


def _pool(engine: EngineSample) -> Text:
    total = engine.of("pool_blocks")
    if not total:  # without a policy, or an older version
        return Text(f"{engine.of('usage'):.0%}")
    share = min(1.0, engine.used_blocks / total)
    filled = round(share * _POOL_WIDTH)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    return Text.assemble(
        ("█" * filled, style),
        ("·" * (_POOL_WIDTH - filled), "dim"),
        f" {share:4.0%} {engine.used_blocks:,.0f}/{total:,.0f}",
    )


def _hits(engine: EngineSample, old: EngineSample | None) -> Text:
    """Return the share of prompt tokens that were found since the frame before, or in all."""
    queries, hits = engine.of("prefix_queries"), engine.of("prefix_hits")
    if old is not None and queries > old.of("prefix_queries"):
        queries, hits = queries - old.of("prefix_queries"), hits - old.of("prefix_hits")
    return Text(f"{hits / queries:.0%}" if queries else "-")


def sparks(values: Sequence[float]) -> str:
    """Draw numbers as columns, the largest one full; many layers share a column by their mean."""
    size = max(1, -(-len(values) // _LAYERS_WIDTH))
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    means = [sum(group) / len(group) for group in groups]
    top = max(means, default=0.0)
    if top <= 0:
        return "·" * len(means)
    last = len(_STEPS) - 1
    return "".join(_STEPS[round(last * mean / top)] if mean else "·" for mean in means)
