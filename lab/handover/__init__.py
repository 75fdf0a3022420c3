# SPDX-License-Identifier: Apache-2.0
"""What it costs and saves to prefill in one engine and to decode in another."""
