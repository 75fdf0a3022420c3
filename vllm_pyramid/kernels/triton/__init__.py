# SPDX-License-Identifier: Apache-2.0
"""Triton kernels and their launchers; `functions.py` is the back end.

`*_launch.py` hold launchers, which check on the host and choose tiles (`tiles.py`); the modules
without the suffix hold the kernels. `device_functions.py` holds what several kernels share.
"""
