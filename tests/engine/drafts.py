# SPDX-License-Identifier: Apache-2.0
"""Tiny models and what drafts for them: EAGLE heads, an MTP module, models of fewer layers.

The first layer says most in these models. So whoever knows that layer is right now and then: that
is what all the drafts are made of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engine.models import write_model
from tests.engine.support import Engine

if TYPE_CHECKING:
    import torch

# Of what layers behind the first add.
_SHARE = 0.3


def write_target(folder: Path, shape: str = "llama-mha") -> Path:
    """A model whose first layer says most."""
    write_model(shape, folder)
    weights = _weights(folder)
    for name in weights:
        if ("o_proj" in name or "down_proj" in name) and ".layers.0." not in name:
            weights[name] *= _SHARE
    return _save(folder, weights, _config(folder))


def write_small_model(folder: Path, target: Path, layers: int) -> Path:
    """The first layers of a model, as a model."""
    weights = {
        name: weight
        for name, weight in _weights(target).items()
        if ".layers." not in name or int(name.split(".")[2]) < layers
    }
    return _save(folder, weights, {**_config(target), "num_hidden_layers": layers})


def write_eagle(folder: Path, target: Path) -> Path:
    """An EAGLE head that looks at tokens alone: the target's first layer.

    It has no norm at its input, so embeddings are scaled as the norm would on average, and what
    the layer adds to them likewise.
    """
    import torch

    weights = _weights(target)
    embeddings = weights["model.embed_tokens.weight"]
    size = embeddings.pow(2).mean().sqrt()
    identity = torch.eye(embeddings.shape[1])
    head = {
        "embed_tokens.weight": embeddings,
        "fc.weight": torch.cat([identity / size, torch.zeros_like(identity)], dim=1),
    }
    for name, weight in weights.items():
        if name.startswith("model.layers.0.") and "input_layernorm" not in name:
            adds = "o_proj" in name or "down_proj" in name
            head[name.removeprefix("model.")] = weight / size if adds else weight
    return _save(folder, head, {**_config(target), "num_hidden_layers": 1})


def write_eagle3(folder: Path, target: Path) -> Path:
    """An EAGLE-3 head of two layers that looks at tokens alone: the second is the target's first.

    The first one's attention hands on the embeddings: its queries and keys are the embeddings times
    so much that each token sees itself alone. It is given the hidden states of three of the
    target's layers, as these heads are, and multiplies them with 0.
    """
    import torch

    weights, config = _weights(target), _config(target)
    embeddings = weights["model.embed_tokens.weight"]
    width = embeddings.shape[1]
    assert width == config["num_key_value_heads"] * config["head_dim"], "every head has keys"
    size = embeddings.pow(2).mean().sqrt()
    identity, zeros = torch.eye(width), torch.zeros(width, width)
    ones = torch.ones(width)
    head = {
        "embed_tokens.weight": embeddings,
        "lm_head.weight": weights.get("lm_head.weight", embeddings),
        "norm.weight": weights["model.norm.weight"],
        "fc.weight": torch.zeros(width, 3 * width),
        "layers.0.hidden_norm.weight": ones,
        "layers.1.hidden_norm.weight": ones.clone(),  # that nobody uses
        "layers.0.input_layernorm.weight": ones.clone(),
        "layers.0.self_attn.q_proj.weight": torch.cat([8 * identity, zeros], dim=1),
        "layers.0.self_attn.k_proj.weight": torch.cat([8 * identity, zeros], dim=1),
        "layers.0.self_attn.v_proj.weight": torch.cat([identity, zeros], dim=1),
        "layers.0.self_attn.o_proj.weight": identity * size,
    }
    for name, weight in weights.items():
        if name.startswith("model.layers.0."):
            inner = name.removeprefix("model.layers.0.")
            head[f"layers.1.{inner}"] = weight
            if inner.startswith(("mlp.", "post_attention")):
                head[f"layers.0.{inner}"] = weight * ("down_proj" not in inner)
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 2,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }
    return _save(folder, head, {**config, **own})


def write_mtp_model(folder: Path) -> Path:
    """A model with one MTP module, as MiMo has them: its first layer once more."""
    import torch

    target = write_target(folder, "qwen2")
    weights = _weights(target)
    ones = torch.ones_like(weights["model.norm.weight"])
    identity = torch.diag(ones)
    weights |= {
        name.replace("model.layers.0.", "model.mtp_layers.0."): weight.clone()
        for name, weight in weights.items()
        if name.startswith("model.layers.0.")
    }
    weights |= {
        "model.mtp_layers.0.token_layernorm.weight": ones,
        "model.mtp_layers.0.hidden_layernorm.weight": ones.clone(),
        "model.mtp_layers.0.final_layernorm.weight": ones.clone(),
        "model.mtp_layers.0.input_proj.weight": torch.cat(
            [torch.zeros_like(identity), identity], dim=1
        ),
    }
    own = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return _save(folder, weights, {**_config(target), **own})


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return weights


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _save(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def count_drafts(engine: Engine) -> dict[str, int]:
    """Counts `drafted` and `accepted` tokens from now on."""
    count = {"drafted": 0, "accepted": 0}
    original = engine.scheduler.make_spec_decoding_stats

    def make(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **kwargs: Any) -> Any:
        count["drafted"] += num_draft_tokens
        count["accepted"] += num_accepted_tokens
        return original(stats, num_draft_tokens, num_accepted_tokens, **kwargs)

    engine.scheduler.make_spec_decoding_stats = make
    return count
