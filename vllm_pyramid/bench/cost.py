# SPDX-License-Identifier: Apache-2.0
"""What eviction should give, from bytes moved and operations: the formulas of docs/performance.md.

A lower bound on time: memory at its streaming rate, arithmetic at the rate of a large matrix
product, the linear layers and the attention one after the other, and nothing for all else (norms,
sampling, the engine's own work in each step). What a measurement takes beyond it is overhead.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_pyramid.bench.shapes import Shape

__all__ = [
    "Demand",
    "Machine",
    "decode_step",
    "end_to_end",
    "kept_blocks_bytes",
    "prefill",
    "prefill_ops",
    "prefill_share",
    "resident",
]


@dataclass(frozen=True)
class Machine:
    """A machine, or several devices that share a model by tensor parallelism.

    Attributes:
        bandwidth: bytes/s of a streaming read. flops: operations/s of a large matrix product in
            the model's dtype. memory: bytes, for weights and cache; 0 where it does not matter.
        devices: how many share the model; the three above are of one of them.
    """

    bandwidth: float
    flops: float
    memory: float = 0.0
    devices: int = 1


# NVIDIA's data sheet of the H200 SXM: 4.8 TB/s, 989 TFLOP/s in bfloat16 without sparsity, 141 GB.
MACHINES = {"h200": Machine(4.8e12, 989e12, 141e9)}


@dataclass(frozen=True)
class Demand:
    """What one request asks of a machine: its operations, and its bytes of the cache.

    Attributes:
        prompt_len, output_len: tokens.
        prefill_ops: operations of its prefill.
        step_bytes: of its cache that attention reads (and writes beside it) in a decode step, in
            all layers, on average over its decode steps. step_ops: operations of attention in one.
        prompt_cache: bytes of the cache that it holds when its prompt has been processed, before
            anything is given back. decode_cache: the most that it holds from then on.
    """

    prompt_len: int
    output_len: int
    prefill_ops: float
    step_bytes: float
    step_ops: float
    prompt_cache: float
    decode_cache: float

    @classmethod
    def plain(cls, shape: Shape, prompt_len: int, output_len: int, kept: float) -> Demand:
        """K and V of every kept and of every generated token are in the cache and read.

        Args:
            kept: tokens a layer holds of the prompt after its end, on average over the layers
                (`prompt_len` without eviction).
        """
        cached = shape.layers * (kept + output_len / 2)
        return cls(
            prompt_len,
            output_len,
            prefill_ops(shape, prompt_len),
            step_bytes=cached * shape.token_bytes,
            step_ops=4 * cached * shape.heads * shape.head_size,
            prompt_cache=kept_blocks_bytes(shape, prompt_len),
            decode_cache=kept_blocks_bytes(shape, kept + output_len),
        )


def decode_step(shape: Shape, machine: Machine, batch: float, demand: Demand) -> float:
    """Seconds of a decode step.

    t = max(s P / w, 2 P B / f) + B max(r / w, o / f)

    with P weights of s bytes, batch B, r bytes and o operations of a request's attention
    (`Demand.step_bytes`, `step_ops`), w bytes/s and f operations/s over all devices. Without a
    policy r = L c k and o = 4 L c H D, with L layers of c cached tokens, k bytes of K and V a token
    and layer, H query heads of size D.

    Args:
        batch: B.
    """
    bandwidth, flops = machine.bandwidth * machine.devices, machine.flops * machine.devices
    weights = shape.element_bytes * shape.step_parameters
    linear = max(weights / bandwidth, 2 * shape.step_parameters * batch / flops)
    return linear + batch * max(demand.step_bytes / bandwidth, demand.step_ops / flops)


def prefill_ops(shape: Shape, prompt_len: int) -> float:
    """Operations of a prompt's prefill: 2 P n in the matrices of the layers and 2 L H D n^2 in
    causal attention (half of the square, two products of two operations each).

    Eviction by an observation window adds the scores of the last w queries, a share 2 w / n of the
    attention, and moves what is kept: both are left out.
    """
    linear = 2 * shape.layers * shape.layer_parameters * prompt_len
    attention = 2 * shape.layers * shape.heads * shape.head_size * prompt_len**2
    return linear + attention


def prefill(machine: Machine, demand: Demand) -> float:
    """Seconds of one prompt's prefill: arithmetic alone."""
    return demand.prefill_ops / (machine.flops * machine.devices)


def kept_blocks_bytes(shape: Shape, tokens: float, block_size: int = 16) -> float:
    """Bytes of the cache that a request with `tokens` in each layer (on average) holds."""
    return -(-tokens // block_size) * block_size * shape.layers * shape.token_bytes


def resident(pool_bytes: float, demand: Demand) -> int:
    """Requests that decode at once in a pool.

    Whoever comes last needs its whole prompt for a moment, so with b bytes for a whole prompt and
    e for the most that a request holds behind it: 1 + (pool - b) / e, and at most pool / e. The
    scheduler's forecast lets in so many at least (answers no longer than prompts), and more where
    they do not all end together.
    """
    whole, most = demand.prompt_cache, demand.decode_cache
    if pool_bytes < max(whole, most):
        return 0
    return int(min(1 + (pool_bytes - whole) // most, pool_bytes // most))


def _seconds(
    shape: Shape, machine: Machine, demand: Demand, num_prompts: int, batch: int
) -> tuple[float, float]:
    """Of the prefills and of the decode steps of `num_prompts` requests, `batch` at a time."""
    batch = min(batch, num_prompts)
    steps = num_prompts / batch * (demand.output_len - 1)  # the prefill gives the first token
    decoding = steps * decode_step(shape, machine, batch, demand)
    return num_prompts * prefill(machine, demand), decoding


def end_to_end(
    shape: Shape, machine: Machine, demand: Demand, num_prompts: int, batch: int
) -> float:
    """Output tokens a second of `num_prompts` requests: their prefills, then their decode steps
    with `batch` at a time.
    """
    seconds = sum(_seconds(shape, machine, demand, num_prompts, batch))
    return num_prompts * demand.output_len / seconds


def prefill_share(
    shape: Shape, machine: Machine, demand: Demand, num_prompts: int, batch: int
) -> float:
    """Of the time of `end_to_end`, what the prefills take."""
    prefills, decoding = _seconds(shape, machine, demand, num_prompts, batch)
    return prefills / (prefills + decoding)
