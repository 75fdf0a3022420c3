#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A server on which every layer of the model has its own KV budget.
#
#   examples/server.sh MODEL [further flags of vllm serve]
#   examples/server.sh "$(vllm-pyramid model built-in)" --kv-trace traces
#
# Then, in another shell: python examples/client.py
set -euo pipefail

if (($# == 0)); then
    echo "usage: $0 MODEL [further flags of vllm serve]" >&2
    exit 2
fi
model=$1
shift
# The recommended policy; 12 % of each prompt, and never less than 256 tokens. A flag that is given
# again wins.
exec vllm serve "$model" --kv-policy auto --kv-budget 12% --kv-min-tokens 256 "$@"
