#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Two engines that prefill and two that decode, on this machine, behind a router (docs/disaggregated.md).
#
#   examples/disaggregated.sh MODEL [further flags of vllm serve]
#
# The router listens on PORT (8000), the engines on the four ports behind it. States travel through FOLDER, in
# memory. Several GPUs: DEVICES="0 1 2 3" gives each engine one.
set -euo pipefail

if (($# == 0)); then
    echo "usage: $0 MODEL [further flags of vllm serve]" >&2
    exit 2
fi
model=$1
shift
here=$(dirname "$0") port=${PORT:-8000} folder=${FOLDER:-/dev/shm/kv-states-$$}
read -ra devices <<<"${DEVICES:-}"
engines=()
trap 'exit 143' INT TERM
trap 'kill "${engines[@]}" 2>/dev/null; wait; rm -rf "$folder"' EXIT

start() { # ROLE NUMBER
    local role=$1 number=$2
    shift 2
    if ((${#devices[@]})); then export CUDA_VISIBLE_DEVICES=${devices[number - 1]}; fi
    vllm serve "$model" --port $((port + number)) --kv-policy auto --kv-budget 12% --kv-min-tokens 256 \
        --kv-transfer-config "{\"kv_connector\": \"PyramidConnector\", \"kv_role\": \"$role\",
            \"kv_connector_extra_config\": {\"folder\": \"$folder\"}}" "$@" &
    engines+=($!)
}
for number in 1 2; do start kv_producer "$number" "$@"; done
for number in 3 4; do start kv_consumer "$number" "$@"; done
for number in 1 2 3 4; do
    until curl -sf "http://127.0.0.1:$((port + number))/health" >/dev/null; do
        kill -0 "${engines[number - 1]}" # it has ended
        sleep 1
    done
done
echo "all engines answer; the router is at http://127.0.0.1:$port"
python3 "$here/disaggregated_router.py" --port "$port" \
    --prefill "http://127.0.0.1:$((port + 1))" "http://127.0.0.1:$((port + 2))" \
    --decode "http://127.0.0.1:$((port + 3))" "http://127.0.0.1:$((port + 4))" &
engines+=($!)
wait -n # the first that ends, ends all
