#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Write a policy whose lengths fit your own prompts: solve each prompt, average, keep the shares.
#
#   examples/calibrate.sh MODEL PROMPTS.jsonl OUTPUT.yaml [further flags of vllm-pyramid calibrate]
#
# PROMPTS.jsonl has a JSON object a line: {"prompt": "..."} or {"prompt_token_ids": [...]}.
set -euo pipefail

if (($# < 3)); then
    echo "usage: $0 MODEL PROMPTS.jsonl OUTPUT.yaml [further flags of vllm-pyramid calibrate]" >&2
    exit 2
fi
model=$1 prompts=$2 output=$3
shift 3

vllm-pyramid calibrate --model "$model" --prompts "$prompts" --kv-budget 12% -o "$output" "$@"
vllm-pyramid budgets --model "$model" --prompt-len 1024 --kv-policy "$output"
echo "now: vllm serve $model --kv-policy $output"
