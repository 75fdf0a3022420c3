# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid calibrate --utility`: a profile of what the tokens of each layer are worth later.

model.py     run a prompt and its answer, and measure each token's utility in each layer
profile.py   from utilities in a scorer's order to the lengths of layers at each budget
command.py   the command: prompts in, a policy with the allocator `utility` out
"""
