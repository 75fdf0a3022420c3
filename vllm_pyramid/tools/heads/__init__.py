# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid calibrate --heads`: which KV heads of a model have to look far back."""
