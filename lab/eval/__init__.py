# SPDX-License-Identifier: Apache-2.0
"""Tasks over policies and budgets, measured through the engine: `python -m lab.eval`."""
