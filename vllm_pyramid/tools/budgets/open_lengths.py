# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid budgets` where lengths depend on the prompt: what is known beforehand."""

from __future__ import annotations

import json
from typing import Any

from vllm_pyramid.frontend.cache_shape import CacheShape
from vllm_pyramid.policy import DeferredPlan, Policy
from vllm_pyramid.tools.budgets.other_layers import (
    BlockSize,
    report_of_other_layers,
    sentences_of_other_layers,
)

_CALIBRATE = (
    "; `vllm-pyramid calibrate` measures the averages over your prompts and makes a policy of them "
    "whose lengths are known beforehand."
)


def show_open_budgets(
    policy: Policy,
    plan: DeferredPlan,
    source: str,
    shape: CacheShape,
    chosen: BlockSize,
    *,
    as_json: bool,
) -> None:
    """Print the bounds of a plan whose lengths each prompt decides."""
    report = _report(policy, plan, source, shape, chosen)
    if as_json:
        print(json.dumps(report, indent=2))
        return

    from rich.console import Console

    most = "" if plan.exact else "at most "
    total = report["total"]
    heads = policy.heads.splits  # with lengths of their own
    which = f"All {plan.num_layers} {'KV heads of all layers' if heads else 'layers'}"
    if shape.layers:
        which += f" that evict ({', '.join(map(str, shape.layers))})"
    more = "".join(f"\n{sentence}" for sentence in sentences_of_other_layers(report))
    Console(soft_wrap=True).print(
        f"{policy.name}, budget {policy.budget}, prompt of {plan.prompt_len} tokens, blocks of "
        f"{report['block_size']}: the lengths depend on the prompt.\n"
        f"For {source}.\n"
        f"{which} together keep {most}{total['keep']} tokens{'' if heads else ' per KV head'} "
        f"({most}{plan.budget_tokens} on average), in at most {total['blocks']} of "
        f"{report['full']['blocks']} blocks. Each {'head' if heads else 'layer'} keeps "
        f"{plan.least} ({f'{plan.safe} besides ' if plan.safe else ''}window and sinks) to "
        f"{report['layer']['most']}; how many is solved from its "
        f"{'scores' if heads else 'attention'} when the prompt has been processed.\n"
        "A response says what was solved (kv_transfer_params: solved_tokens, kept_tokens)"
        + ("." if heads else _CALIBRATE)
        + floor_sentence(policy)
        + more,
        highlight=False,
    )


def floor_sentence(policy: Policy) -> str:
    """Return a sentence on the floor of percentage budgets; empty where there is none."""
    if not policy.min_tokens or policy.budget.percent is None or not policy.evicts:
        return ""
    return f" Percentage budgets have a floor of {policy.min_tokens} tokens (--kv-min-tokens)."


def _report(
    policy: Policy, plan: DeferredPlan, source: str, shape: CacheShape, chosen: BlockSize
) -> dict[str, Any]:
    total = plan.budget_tokens * plan.num_layers
    # The KV heads of one layer share a total, or all layers do.
    sharing = shape.num_kv_heads if policy.heads.splits else plan.num_layers
    # Of K and V: blocks of K alone have twice the tokens.
    block_size = plan.block_size // (2 if policy.values.uses_swap_space else 1)
    sizes = policy.block_sizes(plan.num_layers, block_size)
    full = -(-plan.prompt_len // block_size) * plan.num_layers
    # A layer begins and ends inside a block: its tokens touch at most two blocks more than fit.
    whole = int((-(-plan.prompt_len // sizes)).sum())
    blocks = min(whole, total // int(sizes.min()) + 2 * plan.num_layers)
    return {
        "source": source,
        "policy": policy.name,
        "budget": policy.budget.value,
        "min_tokens": policy.min_tokens,
        "budget_tokens": plan.budget_tokens,
        "prompt_len": plan.prompt_len,
        "block_size": block_size,
        "num_layers": plan.num_layers,
        "lengths": "solved from each prompt",
        "total_is": "exact" if plan.exact else "at most",
        "layer": {"least": plan.least, "most": plan.most_among(sharing)},
        "total": {"least": plan.min_tokens * plan.num_layers, "keep": total, "blocks": blocks},
        "full": {"keep": plan.prompt_len * plan.num_layers, "blocks": full},
        **({"layers": shape.layers} if shape.layers else {}),
        **report_of_other_layers(shape, plan.prompt_len, chosen, blocks, full),
    }
