# SPDX-License-Identifier: Apache-2.0
"""The KV cache as the scheduler sees it: layers, pools, bundles of blocks, prefixes and sessions.

Imports `plan` and `compat`; never looks at scores and starts no request.
"""
