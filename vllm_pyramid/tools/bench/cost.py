# SPDX-License-Identifier: Apache-2.0
"""The cost model: the formulas of docs/performance.md.

The model is a lower bound on time. It counts memory reads at the streaming rate and arithmetic at
the rate of a large matrix product. Linear layers and attention run one after the other. It leaves
out norms, sampling and the engine's own work in each step.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_pyramid.tools.bench.shapes import BLOCK_SIZE, Shape


@dataclass(frozen=True)
class Machine:
    """A machine, or several devices that share a model by tensor parallelism.

    Attributes:
        bandwidth: bytes/s of a streaming read. flops: operations/s of a large matrix product in
            the model's dtype. memory: bytes, for weights and cache; 0 where it does not matter.
        devices: how many share the model; the other three are those of one device.
    """

    bandwidth: float
    flops: float
    memory: float = 0.0
    devices: int = 1


# NVIDIA's data sheet of the H200 SXM: 4.8 TB/s, 989 TFLOP/s in bfloat16 without sparsity, 141 GB.
MACHINES = {"h200": Machine(4.8e12, 989e12, 141e9)}


@dataclass(frozen=True)
class RequestNeeds:
    """What one request needs of a machine.

    Attributes:
        prompt_len, output_len: tokens.
        prefill_ops: operations of its prefill.
        step_bytes: bytes of its cache that attention reads in a decode step. Summed over the
            layers, averaged over the steps. step_ops: operations of attention in a decode step.
        prompt_cache: bytes of cache when its prompt has been processed, before any eviction.
        decode_cache: the most bytes of cache after that.
    """

    prompt_len: int
    output_len: int
    prefill_ops: float
    step_bytes: float
    step_ops: float
    prompt_cache: float
    decode_cache: float

    @classmethod
    def plain(cls, shape: Shape, prompt_len: int, output_len: int, kept: float) -> RequestNeeds:
        """A request whose layers keep `kept` tokens of the prompt, on average over the layers."""
        cached = shape.layers * (kept + output_len / 2)
        return cls(
            prompt_len,
            output_len,
            prefill_ops(shape, prompt_len),
            step_bytes=cached * shape.token_bytes,
            step_ops=4 * cached * shape.heads * shape.head_size,
            prompt_cache=blocks_bytes(shape, prompt_len),
            decode_cache=blocks_bytes(shape, kept + output_len),
        )


def blocks_bytes(shape: Shape, tokens: float) -> float:
    """Bytes of the blocks for so many tokens in each layer (on average)."""
    return -(-tokens // BLOCK_SIZE) * shape.block_bytes * shape.layers


def decode_step(shape: Shape, machine: Machine, batch: float, needs: RequestNeeds) -> float:
    """Seconds of a decode step of `batch` requests.

    t = max(s P / w, 2 P B / f) + B max(r / w, o / f)

    P weights of s bytes, batch B, r bytes and o operations of a request's attention
    (`RequestNeeds.step_bytes`, `step_ops`), w bytes/s and f operations/s of all devices together.
    """
    bandwidth, flops = machine.bandwidth * machine.devices, machine.flops * machine.devices
    weights = shape.element_bytes * shape.step_parameters
    linear = max(weights / bandwidth, 2 * shape.step_parameters * batch / flops)
    return linear + batch * max(needs.step_bytes / bandwidth, needs.step_ops / flops)


def prefill_ops(shape: Shape, prompt_len: int) -> float:
    """Operations of a prompt's prefill: 2 P n in the matrices, 2 L H D n^2 in causal attention.

    The scores of an observation window (a share 2 w / n of the attention) are left out, and so is
    the move of the tokens that are kept.
    """
    linear = 2 * shape.layers * shape.layer_parameters * prompt_len
    attention = 2 * shape.layers * shape.heads * shape.head_size * prompt_len**2
    return linear + attention


def prefill(machine: Machine, needs: RequestNeeds) -> float:
    """Seconds of one prompt's prefill; arithmetic alone."""
    return needs.prefill_ops / (machine.flops * machine.devices)


def resident(pool_bytes: float, needs: RequestNeeds) -> int:
    """Requests that decode at once in a KV cache of `pool_bytes`.

    The last one to be admitted needs its whole prompt for a moment. With b bytes for a whole prompt
    and e for the most that a request holds after it: 1 + (pool - b) / e, and at most pool / e.
    """
    whole, most = needs.prompt_cache, needs.decode_cache
    if pool_bytes < max(whole, most):
        return 0
    return int(min(1 + (pool_bytes - whole) // most, pool_bytes // most))


def _seconds(
    shape: Shape, machine: Machine, needs: RequestNeeds, num_prompts: int, batch: int
) -> tuple[float, float]:
    """Seconds of the prefills and of the decode steps of `num_prompts`, `batch` at a time."""
    batch = min(batch, num_prompts)
    steps = num_prompts / batch * (needs.output_len - 1)  # the prefill gives the first token
    decoding = steps * decode_step(shape, machine, batch, needs)
    return num_prompts * prefill(machine, needs), decoding


def end_to_end(
    shape: Shape, machine: Machine, needs: RequestNeeds, num_prompts: int, batch: int
) -> float:
    """Output tokens/s of `num_prompts` requests, `batch` decoding at a time."""
    seconds = sum(_seconds(shape, machine, needs, num_prompts, batch))
    return num_prompts * needs.output_len / seconds


def prefill_share(
    shape: Shape, machine: Machine, needs: RequestNeeds, num_prompts: int, batch: int
) -> float:
    """The share of prefill in the time of `end_to_end`."""
    prefills, decoding = _seconds(shape, machine, needs, num_prompts, batch)
    return prefills / (prefills + decoding)
