# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.eval`, from a checkout."""

import sys

from lab.eval.command import main

if __name__ == "__main__":
    sys.exit(main())
