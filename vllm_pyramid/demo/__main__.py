# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_pyramid.demo`: what `make demo` runs."""

import sys

from vllm_pyramid.demo.run import main

sys.exit(main())
