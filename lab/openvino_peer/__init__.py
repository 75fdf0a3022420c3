# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI beside this package, on the same cores."""
