# SPDX-License-Identifier: Apache-2.0
"""Register our KV connector with vLLM, once even if the plugin is loaded twice."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def install(name: str, module: str) -> None:
    """Register the class `name` of a module, which is loaded when an engine uses it. Idempotent."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)
