# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid doctor`: what is installed, what a policy will run on, and what is missing."""
