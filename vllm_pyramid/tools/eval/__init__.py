# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid eval`: a policy against the whole cache, measured through the engine."""
