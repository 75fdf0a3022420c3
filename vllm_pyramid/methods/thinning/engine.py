# SPDX-License-Identifier: Apache-2.0
"""What a policy that thins prompts between layers asks of vLLM's configuration.

Called before and after vLLM resolves its defaults.

- **A budget is an upper limit**: `decay_ratio` is lowered until the mean over the layers is at most
  that, for each piece. A budget below what a ratio of 0 keeps is refused at start-up (of 2,048
  tokens 50.9 % with 32 layers, 45.2 % with `{"interval": 1}`). The defaults keep 74.2 % of 4,096
  tokens in one piece with 32 layers, 70.6 % with 40 and 59.8 % with 80. The paper's 45.4 % cannot
  result from these settings.
- **Pieces.** A prompt is cut at multiples of `piece_tokens`, each piece is one step, and tokens of
  earlier pieces are not thinned again. So outputs do not depend on the batch. A step must be able
  to hold a piece: a smaller `--max-num-batched-tokens` is refused; unset, it becomes `piece_tokens`
  and `--max-num-seqs` together, at least 4096 (8192 on CUDA).
- **Compilation.** Steps that thin a prompt run without `torch.compile` and CUDA graphs, others
  with them. On CUDA it ran once, not timed (docs/gpu.md); there `fill_blocks: false` and
  `piece_tokens` below 16 are refused.
- **Memory.** Blocks are freed when the whole prompt has been processed.
- **Unlike the authors' code**, a layer's own cache is shortened too, as in Algorithm 1, and a
  context that would fall below the floor is thinned to the floor.
- **Needs** a model with the usual layer loop (Llama, Mistral, Qwen2, Qwen3). Not with LoRA or
  `prompt_logprobs`. The first token is not that of the full cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_pyramid.compat.step_limits import step_limits
from vllm_pyramid.compat.thin_forward import ARCHITECTURES, refusal

if TYPE_CHECKING:
    from vllm_pyramid.methods.thinning import DecayAllocator
    from vllm_pyramid.policy.policy import Policy

logger = init_logger(f"vllm.{__name__}")

# vLLM's defaults, by the kind of device: of LLM(...), and of --max-num-seqs for `vllm serve`.
USUAL_BATCHED_TOKENS = {"cpu": 4096, "cuda": 8192}
USUAL_SEQS = {"cpu": 256, "cuda": 1024}
# Of a prompt that vLLM warms up with on CUDA, in one step.
WARM_UP_TOKENS = 16


def check_thinning_args(args: EngineArgs, policy: Policy, thinner: DecayAllocator) -> None:
    """Refuse pieces that are too small for a GPU's warm-up, and set the size of a step.

    A step gets room for a piece and a full batch that decodes, unless its size was set.
    """
    device = current_platform.device_type
    if device != "cpu" and thinner.piece_tokens < WARM_UP_TOKENS:
        raise ValueError(
            f"policy {policy.name!r} has piece_tokens {thinner.piece_tokens}, and vLLM warms a GPU "
            f"up with prompts of {WARM_UP_TOKENS} tokens in one step: raise it to that"
        )
    if args.max_num_batched_tokens is None and args.enable_chunked_prefill is not False:
        room = thinner.piece_tokens + (
            args.max_num_seqs or USUAL_SEQS.get(device, USUAL_SEQS["cuda"])
        )
        usual = USUAL_BATCHED_TOKENS.get(device, USUAL_BATCHED_TOKENS["cuda"])
        args.max_num_batched_tokens = max(room, usual)
        logger.info(
            "kv-policy %s: set --max-num-batched-tokens to %d, so that a chunk of a prompt fits "
            "beside decoding requests",
            policy.name,
            args.max_num_batched_tokens,
        )


def check_thinning_config(config: VllmConfig, policy: Policy, thinner: DecayAllocator) -> None:
    """Check that the model's loop is known, a step holds a piece, and the budget can be met."""
    model = config.model_config
    if model.architecture not in ARCHITECTURES:
        raise ValueError(refusal(policy.name, model.architecture))
    longest = min(thinner.piece_tokens, model.max_model_len)
    scheduler = config.scheduler_config
    for flag, value, tokens in step_limits(config):
        if tokens is not None and tokens < longest:
            raise ValueError(
                f"{flag} {value} is too small for policy {policy.name!r}: a piece of {longest} "
                f"tokens is processed in one step, and a step has room for {tokens} of a prompt, "
                "which could wait for ever; raise the flag, or set --kv-policy-args "
                f"'{{\"piece_tokens\": {tokens}}}' (which changes results)"
            )
    if scheduler.max_num_batched_tokens < longest + scheduler.max_num_seqs:
        logger.warning(
            "kv-policy %s: chunks of %d tokens fit into a step of --max-num-batched-tokens %d only "
            "while at most %d requests decode; other prompts wait. Raise that flag to %d",
            policy.name,
            longest,
            scheduler.max_num_batched_tokens,
            scheduler.max_num_batched_tokens - longest,
            longest + scheduler.max_num_seqs,
        )
    share = policy.budget.percent
    assert share is not None
    layers = model.get_num_layers(config.parallel_config)
    least = int(thinner.lengths(longest, layers, 0.0).sum()) / (layers * longest)
    if least * 100 > share:
        raise ValueError(
            f"budget {policy.budget} is out of reach of policy {policy.name!r}: over {layers} "
            f"layers, pieces of {longest} tokens keep at least {least:.1%} with recent_ratio "
            f"{thinner.recent_ratio}, interval {thinner.interval} and min_context "
            f"{thinner.min_context}; raise the budget or lower these"
        )
