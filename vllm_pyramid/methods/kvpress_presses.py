# SPDX-License-Identifier: Apache-2.0
"""Presses of NVIDIA's kvpress as scorers: the press's own code, on what a step has.

    scorer: {kind: kvpress, press: SnapKVPress, settings: {window_size: 32}}

A press scores from a layer's module and the hidden states of a prompt. Here it gets a stand-in: its
projection returns the queries of the observation window, and its rotary embedding that of the
layer. So presses that look at keys, values and recent queries run as they are; others are refused
by name (`REFUSED`).

kvpress's package replaces attention functions of Transformers when it is imported, and asks for
another version of it. So the modules of presses are imported past the package's own `__init__`.

    pip install --no-deps kvpress==0.5.5
    --kv-policy snapkv --kv-policy-args '{"window": 64, "scorer": {"kind": "kvpress",
        "press": "ExpectedAttentionPress"}}'

These run: `CURPress`, `CapPress`, `ExpectedAttentionPress`, `KeyDiffPress`, `KnormPress`,
`LagKVPress`, `LeverageScorePress`, `RandomPress`, `SnapKVPress`, `TOVAPress` (on a single rank).
They keep what kvpress keeps, index for index: lab/results/kvpress.md#presses-as-scorers. Budget,
window, sinks, allocator and selector are the policy's. Presses score whole prompts, so
`chunk.tokens`, turns that resume and evictions of generated tokens are refused. They run in
PyTorch, once a prompt and layer.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from vllm_pyramid.policy.capabilities import Declared, Feature
from vllm_pyramid.policy.kinds import did_you_mean
from vllm_pyramid.policy.scorer import Scorer

if TYPE_CHECKING:
    import torch

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.rotary import Rotary
    from vllm_pyramid.step.scorer_inputs import ScorerInputs

# The version whose presses were compared with ours, index for index.
VERSION = "0.5.5"
_HOW = f"pip install --no-deps kvpress=={VERSION}"


class Press(NamedTuple):
    """What a press looks at besides keys and values.

    `module` is of `kvpress.presses`; `plain_keys`: keys without rotary embedding; `heads`: it mixes
    all heads of a layer.
    """

    module: str
    queries: bool = False
    rotary: bool = False
    plain_keys: bool = False
    heads: bool = False


PRESSES: dict[str, Press] = {
    "CURPress": Press("cur_press"),
    "CapPress": Press("cap_press", queries=True, rotary=True),
    "ExpectedAttentionPress": Press("expected_attention_press", queries=True, rotary=True),
    "KeyDiffPress": Press("keydiff_press"),
    "KnormPress": Press("knorm_press"),
    "LagKVPress": Press("lagkv_press"),
    "LeverageScorePress": Press("leverage_press", plain_keys=True),
    "RandomPress": Press("random_press"),
    "SnapKVPress": Press("snapkv_press", queries=True),
    "TOVAPress": Press("tova_press", queries=True, heads=True),
}
_AGAIN = "it runs the prompt through the model again"
_WEIGHTS = "it loads weights that were trained for each model"
_ALL_QUERIES = "it needs the queries of the whole prompt, and a step has those of its chunk"
_WRAPS = "it changes what another press keeps; name that press"
_GENERATES = "it evicts while the answer is generated, which `schedule` does here"
_PER_HEAD = "it shares a layer's budget between KV heads, and here all heads keep as many tokens"
REFUSED: dict[str, str] = {
    "AdaKVPress": _PER_HEAD,
    "BasePress": "it is a base class",
    "BlockPress": _WRAPS,
    "CAMPress": "it merges values of evicted tokens into others",
    "ChunkKVPress": "it keeps whole chunks of tokens, which is no score of tokens",
    "ChunkPress": _WRAPS,
    "CompactorPress": _ALL_QUERIES,
    "ComposedPress": _WRAPS,
    "CompressionRatioDecodingPress": _GENERATES,
    "CriticalAdaKVPress": _PER_HEAD,
    "CriticalKVPress": "it needs the layer's output projection",
    "DMSPress": "it evicts by a threshold of scores, so the budget would not be known",
    "DecodingPress": _GENERATES,
    "DuoAttentionPress": "it keeps all tokens of some heads and few of others",
    "EntropyGatedChunkKVPress": "it keeps whole chunks of tokens, which is no score of tokens",
    "ExpectedAttentionStatsPress": _WEIGHTS,
    "FastKVzipPress": _WEIGHTS,
    "FinchPress": "it needs a delimiter between context and question, and moves keys",
    "KVComposePress": _AGAIN,
    "KVgradPress": _AGAIN,
    "KVzapPress": _WEIGHTS,
    "KVzipPress": _AGAIN,
    "KeyRerotationPress": "it moves keys to other positions",
    "LUKVPress": "it divides the budget between heads by an offline profile",
    "MergingPress": "it merges evicted tokens into others",
    "NonCausalAttnPress": _ALL_QUERIES,
    "ObservedAttentionPress": "it needs the attention of all queries: use the policy h2o",
    "PerLayerCompressionPress": "it divides the budget between layers, which `allocator` does here",
    "PrefillDecodingPress": _GENERATES,
    "PyramidKVPress": "it divides the budget between layers: use SnapKVPress and `allocator: "
    "arithmetic`",
    "QFilterPress": _WEIGHTS,
    "RestoreKVPress": _AGAIN,
    "ScorerPress": "it is a base class",
    "SimLayerKVPress": "it chooses whole layers that keep little",
    "StreamingLLMPress": "its scores need the number of tokens that are evicted: use the scorer "
    "recency",
    "ThinKPress": "it drops channels of keys, not tokens",
}


class KvpressScorer(Scorer):
    """A scorer press of kvpress 0.5.5, which must be installed.

    Statistics that a press takes over all the prompt's queries are those of the window's last
    queries here, since a long prompt is computed in chunks. Presses that draw random numbers draw
    the same ones for each request and layer.

    Attributes:
        press: the name of its class.
        settings: its parameters, as kvpress names them; `compression_ratio` is the budget's.
    """

    needs_positions: ClassVar[bool] = True
    kind: Literal["kvpress"] = "kvpress"
    press: str
    settings: dict[str, bool | int | float | str] = Field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.press, self._written))

    @property
    def _written(self) -> str:
        return json.dumps(self.settings, sort_keys=True)

    @property
    def _needs(self) -> Press:
        return PRESSES.get(self.press, Press(""))

    @property
    def needs_queries(self) -> bool:  # type: ignore[override]
        return self._needs.queries

    @property
    def needs_rotary(self) -> bool:  # type: ignore[override]
        return self._needs.rotary or self._needs.plain_keys

    def check(self, policy: Policy) -> None:
        if (reason := REFUSED.get(self.press)) is not None:
            raise ValueError(f"kvpress's {self.press} cannot be a scorer here: {reason}")
        if self.press not in PRESSES:
            raise ValueError(
                f"unknown press {self.press!r}{did_you_mean(self.press, [*PRESSES, *REFUSED])}; "
                f"presses that can be scorers: {', '.join(PRESSES)}"
            )
        super().check(policy)
        window = getattr(_make(self.press, self._written), "window_size", 1)
        if self._needs.queries and policy.window < window:
            raise ValueError(
                f"policy {policy.name!r}: {self.press} looks at {window} queries, which the window "
                f"of {policy.window} does not have: set `window` to at least as many, or its "
                "window_size to fewer"
            )

    @property
    def unsupported(self) -> Declared:
        found: Declared = {}
        if self._needs.heads:
            found[Feature.TENSOR_PARALLEL] = "it takes the mean over all heads, which ranks divide"
        if self._needs.queries:
            found[Feature.SOFT_CAP] = "it computes attention without the cap"
        return found

    def floats_per_key(self, policy: Policy, head_size: int, group: int) -> int:
        rows = policy.window if self.needs_queries else 0
        return 6 * head_size * (group + 1) + 4 * group * rows

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        import torch

        press, needs, heads = _make(self.press, self._written), self._needs, inputs.num_query_heads
        if needs.queries and inputs.logit_sinks is not None:
            raise ValueError(f"{self.press} knows no learned sinks, which this layer has")
        keys, values = inputs.keys[None].contiguous(), inputs.values[None].contiguous()
        hidden, cos, sin = torch.zeros(1, 1, 1, device=keys.device), None, None
        rotary = _RotaryModule(inputs.rotary, inputs.head_size)
        if needs.queries:
            queries = (
                inputs.unrotated_queries() if needs.rotary else inputs.window_queries()
            )  # [W, H, D]
            # Presses divide by the square root of D, whatever the layer does.
            queries = queries * (inputs.scale * inputs.head_size**0.5)
            # Presses leave the first rows out, as sinks; SnapKV's asks for more than its window.
            front = getattr(press, "n_sink", 1)
            hidden = torch.nn.functional.pad(queries.flatten(1), (0, 0, front, 0))[None]
            # What a press takes for the first position behind the prompt is so for the layer.
            rotary.offset = inputs.last_position + 1 - hidden.shape[1]
            # Queries of the window are rotated already where the press would rotate them.
            cos = torch.ones(1, hidden.shape[1], inputs.head_size, device=keys.device)
            sin = torch.zeros_like(cos)
        elif needs.plain_keys:
            plain = inputs.keys.transpose(0, 1)
            if inputs.rotary is not None:
                plain = inputs.rotary.turn_back(plain, inputs.places)
            hidden = plain.flatten(1)[None]
        module = SimpleNamespace(
            config=SimpleNamespace(
                num_attention_heads=heads,
                num_key_value_heads=inputs.num_kv_heads,
                num_hidden_layers=inputs.num_layers,
            ),
            layer_idx=inputs.layer,
            head_dim=inputs.head_size,
            num_key_value_groups=inputs.group,
            q_proj=torch.nn.Identity(),
            k_proj=torch.nn.Identity(),
            rotary_emb=rotary,
        )
        with _seeded(keys.device, inputs.layer):
            found = press.score(
                module, hidden, keys, values, None, {"position_embeddings": (cos, sin)}
            )
        scores: torch.Tensor = found[0].float()
        return scores


class _RotaryModule:
    """The rotary embedding of a layer as presses call it: `[1, n]` positions to `[1, n, D]`."""

    def __init__(self, rotary: Rotary | None, size: int) -> None:
        self.offset, self._rotary, self._size = 0, rotary, size

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        import torch

        if self._rotary is None:
            ones = torch.ones(*positions.shape, self._size, device=x.device)
            return ones, torch.zeros_like(ones)
        known = (positions + self.offset).clamp(max=len(self._rotary.cos_sin) - 1)
        cos, sin = self._rotary.at(known)
        if not self._rotary.halves or 2 * cos.shape[-1] != self._size:
            raise ValueError(
                "kvpress rotates all channels of a head by halves, and this layer's rotary "
                "embedding does not: use a scorer of ours"
            )
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draw the same random numbers in each call, and leave the generators as they were."""
    import torch

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def _import(module: str) -> ModuleType:
    """Import a module past the package's own `__init__`; ValueError: kvpress 0.5.5 is missing."""
    try:
        found = importlib.metadata.distribution("kvpress")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"a kvpress scorer needs kvpress: {_HOW}") from None
    if found.version != VERSION:
        raise ValueError(
            f"a kvpress scorer needs kvpress {VERSION}, with which presses were compared, and "
            f"{found.version} is installed: {_HOW}"
        )
    name = f"kvpress.presses.{module}"
    if name in sys.modules:  # the user's program has imported the package
        return sys.modules[name]
    is_whole = "kvpress" in sys.modules
    if not is_whole:
        package = ModuleType("kvpress")
        package.__path__ = [str(found.locate_file("kvpress"))]
        sys.modules["kvpress"] = package
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"kvpress's {module} cannot be imported: {error}") from error
    finally:
        if not is_whole:  # who imports the package later gets the whole one
            for loaded in [key for key in sys.modules if key.split(".")[0] == "kvpress"]:
                del sys.modules[loaded]


@lru_cache(maxsize=32)
def _make(press: str, settings: str) -> Any:
    """Return a press with its settings; ValueError for an unknown one, or one that it refuses."""
    import dataclasses

    cls = getattr(_import(PRESSES[press].module), press)
    values = json.loads(settings)
    valid = [field.name for field in dataclasses.fields(cls) if field.init]
    valid = [name for name in valid if name != "compression_ratio" and not name.startswith("_")]
    for name in values:
        if name == "compression_ratio":
            raise ValueError(f"{press}: compression_ratio is what kv_budget says: leave it out")
        if name not in valid:
            raise ValueError(
                f"unknown setting {name!r} of {press}{did_you_mean(name, valid)}; "
                f"valid settings: {', '.join(valid) or 'none'}"
            )
    try:
        return cls(**values)
    except Exception as error:
        raise ValueError(f"{press} refuses its settings: {error}") from error
