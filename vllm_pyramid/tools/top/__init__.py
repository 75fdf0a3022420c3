# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid top`: live numbers of one or several servers in a terminal."""
