#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# vLLM's own load generator against a server with a policy, with a budget of the requests' own.
#
#   examples/bench_serve.sh http://localhost:8000 MODEL [further arguments of vllm bench serve]
set -euo pipefail
url=$1 model=$2
shift 2
exec vllm bench serve --base-url "$url" --model "$model" --backend openai \
    --dataset-name random --random-input-len "${INPUT:-4096}" --random-output-len "${OUTPUT:-128}" \
    --num-prompts "${PROMPTS:-64}" --extra-body "{\"vllm_xargs\": {\"kv_budget\": \"${BUDGET:-12%}\"}}" "$@"
