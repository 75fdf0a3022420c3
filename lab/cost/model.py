# SPDX-License-Identifier: Apache-2.0
"""The cost model of lab/cost/README.md, and the table of `python -m lab.cost`.

The model is a lower bound on time. It counts memory reads at the streaming rate and arithmetic at
the rate of a large matrix product. Linear layers and attention run one after the other. It leaves
out norms, sampling and the engine's own work in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import pandas as pd

from vllm_pyramid.frontend.cache_shape import DTYPE_BYTES
from vllm_pyramid.policy import Budget
from vllm_pyramid.tools.bench.shapes import BLOCK_SIZE, Shape

ALL_ENGINES = 10000  # requests/s that all engines together are to serve
CACHE_SHARE = 0.9  # of a server's memory; the KV cache gets what the weights leave of it


def layer_parameters(shape: Shape) -> int:
    """Return the weights of a layer's matrices: Q, K, V, O, and the MLP's three."""
    attention = shape.hidden * shape.head_size * (2 * shape.heads + 2 * shape.kv_heads)
    return attention + 3 * shape.hidden * shape.mlp


def step_parameters(shape: Shape) -> int:
    """Return the weights that a decode step multiplies with: all layers and the output layer."""
    return shape.layers * layer_parameters(shape) + shape.hidden * shape.vocabulary


def element_bytes(shape: Shape) -> int:
    """Return the bytes of a weight."""
    return DTYPE_BYTES[shape.dtype]


@dataclass(frozen=True)
class Machine:
    """A machine, or several devices that share a model by tensor parallelism.

    Attributes:
        bandwidth: bytes/s of a streaming read, of one device.
        flops: operations/s of a large matrix product in the model's dtype, of one device.
        memory: bytes of one device, for weights and cache.
        devices: how many share the model.
    """

    bandwidth: float
    flops: float
    memory: float
    devices: int = 1


# NVIDIA's data sheet of the H200 SXM: 4.8 TB/s, 989 TFLOP/s in bfloat16 without sparsity, 141 GB.
H200 = Machine(4.8e12, 989e12, 141e9)


@dataclass(frozen=True)
class CostModel:
    """What requests of one kind cost on a machine.

    Attributes:
        prompt_len, output_len: tokens of a request.
        kept: tokens of the prompt that a layer keeps, mean over the layers.
    """

    shape: Shape
    machine: Machine
    prompt_len: int
    output_len: int
    kept: float

    def cache_bytes(self, tokens: float) -> float:
        """Return the bytes of the blocks for `tokens` tokens in each layer."""
        return -(-tokens // BLOCK_SIZE) * self.shape.block_bytes * self.shape.layers

    def decode_step(self, batch: float) -> float:
        """Return the seconds of a decode step of `batch` requests.

        t = max(s P / w, 2 P B / f) + B max(r / w, o / f)

        P weights of s bytes, batch B, r bytes and o operations of a request's attention, w bytes/s
        and f operations/s of all devices together.
        """
        shape, machine = self.shape, self.machine
        bandwidth, flops = machine.bandwidth * machine.devices, machine.flops * machine.devices
        weights = element_bytes(shape) * step_parameters(shape)
        linear = max(weights / bandwidth, 2 * step_parameters(shape) * batch / flops)
        cached = shape.layers * (self.kept + self.output_len / 2)
        operations = 4 * cached * shape.heads * shape.head_size
        return linear + batch * max(cached * shape.token_bytes / bandwidth, operations / flops)

    def prefill(self) -> float:
        """Return the seconds of a prompt's prefill, by its arithmetic alone.

        2 P n operations in the matrices, 2 L H D n^2 in causal attention. The scores of an
        observation window and the move of the tokens that are kept are left out.
        """
        shape, n = self.shape, self.prompt_len
        linear = 2 * shape.layers * layer_parameters(shape) * n
        attention = 2 * shape.layers * shape.heads * shape.head_size * n**2
        return (linear + attention) / (self.machine.flops * self.machine.devices)

    def resident(self, pool_bytes: float) -> int:
        """Return how many requests decode at once in a KV cache of `pool_bytes`.

        The last one to be admitted needs its whole prompt for a moment. With b bytes for a whole
        prompt and e for what a request holds at its end: 1 + (pool - b) / e, and at most pool / e.
        """
        whole = self.cache_bytes(self.prompt_len)
        most = self.cache_bytes(self.kept + self.output_len)
        if pool_bytes < max(whole, most):
            return 0
        return int(min(1 + (pool_bytes - whole) // most, pool_bytes // most))

    def end_to_end(self, num_prompts: int, batch: int) -> float:
        """Return the requests/s of `num_prompts` requests, `batch` of them decoding at a time."""
        batch = min(batch, num_prompts)
        steps = num_prompts / batch * (self.output_len - 1)  # the prefill gives the first token
        return num_prompts / (num_prompts * self.prefill() + steps * self.decode_step(batch))


# Headings and formats of the table's columns.
COLUMNS = {
    "prompt": "{:,.0f}",
    "budget": "{}",
    "cache of a request, GB": "{:.2f}",
    "resident": "{:,.0f}",
    "decode step, ms": "{:.1f}",
    "decode, tok/s": "{:,.0f}",
    "of 100%": "{:.2f}",
    "prefill, s": "{:.2f}",
    "requests/s": "{:.2f}",
    "engines": "{:,.0f}",
}


def cost_rows(
    shape: Shape,
    machine: Machine,
    prompt_lens: Sequence[int],
    budgets: Sequence[str],
    output_len: int,
) -> pd.DataFrame:
    """Return rows of `COLUMNS` as text: each prompt length, without eviction and by budget.

    Raises:
        ValueError: the weights, or one request, do not fit.
    """
    weights = element_bytes(shape) * (step_parameters(shape) + shape.hidden * shape.vocabulary)
    pool = machine.memory * machine.devices * CACHE_SHARE - weights
    if pool <= 0:
        raise ValueError(
            f"{weights / 1e9:.0f} GB of weights do not fit into {CACHE_SHARE:.0%} of "
            f"{machine.devices} x {machine.memory / 1e9:.0f} GB: give more --devices"
        )
    rows = []
    for prompt_len in prompt_lens:
        whole_rate = None
        for budget in (None, *budgets):
            kept = prompt_len if budget is None else Budget.parse(budget).tokens_for(prompt_len, 1)
            model = CostModel(shape, machine, prompt_len, output_len, kept)
            batch = model.resident(pool)
            if not batch:
                raise ValueError(
                    f"a prompt of {prompt_len} tokens does not fit next to the weights"
                )
            step = model.decode_step(batch)
            whole_rate = whole_rate or batch / step
            # A thousand waves: the last one, which drains, does not count.
            requests = model.end_to_end(1000 * batch, batch)
            row = (prompt_len, budget or "100%", model.cache_bytes(kept) / 1e9, batch, 1e3 * step,
                   batch / step, batch / step / whole_rate, model.prefill(), requests,
                   ceil(ALL_ENGINES / requests))  # fmt: skip
            cells = zip(COLUMNS.items(), row, strict=True)
            rows.append({heading: form.format(value) for (heading, form), value in cells})
    return pd.DataFrame(rows)


def as_markdown(rows: pd.DataFrame) -> str:
    """Return the table of lab/results/llama-3-on-h200.md."""
    made = [f"| {' | '.join(cells)} |" for cells in ([*rows], *rows.to_numpy().tolist())]
    return "\n".join([made[0], "|" + "---:|" * len(rows.columns), *made[1:]])
