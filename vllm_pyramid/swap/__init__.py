# SPDX-License-Identifier: Apache-2.0
"""V in host memory: the pool that mirrors the device's, its size, and what is moved.

    device page b  [ K of 2 N tokens ]    host page b  [ V of the same 2 N tokens ]

Both pools are addressed by one block table, so V needs no accounting of its own: host page b is in
use exactly while device page b belongs to a layer without V on the device.
"""
