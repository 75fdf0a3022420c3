# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels and the functions that launch them."""
