# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.heads`, from a checkout."""

import sys

from lab.heads.command import main

if __name__ == "__main__":
    sys.exit(main())
