# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid show`: one HTML file with a prompt, shaded by what policies keep of it."""
