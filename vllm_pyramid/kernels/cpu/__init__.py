# SPDX-License-Identifier: Apache-2.0
"""Launchers of the C++ kernels in `csrc/cpu`; `functions.py` is the back end."""
