# SPDX-License-Identifier: Apache-2.0
"""Triton kernels and their launchers (`*_launch.py`); `functions.py` is the back end."""
