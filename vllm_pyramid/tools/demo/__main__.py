# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_pyramid.tools.demo`: what `make demo` runs."""

import sys

from vllm_pyramid.tools.demo.run import main

sys.exit(main())
