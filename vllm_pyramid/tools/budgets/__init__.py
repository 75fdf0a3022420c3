# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid budgets`: what a policy keeps of a prompt, without an engine."""
