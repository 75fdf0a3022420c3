# SPDX-License-Identifier: Apache-2.0
"""Long answers that can be checked line by line."""
