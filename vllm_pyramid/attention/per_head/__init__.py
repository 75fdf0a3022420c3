# SPDX-License-Identifier: Apache-2.0
"""Attention where each KV head has a block table and a length: a *lane* of its layer.

`kv_cache/head_layout.py` is the scheduler's side.
"""
