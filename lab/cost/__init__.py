# SPDX-License-Identifier: Apache-2.0
"""What memory and arithmetic allow, on paper: `python -m lab.cost`."""
