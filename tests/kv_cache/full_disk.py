# SPDX-License-Identifier: Apache-2.0
"""A disk with little room."""

from __future__ import annotations

import errno
import os
from typing import Any


class FullDisk:
    """A file, open to be written, on a disk that is full after 700 bytes."""

    def __init__(self, file: Any) -> None:
        self.file, self.left = file, 700

    def write(self, data: memoryview) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written: int = self.file.write(data[: self.left])
        self.left -= written
        return written
