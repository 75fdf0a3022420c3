# SPDX-License-Identifier: Apache-2.0
"""The front end: flags and settings, what is refused, and the metrics.

Runs in the API server's process, before a request reaches the engine. Imports `policy`, `plan` and
`compat`; knows neither blocks nor attention.
"""
