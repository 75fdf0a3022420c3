# SPDX-License-Identifier: Apache-2.0
"""Throughput, capacity and latency, measured side by side: `vllm-pyramid bench`."""
