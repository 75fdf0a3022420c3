#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A server on which every layer of the model has its own KV budget.
#
#   examples/server.sh MODEL [further flags of vllm serve]
#   examples/server.sh "$(vllm-pyramid demo-model)" --kv-trace traces
#
# Then, in another shell: python examples/client.py
set -euo pipefail

if (($# == 0)); then
    echo "usage: $0 MODEL [further flags of vllm serve]" >&2
    exit 2
fi
model=$1
shift
# 256 tokens of each prompt, averaged over layers and KV heads. A flag that is given again wins.
exec vllm serve "$model" --kv-policy pyramidkv --kv-budget 256 "$@"
