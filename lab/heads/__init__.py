# SPDX-License-Identifier: Apache-2.0
"""What masks of KV heads cost a model, and probes for them: `python -m lab.heads`."""
