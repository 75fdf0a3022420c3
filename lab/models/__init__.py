# SPDX-License-Identifier: Apache-2.0
"""Small real models for tests and studies, without a hub: `python -m lab.models`."""
