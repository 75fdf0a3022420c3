# SPDX-License-Identifier: Apache-2.0
"""The front end, in the API server's process: flags, settings, refusals and metrics."""
