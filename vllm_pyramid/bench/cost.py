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
    "Job",
    "Machine",
    "decode_step",
    "end_to_end",
    "kept_blocks_bytes",
    "prefill",
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
class Job:
    """Attributes:
    prompt_len, output_len: tokens. kept: tokens a layer holds of the prompt after its end, on
        average over the layers (`prompt_len` without eviction).
    """

    prompt_len: int
    output_len: int
    kept: float

    @property
    def mean_cache(self) -> float:
        """Tokens in a layer's cache on average while the request decodes."""
        return self.kept + self.output_len / 2


def decode_step(shape: Shape, machine: Machine, batch: float, cached: float) -> float:
    """Seconds of a decode step.

    t = max(s P / w, 2 P B / f) + max(B L c k / w, 4 B L c H D / f)

    with P weights of s bytes, batch B, L layers of c cached tokens, k bytes of K and V a token and
    layer, H query heads of size D, w bytes/s and f operations/s over all devices.

    Args:
        batch: B. cached: c, tokens in a layer's cache, mean over layers and requests.
    """
    bandwidth, flops = machine.bandwidth * machine.devices, machine.flops * machine.devices
    weights = shape.element_bytes * shape.step_parameters
    linear = max(weights / bandwidth, 2 * shape.step_parameters * batch / flops)
    tokens = batch * shape.layers * cached
    attention = max(
        tokens * shape.token_bytes / bandwidth,
        4 * tokens * shape.heads * shape.head_size / flops,
    )
    return linear + attention


def prefill(shape: Shape, machine: Machine, prompt_len: int) -> float:
    """Seconds of one prompt's prefill: 2 P n operations in the matrices of the layers and
    2 L H D n^2 in causal attention (half of the square, two products of two operations each).

    Eviction adds the scores of the last w queries, a share 2 w / n of the attention, and moves
    what is kept: both are left out.
    """
    linear = 2 * shape.layers * shape.layer_parameters * prompt_len
    attention = 2 * shape.layers * shape.heads * shape.head_size * prompt_len**2
    return (linear + attention) / (machine.flops * machine.devices)


def kept_blocks_bytes(shape: Shape, tokens: float, block_size: int = 16) -> float:
    """Bytes of the cache that a request with `tokens` in each layer (on average) holds."""
    return -(-tokens // block_size) * block_size * shape.layers * shape.token_bytes


def resident(shape: Shape, pool_bytes: float, job: Job) -> int:
    """Requests that decode at once in a pool.

    Whoever comes last needs its whole prompt for a moment, so with b bytes for a whole request and
    e for an evicted one at its end: 1 + (pool - b) / e, and at most pool / e. The scheduler's
    forecast lets in so many at least (answers no longer than prompts), and more where they do not
    all end together.
    """
    whole = kept_blocks_bytes(shape, job.prompt_len)
    ending = kept_blocks_bytes(shape, job.kept + job.output_len)
    if pool_bytes < max(whole, ending):
        return 0
    return int(min(1 + (pool_bytes - whole) // ending, pool_bytes // ending))


def end_to_end(shape: Shape, machine: Machine, job: Job, num_prompts: int, batch: int) -> float:
    """Output tokens a second of `num_prompts` requests: their prefills, then their decode steps
    with `batch` at a time.
    """
    batch = min(batch, num_prompts)
    steps = num_prompts / batch * (job.output_len - 1)  # a prompt's prefill gives its first token
    seconds = num_prompts * prefill(shape, machine, job.prompt_len)
    seconds += steps * decode_step(shape, machine, batch, job.mean_cache)
    return num_prompts * job.output_len / seconds
