# SPDX-License-Identifier: Apache-2.0
"""Agents with tools, recorded or made up, against stock vLLM and policies."""
