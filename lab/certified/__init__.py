# SPDX-License-Identifier: Apache-2.0
"""Budgets whose disagreement with the whole cache is below a risk, with a set confidence."""
