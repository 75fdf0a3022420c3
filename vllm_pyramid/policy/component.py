# SPDX-License-Identifier: Apache-2.0
"""The parts of a policy, and the questions that every part answers.

A section of a preset is a mapping with a `kind` and the fields of that kind, or the kind alone.
Built-in kinds have short names; `kind: "package.module:ClassName"` uses a class of your own, which
must derive from the section's base class and be importable in every process of the engine.
"""

from __future__ import annotations

import inspect
import secrets
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from vllm_pyramid.policy.capabilities import Feature, Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.plan import Budget
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import LayerSpec, SchedulerHooks, WorkerContext, WorkerHooks


@dataclass(frozen=True)
class BlockExtras:
    """`num_bytes` that a part keeps beside each block of a layer, on the device and the host.

    `made_by`: what they depend on apart from the block's tokens, as JSON values. Files of blocks
    that were made by something else are not read.
    """

    num_bytes: int
    made_by: Any


@cache
def _digest_of(own: type) -> str:
    try:
        return sha256(Path(inspect.getfile(own)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return secrets.token_hex(16)  # no file has it


class Component(BaseModel):
    """Base of all parts: immutable, hashable, compared by value, unknown fields refused.

    Class attributes:
        section: the key of a preset that names such a part. kind: its name there; a class of your
            own that derives from a built-in class declares it again: `kind: str`.
        attends: hooks of this part attend, or choose what is attended to, in all steps. That is
            Python, which a captured graph of a whole step would leave out (`LayerHooks`).
        splits_at_prompt_end: no step may have tokens of the prompt and tokens behind it.
        copies_blocks: all of a block is in one page of the device, which is copied with it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    section: ClassVar[str]
    attends: ClassVar[bool] = False
    splits_at_prompt_end: ClassVar[bool] = False
    copies_blocks: ClassVar[bool] = True
    kind: str

    @classmethod
    def check_class(cls) -> None:
        """Raise ValueError if this class lacks what its section calls."""

    def check(self, policy: Policy) -> None:
        """Raise ValueError unless this part goes with the other parts of the policy."""

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError if this part cannot serve a model of `num_layers`."""

    def check_budget(self, policy: Policy, budget: Budget) -> None:
        """Raise ValueError if this part cannot work with the budget."""

    @property
    def unsupported(self) -> Unsupported:
        """Return which features do not work with this part, each with the reason, or `(reason,
        fix)`.

        A class adds to what its base classes say. The reason is a clause about this part ("it looks
        at ..."); what to do is by default the feature's own advice.
        """
        if not self.works_in_every_step:
            return {}
        return {
            Feature.DRAFTS: (
                "it evicts while it generates, which cannot be taken back when a draft is rejected",
                "choose a policy that evicts prompts, such as pyramidkv",
            )
        }

    @property
    def works_in_every_step(self) -> bool:
        """Return whether decode steps do more than attention because of this part."""
        return False

    @property
    def works_during_prompt(self) -> bool:
        """Return whether steps inside a prompt do more than attention because of this part."""
        return self.works_in_every_step

    @property
    def attends_in_graphs(self) -> bool:
        """Return whether decode steps of a part that attends may be captured as whole graphs.

        Its hooks then launch for a capture what each step wants launched, over tensors that each
        step writes before.
        """
        return False

    @property
    def approximates_answers(self) -> bool:
        """Return whether K and V of generated tokens are approximate: no other request finds
        them.
        """
        return self.splits_at_prompt_end

    @property
    def of_graph(self) -> Any:
        """Return what of this part a compiled graph of the model depends on, as JSON values.

        Compiled models are kept on disk by it; None: no graph depends on this part. Attention is
        one opaque operator, so this is so of all that happens in it. Hooks get the model, and those
        of your own class may change its forward pass: all fields of such a part count, unless it
        says otherwise.
        """
        is_own = ":" in self.kind and type(self).worker_hooks is not Component.worker_hooks
        return self.model_dump(mode="json") if is_own else None

    @property
    def source(self) -> str:
        """Return a hash of the file of a class of your own, "" for built-in kinds.

        Modules that the file imports do not count: where they change, stored states must go.
        Where there is no such file, each process has another hash.
        """
        return _digest_of(type(self)) if ":" in self.kind else ""

    @property
    def begins_evicted(self) -> bool:
        """Return whether requests may begin with another engine's survivors, without `kv_turns`."""
        return False

    @property
    def works_with_orders(self) -> bool:
        """Return whether evictions may come later than scores: by default if there are no hooks."""
        return type(self).worker_hooks is Component.worker_hooks

    @property
    def leaves_fronts(self) -> bool:
        """Return whether evictions leave blocks `in_place`: by default if there are no hooks."""
        return self.works_with_orders

    def prepare_args(self, policy: Policy, args: EngineArgs) -> None:
        """Check numbers in the engine's arguments, or set them, before vLLM has its defaults.

        ValueError: naming the flag to change.
        """

    def check_config(self, policy: Policy, config: VllmConfig) -> None:
        """Raise ValueError, naming the flag to change, for numbers that do not suit this part.

        Called in the front end alone: what it changes in `config` is seen by all processes.
        """

    def for_request(self, keys: dict[str, Any]) -> Component:
        """Return this part as a request wants it; ValueError for a wrong value.

        `keys` are the request's own for parts (`kv_top_n`, `kv_attend_budget`), types checked; pop
        what is yours. What is left over is refused.
        """
        return self

    def block_extras(self, layer: LayerSpec) -> BlockExtras | None:
        """Return what this part keeps beside each block of a layer, and the host cache with it; or
        None.

        The worker's hooks have the bytes (`CacheHooks.block_extras`).
        """
        return None

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks | None:
        """Return what this part does in a worker's steps, or None.

        The object derives from those classes of `step/hooks/` whose functions it overrides.
        """
        return None

    def scheduler_hooks(self, policy: Policy, num_layers: int) -> SchedulerHooks | None:
        """Return what this part does in the scheduler, or None."""
        return None
