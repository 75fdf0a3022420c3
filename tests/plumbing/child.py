# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, for tests that need another environment than pytest's.

    python tests/plumbing/child.py REQUEST.json RESULT.json

Nothing of vllm_pyramid is imported here: vLLM finds it by itself, as in a stock program. `REQUEST`
holds `engines`, which are started one after the other, and `triton`. An engine has `llm` (arguments
of `vllm.LLM`) and `waves` (lists of `[token ids, sampling parameters]`, with a `cache_salt` behind
them if the request has one; a wave begins two steps after the one before it, so that later prompts
meet requests that decode, and an empty one waits until all have ended; `ticket_of` among the extra
arguments takes a ticket from the answer of the request of that number). `triton` is null,
"interpreter" (Triton's interpreter takes the place of a device, as vLLM's second model runner needs
it), "attention" (the same, and the attention is that of CUDA devices: vLLM's Triton kernels on
tables that are shifted for each layer), or "flash" (the same with FlashAttention, whose functions
have stand-ins). With `graphs`, a mode of vLLM's CUDA graphs, workers start as on a GPU and replay
stand-ins for graphs; with `kernels` our own kernels are those for Triton (`stand_ins.py`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def interpret_triton() -> None:
    """Have Triton's interpreter, quickened, take a device's place, in a process of its own.

    A process that was forked from one in which it does has it.
    """
    from interpreter import quicken  # of this folder, which a script's Python finds
    from triton.backends import backends

    if "cpu" not in backends:
        pretend_triton_device()
        quicken()


def pretend_triton_device() -> None:
    """Let Triton believe that one device is there; its interpreter then runs on the host."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    from triton.backends import Backend, backends

    nvidia = backends["nvidia"]

    class ActiveDriver(nvidia.driver):  # type: ignore[name-defined]
        @staticmethod
        def is_active() -> bool:
            return True

    from triton.runtime.interpreter import InterpreterBuilder

    masked_load = InterpreterBuilder.create_masked_load
    masked_store = InterpreterBuilder.create_masked_store

    # The interpreter makes an integer of a truth value that was and-ed with a scalar.

    def load(self: Any, ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return masked_load(self, ptrs, mask, *args, **kwargs)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return masked_store(self, ptrs, value, mask, *args, **kwargs)

    InterpreterBuilder.create_masked_load = load
    InterpreterBuilder.create_masked_store = store
    backends.clear()
    backends["nvidia"] = Backend(nvidia.compiler, ActiveDriver)
    backends["cpu"] = backends["nvidia"]  # a CPU build of vLLM wants one of this name, too


def use_attention_of_cuda(name: str) -> None:
    """Make the CPU platform choose a backend of CUDA devices, with a policy and without."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    from vllm_pyramid.compat.backend_names import BACKENDS
    from vllm_pyramid.compat.platform.cpu_platform import PyramidCpuPlatform
    from vllm_pyramid.frontend import features

    def backend(cls: type, *args: Any, **kwargs: Any) -> str:
        return BACKENDS[name]

    for platform in (CpuPlatform, PyramidCpuPlatform):
        platform.get_attn_backend_cls = classmethod(backend)  # type: ignore[assignment]
    from vllm.v1.attention.backends import triton_attn

    from vllm_pyramid.kernels import reference
    from vllm_pyramid.worker import layer_binding

    write = triton_attn.triton_reshape_and_cache_flash

    def rounded(key: Any, value: Any, k: Any, v: Any, slots: Any, dtype: str, *scales: Any) -> None:
        """vLLM's kernel; not for 8-bit floats, to which the interpreter does not round."""
        if not dtype.startswith("fp8"):
            write(key, value, k, v, slots, dtype, *scales)
            return
        caches = (k.transpose(1, 2), v.transpose(1, 2))
        names = {"key_scale": float(scales[0]), "value_scale": float(scales[1])}
        reference.reshape_and_cache(key, value, *caches, slots, **names)

    # As on CUDA: all layers are evicted at a step's end.
    layer_binding.evicts_at_step_end = lambda caches, policy: layer_binding.are_one_memory(caches)
    triton_attn.triton_reshape_and_cache_flash = rounded
    write_rows = triton_attn.triton_reshape_and_cache_flash_per_token_head_quant

    def rounded_rows(key: Any, value: Any, k: Any, v: Any, *of: Any, kv_quant_mode: Any) -> None:
        """The same with a scale for each token and KV head."""
        k_scales, v_scales, slots = of
        if k.dtype == torch.int8:
            write_rows(key, value, k, v, k_scales, v_scales, slots, kv_quant_mode=kv_quant_mode)
            return
        slots, size = slots[slots >= 0], k.shape[1]
        for rows, cache, scales in ((key, k, k_scales), (value, v, v_scales)):
            rows = rows[: len(slots)].float()
            own = (rows.abs().amax(dim=-1) / 448).clamp(min=1e-6)
            cache[slots // size, slots % size, :, : rows.shape[2]] = (
                (rows / own[..., None]).clamp(-448, 448).to(cache.dtype)
            )
            scales[slots // size, slots % size] = own

    triton_attn.triton_reshape_and_cache_flash_per_token_head_quant = rounded_rows
    # What does not go with a CPU is not refused.
    features.current_platform = SimpleNamespace(device_type="pretended")
    torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 0)


def run(arguments: dict[str, Any], waves: list[Any]) -> dict[str, Any]:
    """Start an engine, run the waves, end it, and tell what came of them."""
    from vllm import LLM

    if given := arguments.get("kv_transfer_config"):
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(**given)
    llm = LLM(**arguments)
    try:
        return _run(llm.llm_engine, waves)
    finally:
        llm.llm_engine.engine_core.shutdown()


def _run(engine: Any, waves: list[Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.platforms import current_platform

    waves = list(waves)
    outputs: dict[str, Any] = {}
    names: list[str] = []
    while waves or engine.has_unfinished_requests():
        if waves and (waves[0] or not engine.has_unfinished_requests()):
            for tokens, params, *salt in waves.pop(0):
                extra = params.get("extra_args") or {}
                if (sent := extra.get("ticket_of")) is not None:
                    ticket = outputs[names[sent]].kv_transfer_params
                    params["extra_args"] = {"kv_transfer_params": ticket}
                names.append(f"request-{len(names)}")
                prompt = {"prompt_token_ids": tokens}
                if salt:
                    prompt["cache_salt"] = salt[0]
                engine.add_request(names[-1], prompt, SamplingParams(**params))
        for _ in range(2):
            if engine.has_unfinished_requests():  # a step without any would wait for ever
                outputs |= {output.request_id: output for output in engine.step()}
    config = engine.vllm_config
    return {
        "outputs": [
            {
                "token_ids": list(outputs[name].outputs[0].token_ids),
                "report": outputs[name].kv_transfer_params,
                "cached": outputs[name].num_cached_tokens,
                "finish_reason": outputs[name].outputs[0].finish_reason,
                "stop_reason": outputs[name].outputs[0].stop_reason,
            }
            for name in names
        ],
        "scheduler": str(config.scheduler_config.scheduler_cls),
        "worker": config.parallel_config.worker_cls,
        "platform": type(current_platform).__module__,
        "block_size": config.cache_config.block_size,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "kv_cache_tokens": config.cache_config.kv_cache_size_tokens,
        "modules": sorted(name for name in sys.modules if name.startswith("vllm_pyramid")),
        **_inside(engine),
    }


def _inside(engine: Any) -> dict[str, Any]:
    """What is only known where the engine core lives in this process."""
    core = getattr(engine.engine_core, "engine_core", None)
    if core is None:
        return {}
    pool = core.scheduler.kv_cache_manager.block_pool
    coordinator = getattr(core.scheduler, "coordinator", None)
    scheduler = {
        # Of each pipeline stage.
        "free_blocks": [own.get_num_free_blocks() for own in getattr(pool, "pools", [pool])],
        "evictions": getattr(getattr(coordinator, "counters", None), "num_evictions", None),
    }
    scheduler["groups"] = len(core.scheduler.kv_cache_config.kv_cache_groups)
    if not hasattr(core.model_executor, "driver_worker"):  # the workers are other processes
        return {**scheduler, "ranks": core.model_executor.collective_rpc(_of_worker)}
    return {**scheduler, **_of_worker(core.model_executor.driver_worker)}


def _of_worker(wrapper: Any) -> dict[str, Any]:
    """What its model runner is; taken along to workers in processes of their own."""
    runner = wrapper.worker.model_runner
    if hasattr(runner, "block_tables"):
        tables = runner.block_tables.input_block_tables
    else:
        tables = [group.block_table.gpu for group in runner.input_batch.block_table.block_tables]
    return {
        "one_tensor_of_tables": len({t.untyped_storage().data_ptr() for t in tables}) == 1,
        "runner": [f"{cls.__module__}.{cls.__qualname__}" for cls in type(runner).__mro__],
    }


def install(request: dict[str, Any]) -> None:
    """Put the stand-ins that were asked for into this process."""
    if request.get("triton"):
        interpret_triton()
    if request.get("triton") in ("attention", "flash"):
        use_attention_of_cuda("TRITON_ATTN" if request["triton"] == "attention" else "FLASH_ATTN")
    import stand_ins

    if request.get("triton") == "flash":
        stand_ins.install_flash_attention()
    if request.get("graphs"):
        stand_ins.install_start_up(request["graphs"])
    if request.get("kernels"):
        stand_ins.install_triton_kernels()


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    install(request)
    import stand_ins
    import vllm.v1.engine.llm_engine  # noqa: F401  most of what an engine imports
    import workers
    from garbage import spare_collections

    workers.sleep_while_waiting()
    spare_collections()
    results = []
    for engine in request["engines"]:
        stand_ins.COUNTS.clear()
        result = run(engine["llm"], engine["waves"])
        results.append({**result, "counts": dict(stand_ins.COUNTS)})
        if len(results) == 1:  # it has imported the rest
            spare_collections()
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
