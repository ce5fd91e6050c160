# make run is all it takes; make help lists the rest.

.DEFAULT_GOAL := help
.PHONY: help run chat test torture bench-check check bench native clean

# Compiled modules stay in .venv and beside the sources, whatever the shell says: else every process compiles them again.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
RUNNING := .venv/.emberkeep-installed
DEVELOPING := .venv/.emberkeep-dev-installed
TORTURING := .venv/.emberkeep-torture-installed

# Not auto: that counts two threads of one core as one.
ON_ALL_CORES := -n logical --dist worksteal

TORTURE ?= 1

IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo "  ARGS passes flags on: make run ARGS='--port 9000'"
	@echo "  GPU names what llama.cpp computes on: make run GPU=cuda (or vulkan, rocm, metal)"

run: $(RUNNING) ## install what is missing and serve on http://127.0.0.1:8080
	@$(BIN)/emberkeep serve $(ARGS)

chat: $(RUNNING) ## install what is missing and chat in this terminal
	@$(BIN)/emberkeep chat $(ARGS)

test: check ## checks, every fast test, and one real server; under eight minutes on two cores
	$(BIN)/python -m pytest --part fast $(ON_ALL_CORES) $(ARGS)
	$(BIN)/python -m pytest --part smoke $(ARGS)

torture: $(TORTURING) ## all other tests; PART=faults runs one part, TORTURE=10 ten times as much chance
	@EMBERKEEP_TEST_TORTURE=$(TORTURE) $(BIN)/python tests/torture.py $(PART) -- $(ARGS)

bench-check: $(DEVELOPING) ## that every benchmark runs
	@$(BIN)/python tests/torture.py bench -- $(ARGS)

check: $(DEVELOPING) ## formatting, lint, types, layers
	$(BIN)/ruff format --check src benchmarks tests
	$(BIN)/ruff check src benchmarks tests
	$(BIN)/mypy --num-workers auto
	$(BIN)/lint-imports

bench: $(RUNNING) ## measure: make bench ARGS=all; without ARGS it lists what there is
	@$(BIN)/python -m benchmarks $(ARGS)

# ── llama.cpp, compiled here ──

# Only as make is told them: shells have variables of these names for other programs.
$(foreach name,GPU ISA ARCH,$(if $(filter environment,$(origin $(name))),$(eval $(name) :=)))

override GPU := $(strip $(GPU))
override ISA := $(strip $(ISA))
override ARCH := $(strip $(ARCH))

GPU_cuda := -DGGML_CUDA=ON $(if $(ARCH),-DCMAKE_CUDA_ARCHITECTURES=$(ARCH))
GPU_vulkan := -DGGML_VULKAN=ON
GPU_rocm := -DGGML_HIP=ON $(if $(ARCH),-DAMDGPU_TARGETS=$(ARCH))
GPU_metal := -DGGML_METAL=ON
ISA_native := -DGGML_NATIVE=ON
ISA_avx := -DGGML_NATIVE=OFF -DGGML_AVX2=OFF -DGGML_FMA=OFF -DGGML_F16C=OFF -DGGML_BMI2=OFF
ISA_avx2 := -DGGML_NATIVE=OFF
ISA_avx512 := -DGGML_NATIVE=OFF -DGGML_AVX512=ON

ifneq ($(GPU),)
ifneq ($(words $(GPU)) $(words $(filter cuda vulkan rocm metal,$(GPU))),1 1)
$(error GPU=$(GPU) is not known here: it is cuda, vulkan, rocm or metal)
endif
endif
ifneq ($(ISA),)
ifneq ($(words $(ISA)) $(if $(ISA_$(ISA))$(filter armv%,$(ISA)),1),1 1)
$(error ISA=$(ISA) is not known here: it is native, avx, avx2, avx512, or for ARM as armv8.2-a+dotprod)
endif
endif
ifneq ($(ARCH),)
ifneq ($(words $(ARCH)) $(words $(filter cuda rocm,$(GPU))),1 1)
$(error ARCH=$(ARCH) is for GPU=cuda, as 89 or 90, or for GPU=rocm, as gfx1100)
endif
endif

# The multimodal library is not used; leaving it out saves minutes.
CMAKE_ARGS ?= -DLLAVA_BUILD=OFF
FLAGS := $(strip $(CMAKE_ARGS) $(GPU_$(GPU)) $(or $(ISA_$(ISA)),$(if $(ISA),-DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=$(ISA))))
BUILT := .venv/.emberkeep-llama-cpp
# gcc 12.2 drops the stores into AMX's tile configuration, so the first tile instruction would end the process.
NO_AMX := $(shell grep -qs amx_tile /proc/cpuinfo && c++ --version | grep -q 'Free Software' && \
	test "$$(c++ -dumpversion | cut -d. -f1)" -lt 13 && echo -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)

# Asked for once: make run alone goes on with what was compiled. Nothing is compiled that comes ready-made.
READY_MADE := $(if $(ISA)$(ARCH)$(filter-out Linux x86_64,$(shell uname -sm)),,$(filter cuda vulkan,$(GPU)))
ifneq ($(GPU)$(ISA),)
ifneq ($(shell cat $(BUILT) 2>/dev/null),$(FLAGS))
ifneq ($(READY_MADE),)
run chat: export EMBERKEEP_LLAMA_LIBRARY := $(READY_MADE)
else
run chat: native
endif
endif
endif

native: $(RUNNING) ## compile llama.cpp for this machine, about 7 minutes on two cores; it is used from then on
	@command -v c++ >/dev/null || { echo "That takes a C++ compiler: install g++ or clang."; exit 1; }
	@$(NEEDS_$(GPU))
	@rm -f $(BUILT)
	@$(BIN)/python -m pip uninstall --yes --quiet --disable-pip-version-check llama-cpp-python
	@CMAKE_ARGS="$(FLAGS)" CFLAGS="$(NO_AMX) $(CFLAGS)" CXXFLAGS="$(NO_AMX) $(CXXFLAGS)" \
		$(BIN)/python -m pip install --disable-pip-version-check --no-cache-dir -e '.[native]'
	@echo '$(FLAGS)' > $(BUILT)
	@$(BIN)/emberkeep doctor

NEEDS_ := :
NEEDS_cuda := command -v nvcc >/dev/null || { \
	echo "GPU=cuda takes NVIDIA's CUDA toolkit: install it, or put the folder of its nvcc into PATH."; exit 1; }; \
	printf '\#include <cublas_v2.h>\n' | nvcc -E -x cu - >/dev/null 2>&1 || { \
	echo "GPU=cuda takes cuBLAS, which the CUDA toolkit here lacks: install it (Debian and Ubuntu: libcublas-dev)."; exit 1; }
NEEDS_vulkan := command -v glslc >/dev/null || { \
	echo "GPU=vulkan takes the shader compiler glslc: install it (Debian and Ubuntu: glslc)."; exit 1; }; \
	printf '\#include <vulkan/vulkan.hpp>\n\#include <spirv/unified1/spirv.hpp>\n' | c++ -E -x c++ - >/dev/null 2>&1 || { \
	echo "GPU=vulkan takes the headers of Vulkan and SPIR-V (Debian and Ubuntu: libvulkan-dev spirv-headers)."; exit 1; }
NEEDS_rocm := command -v hipcc >/dev/null || { \
	echo "GPU=rocm takes AMD's ROCm: install it, or put the folder of its hipcc into PATH."; exit 1; }
NEEDS_metal := test "$$(uname)" = Darwin || { \
	echo "GPU=metal is for Macs: choose cuda, vulkan or rocm here."; exit 1; }; \
	xcode-select -p >/dev/null 2>&1 || { \
	echo "GPU=metal takes Apple's compiler: xcode-select --install fetches it."; exit 1; }

clean: ## remove what was installed and cached here (models and stored state stay)
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# Running needs no torch; who wants the Hugging Face engine adds it: .venv/bin/pip install -e '.[hf]'
$(RUNNING): WHAT := .
$(DEVELOPING): WHAT := .[dev,hf,embeddings,remote,valkey]
$(DEVELOPING): ALSO := $(RUNNING)
$(TORTURING): WHAT := .[dev,torture,hf,embeddings,remote,cluster]
$(TORTURING): ALSO := $(RUNNING) $(DEVELOPING)
$(RUNNING) $(DEVELOPING) $(TORTURING): pyproject.toml | $(BIN)/python
	@echo "Installing Emberkeep into .venv."
	@# Without compiling every module of every package, most of which are never imported: half the time.
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile -e '$(WHAT)'
	@touch $@ $(ALSO)

# The latest pip, if it can be had: it installs in two thirds of the time that older ones take.
$(BIN)/python:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
		"$$python" -c '$(IS_NEW_ENOUGH)' 2>/dev/null || continue; \
		echo "Creating .venv with $$("$$python" --version)."; \
		"$$python" -m venv .venv && { $(BIN)/python -m pip install -qU pip || true; } && exit 0; \
		rm -rf .venv; \
		echo "Python could not create .venv: install its venv module (Debian and Ubuntu: python3-venv)."; \
		exit 1; \
	done; \
	echo "Emberkeep needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/to/python3."; \
	exit 1
