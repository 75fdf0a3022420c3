# SPDX-License-Identifier: Apache-2.0
"""Load that rises and falls, with eviction always, under pressure, or not at all."""
