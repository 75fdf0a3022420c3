# SPDX-License-Identifier: Apache-2.0
"""The quality bench, `vllm-pyramid eval`: what eviction costs, measured through the engine."""
