# SPDX-License-Identifier: Apache-2.0
"""Keep settings that no compiled graph depends on out of torch.compile's key.

vLLM hashes all of `additional_config`, so each change of a budget would compile the model anew. It
asks an object with `compute_hash` instead, but not a dictionary, and some models read keys from it
as from a dictionary. The fingerprints of a measured cache size and of a server's answers use the
same hash: they still cover all settings.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig

from vllm_pyramid.compat.wrap import wrap


class SettingsWithKey(dict[str, Any]):
    """An `additional_config` whose hash covers only what compiled graphs depend on.

    It is a dictionary in all other respects. A copy made by `{**settings}` is an ordinary one, of
    which vLLM hashes everything.

    Attributes:
        of_graph: what is hashed, as JSON values.
    """

    of_graph: dict[str, Any]

    def __init__(self, settings: Mapping[str, Any], of_graph: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.of_graph = dict(of_graph)

    def compute_hash(self) -> str:
        """Return the hash of `of_graph`.

        An object with this function also survives when vLLM derives one configuration from another.
        """
        return hashlib.sha256(json.dumps(self.of_graph, sort_keys=True).encode()).hexdigest()


class _OfGraph:
    """What vLLM hashes in place of the settings: no dictionary, so it asks for the hash."""

    def __init__(self, settings: SettingsWithKey) -> None:
        self.compute_hash = settings.compute_hash


class _Whole:
    """A configuration whose hash covers all settings."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def compute_hash(self, include_version: bool = True) -> str:
        return _stock_hash(self._config, include_version)


_stock_hash = VllmConfig.compute_hash


def _hash_of_graph(stock: Any, self: VllmConfig, include_version: bool = True) -> Any:
    """Return vLLM's hash of a configuration, with that of `of_graph` for the settings."""
    if isinstance(settings := self.additional_config, SettingsWithKey):
        self = copy.copy(self)
        self.additional_config = _OfGraph(settings)
    return stock(self, include_version)


def _with_whole(function: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    return function(_Whole(vllm_config), *args, **kwargs)


def install() -> None:
    """Let vLLM hash `SettingsWithKey` by its `of_graph`. Idempotent."""
    from vllm.entrypoints.serve.utils import fingerprint
    from vllm.v1.worker import startup_plan

    wrap(startup_plan, "compute_plan_fingerprint", _with_whole)
    wrap(fingerprint, "build_system_fingerprint", _with_whole)
    wrap(VllmConfig, "compute_hash", _hash_of_graph)
