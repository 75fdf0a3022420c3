#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that a GPU is needed for, in one go, into one JSON file: see scripts/gpu_check.py.
#
#   scripts/gpu_check.sh --json result.json          all stages
#   scripts/gpu_check.sh --dry-run                   what would run; needs no GPU
#   PYTHON=python3.12 scripts/gpu_check.sh ...       chooses the interpreter
#
# The interpreter must find torch, triton, pytest and (for the engine stages) vLLM; vLLM may lie in
# a folder on PYTHONPATH. The package itself is taken from this checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" scripts/gpu_check.py "$@"
