# SPDX-License-Identifier: Apache-2.0
"""Score keys by the queries that a model has on average (TriAttention, arXiv:2604.04921).

Queries without their rotary embedding lie close to a centre, which belongs to the head and not to
the text. So the attention that a key will get is foretold from its distance alone.
The centres are measured once for a model, in a checkout:

    python -m lab.heads.queries --model MODEL --prompts FILE.jsonl -o centres.npz
    vllm serve MODEL --kv-policy triattention --kv-policy-args '{"centres": "centres.npz"}'

- **Positions.** A key is scored as it lies in the cache, rotated, against the centre rotated to
  where queries will stand: survivors need not remember their positions.
- **Where it differs from the authors' code.** Each layer and KV head chooses by its own scores, as
  their `per_layer_perhead` does; their default is the mean of all layers. Evictions come every
  `interval` tokens behind the prompt, theirs at multiples of it. With partial rotary embeddings the
  channels that are not rotated count by their product with the mean query.
- **Cost.** Keys are looked at once in `interval` steps; no query is.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator

from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.scorer_inputs import ScorerInputs

_ARRAYS = ("mean", "length")


class Centres(NamedTuple):
    """What `python -m lab.heads.queries` writes: queries without their rotary embedding.

    Attributes:
        mean: `[L, H, D]` float32, of L layers' H query heads.
        length: `[L, H, R / 2]` float32, the mean length of each rotated pair of channels.
    """

    mean: torch.Tensor
    length: torch.Tensor

    @classmethod
    def read(cls, name: str) -> Centres:
        """Read a file; ValueError: it is unreadable, or holds something else."""
        import numpy as np
        import torch

        try:
            with np.load(Path(name).expanduser(), allow_pickle=False) as data:
                found = cls(*(torch.from_numpy(np.float32(data[key])) for key in _ARRAYS))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"cannot read the centres of queries in {name}: {error}") from error
        mean, length = found
        fits = mean.ndim == length.ndim == 3 and mean.shape[:2] == length.shape[:2]
        if not fits or not 0 < 2 * length.shape[2] <= mean.shape[2]:
            raise ValueError(
                f"{name} holds centres of shape {list(mean.shape)} and lengths of shape "
                f"{list(length.shape)}: write it with python -m lab.heads.queries"
            )
        if not (mean.isfinite().all() and length.isfinite().all()):
            raise ValueError(f"{name} holds a number that is not finite")
        return found

    def write(self, path: Path, **more: Any) -> None:
        import numpy as np

        np.savez(path, mean=self.mean.numpy(), length=self.length.numpy(), **more)


@lru_cache(maxsize=1024)  # layers
def _centres(name: str, layer: int, device: torch.device) -> Centres:
    from vllm_pyramid.step.upload import upload

    return Centres(*(upload(array[layer].numpy(), device) for array in _all_centres(name)))


@lru_cache(maxsize=2)
def _all_centres(name: str) -> Centres:
    return Centres.read(name)


class TriAttentionScorer(Scorer):
    """TriAttention: keep the keys that average queries will attend to from ahead.

    Scores a key k by the sum over the rotated pairs f of Re(q_f conj(k_f)) + (E|q_f| - |q_f|)|k_f|,
    with the centre q rotated to the next position plus 1, 2, 4 ... `farthest` and averaged over
    these (arXiv:2604.04921). The first part is what the centre gives, the second what queries give
    that spread around it. Of the query heads of a group the largest counts.

    Attributes:
        centres: the file that `python -m lab.heads.queries` has written for the model.
        farthest: no offset ahead is larger.
        normalize: whether each query head's scores are taken less their mean and by their standard
            deviation before the largest is taken, as the authors evaluate it.
    """

    in_parts: ClassVar[bool] = True
    needs_rotary: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True
    kind: Literal["triattention"] = "triattention"
    centres: str | None = None
    farthest: int = Field(default=65536, ge=1, lt=2**31)
    normalize: bool = True

    @field_validator("centres")
    @classmethod
    def _is_absolute(cls, value: str | None) -> str | None:
        """Find the same file from every process's folder."""
        return None if value is None else str(Path(value).expanduser().absolute())

    def floats_per_key(self, policy: Policy, head_size: int, group: int) -> int:
        return 3 * head_size + 4 * group

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch

        assert self.centres is not None, "refused before anything is loaded"
        centres = _centres(self.centres, inputs.layer, inputs.keys.device)
        first = inputs.first_kv_head * inputs.group
        heads = slice(first, first + inputs.num_query_heads)
        of_groups = inputs.num_kv_heads, inputs.group
        mean, length = (array[heads].unflatten(0, of_groups) for array in centres)
        keys, rotary = inputs.keys, inputs.rotary
        turned, scores = mean, torch.zeros(())
        if rotary is not None:
            doublings = torch.arange(self.farthest.bit_length(), device=keys.device)
            turned = rotary.mean_turn_ahead(mean, inputs.last_position + 1, 2**doublings)
            _, factor = rotary.frequencies
            spread = factor * (length - rotary.lengths(mean))
            scores = spread @ rotary.lengths(keys).transpose(1, 2)
        scores = turned @ keys.transpose(1, 2) + scores
        if self.normalize:
            deviation = scores.std(dim=-1, correction=0, keepdim=True).clamp(min=1e-6)
            scores = (scores - scores.mean(dim=-1, keepdim=True)) / deviation
        return scores.amax(dim=1)

    def probed(self, inputs: ScorerInputs) -> None:
        """Return None: centres are a model's, and the request is made up."""

    @property
    def unsupported(self) -> Unsupported:
        return {
            **super().unsupported,
            Feature.OTHER_LAYERS: (
                "its centres are of the model's own layers, and those that evict are counted alone"
            ),
        }

    def check(self, policy: Policy) -> None:
        super().check(policy)
        if policy.heads.splits:
            raise ValueError(
                f"policy {policy.name!r} has lengths per KV head (heads), each counted as a "
                f"layer, and its scorer {self.kind!r} finds centres by layers: choose another, "
                "such as observation_window"
            )

    def prepare_args(self, policy: Policy, args: EngineArgs) -> None:
        if self.centres is None:
            raise ValueError(
                f"policy {policy.name!r} scores by the queries that a model has on average: "
                "measure them, in a checkout, with python -m lab.heads.queries --model MODEL "
                "--prompts FILE.jsonl -o centres.npz, and add --kv-policy-args "
                '\'{"centres": "centres.npz"}\''
            )
        Centres.read(self.centres)

    def check_config(self, policy: Policy, config: VllmConfig) -> None:
        assert self.centres is not None
        model, parallel = config.model_config, config.parallel_config
        heads = model.get_num_attention_heads(parallel) * parallel.tensor_parallel_size
        wanted = [model.get_total_num_hidden_layers(), heads, model.get_head_size()]
        found = list(Centres.read(self.centres).mean.shape)
        if found != wanted:
            raise ValueError(
                f"{self.centres} is for {found[0]} layers of {found[1]} query heads of "
                f"{found[2]}, and this model has {wanted[0]} of {wanted[1]} of {wanted[2]}: take "
                "the centres of this model"
            )
