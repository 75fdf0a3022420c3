# SPDX-License-Identifier: Apache-2.0
"""Policies and stock vLLM side by side at equal cache memory: `vllm-pyramid bench`."""
