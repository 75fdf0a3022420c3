# SPDX-License-Identifier: Apache-2.0
"""The worker's side of eviction.

Retention (which request keeps what) -> Step (this step: skips of all layers, prompts
that end) -> backend metadata (one layer's view) -> attention -> evict_layer -> trace
"""
