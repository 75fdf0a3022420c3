# SPDX-License-Identifier: Apache-2.0
"""What is not needed to serve: bench, eval, calibrate, budgets, demo, models, the command line."""
