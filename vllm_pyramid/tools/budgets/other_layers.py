# SPDX-License-Identifier: Apache-2.0
"""What `vllm-pyramid budgets` says about layers that do not evict.

Blocks of all layers come from one pool, so their pages are of one size. Where layers keep states
vLLM makes them as large as a state, which may be hundreds of tokens of attention.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm_pyramid.frontend.cache_shape import CacheShape
from vllm_pyramid.frontend.layer_kinds import CHUNKED, FULL, STATE
from vllm_pyramid.frontend.model_shape import state_block_size

_MIB = 1024 * 1024


@dataclass(frozen=True)
class BlockSize:
    """Tokens of a block before all pages get one size, and where the number comes from.

    `source` is "given", "vllm" (by the size of a state) or "default"; `reason` says why vLLM could
    not say it, where layers keep states.
    """

    tokens: int
    source: str
    reason: str = ""


def choose_blocks(model: str | None, shape: CacheShape, given: int | None) -> BlockSize:
    """Return the user's block size, or vLLM's for a model with states, or 16."""
    if given is not None:
        return BlockSize(given, "given")
    if model is None or not shape.has_states:
        return BlockSize(16, "default")
    try:
        return BlockSize(state_block_size(model, shape.dtype), "vllm")
    except ValueError as error:
        return BlockSize(16, "default", str(error))


def report_of_other_layers(
    shape: CacheShape, length: int, chosen: BlockSize, blocks: int, full_blocks: int
) -> dict[str, Any]:
    """Return what layers without eviction hold, and all layers together; empty where all evict.

    The evicting layers hold `blocks`, and would hold `full_blocks` with everything kept.
    """
    if not shape.other_layers and not shape.readers:
        return {}
    page = shape.page_bytes(chosen.tokens)
    known = not (shape.has_states and chosen.source == "default")
    other_layers, total = [], 0
    for kind in shape.other_layers:
        one: dict[str, Any] = {"block_size": None, "blocks": kind.layers, "held": None}
        if kind.kind != STATE:
            size = shape.tokens_of_block(chosen.tokens, kind.token_bytes)
            held = kind.tokens(length, size)
            one = {"block_size": size, "blocks": kind.layers * held // size, "held": held}
        total += one["blocks"]
        mib = one["blocks"] * page / _MIB if known else None
        other_layers.append({**asdict(kind), **one, "mib": mib})
    mib, full_mib = ((count + total) * page / _MIB for count in (blocks, full_blocks))
    request = {"mib": mib, "full_mib": full_mib, "share": mib / full_mib}
    return {
        "other_layers": other_layers,
        "readers": shape.readers,
        "block_size_from": chosen.source,
        "block_size_unknown": chosen.reason or None,
        "request": request if known else None,
    }


def sentences_of_other_layers(report: dict[str, Any]) -> list[str]:
    """Return the same in words, and the cost of whole blocks; empty where all layers evict."""
    said = []
    for kind in report.get("other_layers", ()):
        layers = f"{kind['layers']} layers" if kind["layers"] > 1 else "1 layer"
        if kind["kind"] == STATE:
            said += [f"{layers} with a state: one block each.{_in_mib(kind)}", *_states(report)]
            continue
        if kind["kind"] == FULL:
            said.append(f"Draft model, {layers}: it keeps all tokens." + _in_mib(kind))
            continue
        what = "chunks" if kind["kind"] == CHUNKED else "a window"
        blocks = f" in blocks of {kind['block_size']}"
        said.append(
            f"{layers} with {what} of {kind['sees']} tokens hold {kind['held']} each at most"
            f"{blocks if kind['block_size'] != report['block_size'] else ''} while it decodes."
            + _in_mib(kind)
        )
    if report.get("readers"):
        said.append(f"{report['readers']} layers have no cache: they read those of other layers.")
    if request := report.get("request"):
        most = "at most " if "lengths" in report else ""
        said.append(
            f"With these a request holds {most}{request['mib']:.2f} of "
            f"{request['full_mib']:.2f} MiB, {100 * request['share']:.1f} %: "
            f"{1 / request['share']:.1f} times as many fit."
        )
    return said


def _in_mib(kind: dict[str, Any]) -> str:
    return "" if kind["mib"] is None else f" Together {kind['mib']:.2f} MiB, whatever the policy."


def _states(report: dict[str, Any]) -> list[str]:
    """Return why blocks are that long, and what that costs."""
    size = report["block_size"]
    if report["block_size_from"] == "default":
        return [
            "The configuration does not give the size of a state, and vLLM cannot be asked here "
            f"({report['block_size_unknown']}). It makes the blocks of attention as long as a "
            f"state's page, maybe hundreds of tokens, so fewer are freed than with the {size} "
            "assumed here: give --block-size as the server's log says it."
        ]
    told = (
        f"vLLM makes the blocks of attention as large as a state's page: {size} tokens on a "
        "machine like this; the server's log says it for another."
    )
    if report["block_size_from"] == "given":
        told = (
            f"vLLM may make blocks longer than {size} tokens, as large as a state's page: the "
            "server's log says so."
        )
    total, full = report["total"], report["full"]
    blocks, tokens = (100 * total[what] / full[what] for what in ("blocks", "keep"))
    return [
        f"{told} Eviction gives back whole blocks: {blocks:.1f} % of them stay for {tokens:.1f} % "
        "of the tokens."
    ]
