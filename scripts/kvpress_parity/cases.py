# SPDX-License-Identifier: Apache-2.0
"""What both sides of the comparison run: prompts as token ids, budgets, parameters.

Imported by `ours.py` in this project's environment and by `theirs.py` in kvpress's, so it needs
nothing but Python. `ours.py` writes the cases, the other two read them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Policies of ours that have a press.
POLICIES = ("streaming-llm", "snapkv", "pyramidkv")
SCORED = ("snapkv", "pyramidkv")
# The control: without eviction, both read the same model and decode alike.
FULL = "full"
# PyramidKVPress with its own budgets instead of ours; compared, but not expected to agree.
PUBLISHED = "pyramidkv-published"

CASES, AGREEMENT = "cases.json", "agreement.json"


@dataclass(frozen=True)
class Prompt:
    """One prompt. `kind`: the text or task it was made of; `name` is unique."""

    name: str
    kind: str
    token_ids: list[int]


@dataclass(frozen=True)
class Cases:
    """Everything that is to be equal on both sides.

    Attributes:
        model: folder of the model. versions: hash of its files and of our code.
        dtype: of weights, cache and arithmetic.
        window: observation window in tokens. kernel_size: of the average pooling.
        sinks: of streaming-llm. beta: of pyramidkv.
        percents: budgets in per cent of each prompt, rounded to whole tokens by `budget`.
        max_tokens: greedy tokens after the prompt.
        layer_counts: tokens that pyramidkv keeps of each layer, by `counts_key`.
    """

    model: str
    versions: str
    dtype: str
    window: int
    kernel_size: int
    sinks: int
    beta: float
    percents: list[float]
    max_tokens: int
    prompts: list[Prompt]
    layer_counts: dict[str, list[int]]

    def budget(self, prompt: Prompt, percent: float) -> int:
        """Tokens kept per KV head, averaged over the layers, window and sinks included."""
        tokens = round(len(prompt.token_ids) * percent / 100)
        if tokens < max(self.window, self.sinks) + 1:
            raise ValueError(
                f"{percent} % of the {len(prompt.token_ids)} tokens of {prompt.name} is {tokens}: "
                f"the window of {self.window} and {self.sinks} sinks leave nothing to choose"
            )
        return tokens

    def write(self, folder: Path) -> None:
        """Into `folder`, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CASES).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Cases:
        """From where `write` put them."""
        data: dict[str, Any] = json.loads((folder / CASES).read_text(encoding="utf-8"))
        data["prompts"] = [Prompt(**prompt) for prompt in data["prompts"]]
        return cls(**data)


def counts_key(percent: float, prompt: Prompt) -> str:
    """Name of an entry of `Cases.layer_counts`."""
    return f"{percent:g}/{prompt.name}"


def ours_file(policy: str) -> str:
    """Name of the file with our arrays of a policy."""
    return f"ours-{policy}.npz"


def theirs_file(policy: str) -> str:
    """Name of the file with kvpress's arrays of a policy, or of `PUBLISHED`."""
    return f"theirs-{policy}.npz"


def key(policy: str, percent: float, prompt: Prompt, what: str) -> str:
    """Name of an array in the files of either side.

    `what` is `kept_<layer>` (`[KV heads, kept]` int32, ascending), `tokens` (`[max_tokens]` int32)
    or, on kvpress's side, `margins` (`[max_tokens]` float32: by how much the best logit led),
    `scores_<layer>` (`[KV heads, prompt]` float32) and `by_beta` (`[layers]` int32).
    """
    return f"{policy}/{percent:g}/{prompt.name}/{what}"
