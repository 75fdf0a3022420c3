#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Do our policies keep the tokens that kvpress's presses keep? Runs both on the same prompts and
# compares them; see docs/results/kvpress.md. Further arguments go to ours.py.
#
#   scripts/kvpress_parity/run.sh                              the built-in model
#   scripts/kvpress_parity/run.sh --model PATH --samples 3     another one, three times the prompts
#   OUT=FOLDER KVPRESS_VENV=FOLDER scripts/kvpress_parity/run.sh
#
# kvpress 0.5.5 needs transformers 4.57, vLLM 0.32 needs 5.x: kvpress gets an environment of its own,
# made on the first run (build/kvpress-venv unless KVPRESS_VENV says where; about 1.3 GB).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly HERE=scripts/kvpress_parity
readonly PY="${PYTHON:-.venv/bin/python}"
readonly VENV="${KVPRESS_VENV:-build/kvpress-venv}"
readonly OUT="${OUT:-build/kvpress-parity}"
readonly TORCH=2.13.0
readonly KVPRESS=0.5.5
readonly TRANSFORMERS="4.57.*"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

if ! "$VENV/bin/python" -c "import kvpress, transformers, torch" 2>/dev/null; then
    echo "==> creating $VENV"
    "$PY" -m uv venv --quiet --clear --python "$PY" "$VENV"
    # pip, not uv: pip follows the machine's own configuration, which may point to a CPU build.
    "$PY" -m pip --python "$VENV/bin/python" install --quiet --disable-pip-version-check \
        "torch==$TORCH"
    # pip's torch must stay, and text models need none of its three companions.
    overrides=$(mktemp)
    trap 'rm -f "$overrides"' EXIT
    for package in torchvision torchaudio torchcodec; do
        echo "$package ; sys_platform == 'never'" >>"$overrides"
    done
    echo "torch==$TORCH" >>"$overrides"
    "$PY" -m uv pip install --quiet --python "$VENV/bin/python" --override "$overrides" \
        "torch==$TORCH" "kvpress==$KVPRESS" "transformers==$TRANSFORMERS"
fi

# The scorers alone, on made-up keys and queries: the presses' own modules, in our environment.
mkdir -p "$OUT"
readonly WHEEL="$OUT/kvpress-$KVPRESS"
if [[ ! -d "$WHEEL" ]]; then
    "$PY" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$OUT" "kvpress==$KVPRESS"
    "$PY" -m zipfile -e "$OUT/kvpress-$KVPRESS-py3-none-any.whl" "$WHEEL"
fi
"$PY" "$HERE/scorers.py" "$WHEEL"

"$PY" "$HERE/ours.py" --out "$OUT" "$@"
"$VENV/bin/python" "$HERE/theirs.py" --out "$OUT"
"$PY" "$HERE/compare.py" --out "$OUT"
