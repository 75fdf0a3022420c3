# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.certified`, from a checkout."""

import sys

from lab.certified.command import main

if __name__ == "__main__":
    sys.exit(main())
