# SPDX-License-Identifier: Apache-2.0
"""Attention back ends of a worker, the block tables they read, and the eviction behind a layer."""
