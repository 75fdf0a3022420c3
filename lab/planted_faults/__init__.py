# SPDX-License-Identifier: Apache-2.0
"""Ten faults of the core, and whether the tests find them."""
