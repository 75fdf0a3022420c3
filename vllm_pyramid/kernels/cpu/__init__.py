# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels and the functions that call them."""
