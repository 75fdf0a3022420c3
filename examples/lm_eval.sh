#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A task of lm-evaluation-harness on a policy, by lm-eval's own command (pip install lm-eval).
#
#   examples/lm_eval.sh MODEL TASK [further arguments of lm_eval]
#
# The policy's settings are keys of additional_config. POLICY=full gives the whole cache's score. Only tasks
# that generate measure eviction.
set -euo pipefail
model=$1 task=$2
shift 2
policy="\"kv_policy\": \"${POLICY:-auto}\""
[[ "${POLICY:-auto}" == full ]] || policy+=", \"kv_budget\": \"${BUDGET:-12%}\", \"kv_min_tokens\": 0"
args="{\"pretrained\": \"$model\", \"max_model_len\": ${MAX_MODEL_LEN:-8192}"
args+=", \"additional_config\": {$policy}}"
exec lm_eval run --model vllm --model_args "$args" --tasks "$task" --batch_size auto "$@"
