# Each target first creates the virtual environment that it needs, with the exact versions of constraints.txt.
PYTHON ?= python3
# An additional package index for torch. Example: TORCH_INDEX=https://download.pytorch.org/whl/cpu installs the CPU build.
TORCH_INDEX ?=
VENV ?= .venv
PEERS ?= .venv-peers
BIN = $(VENV)/bin
# A lost worker ends the run as failed: xdist would replace it, give it the same test again and wait forever.
PYTEST = $(BIN)/python -m pytest -n 2 --no-loadscope-reorder --max-worker-restart=0
COMPUTE = $(PYTEST) -q tests/infoxlm_core tests/benchmarks
STORE ?= runs
# One thread a process: two cores are shared by workers, servers and the runner itself.
export OMP_NUM_THREADS = 1
export TOKENIZERS_PARALLELISM = false
# Else each of a hundred processes would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo servers ablation systems test quick fuzz processors check compile image sbom lock deploy bench gpu clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

demo: $(VENV)/installed ## run the whole pipeline on real text, on this machine
	$(BIN)/infoxlm run configs/demo.yaml --store $(STORE)

servers: $(VENV)/installed ## the demo by URL only: S3, PostgreSQL, MLflow with accounts, all on this machine
	$(BIN)/python -m tests.servers -- $(BIN)/infoxlm run configs/demo.yaml --store s3://infoxlm/store

# Four of the demo's languages, so that each pair is seen often enough within the hour for TLM to learn from it.
ablation: $(VENV)/installed ## MLM, MLM+TLM and MLM+TLM+XLCO on real text, three seeds: an hour on two cores
	$(BIN)/infoxlm ablate configs/demo.yaml --store $(STORE) --only MLM,MLM+TLM,full --seeds 1,2,3 \
		--set 'preparation.languages=[en, de, ru, zh]' --set tokenization.vocabulary_size=8000 \
		--set pretraining.optimization.steps=1500 --set pretraining.optimization.warmup_steps=100 \
		--set pretraining.objectives.mask_ratio=0.3

# All systems see 1.5 million tokens: 220 steps of InfoXLM, 900 of XLM-R. One virtual shard gives a step with dropout one
# large micro-batch instead of four.
systems: $(VENV)/installed ## all systems of the papers on real text at equal cost, three seeds: an hour on two cores
	$(BIN)/infoxlm ablate configs/demo.yaml --store $(STORE) --variants configs/systems.yaml --seeds 1,2,3 \
		--set 'preparation.languages=[en, de, ru, zh]' --set tokenization.vocabulary_size=8000 \
		--set pretraining.tokens=1500000 --set pretraining.optimization.warmup_steps=40 \
		--set pretraining.objectives.mask_ratio=0.3 \
		--set pretraining.batches.virtual_shards=1 --set pretraining.batches.micro_batch_size=64

test: $(VENV)/installed ## run all tests
	$(PYTEST)

quick: $(VENV)/installed ## run the tests that need no servers and no Ray: under four minutes
	$(PYTEST) -m "not slow"

fuzz: $(VENV)/installed ## read INPUTS=5000 damaged files with each reader, or TARGETS="tmx or po"; what fails is saved
	FUZZ_INPUTS=$(or $(INPUTS),5000) nice $(BIN)/python -m pytest -q tests/fuzz $(if $(TARGETS),-k "$(TARGETS)")

processors: $(VENV)/installed ## run the tests of the core as on processors with SSE4, AVX2 and AVX-512, as far as this one has them
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(COMPUTE)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(COMPUTE)
	ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512 $(COMPUTE)

check: $(VENV)/installed ## style, types, layers: seconds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

compile: $(VENV)/installed ## compile the DAGs to pipelines/compiled/, the fields to docs/configuration.md
	$(BIN)/infoxlm compile
	$(BIN)/infoxlm config --markdown > docs/configuration.md

image: ## build the image: BASE=… by digest, VARIANT=cuda for GPUs, TAG=registry.example/infoxlm:0.1.0
	VARIANT="$(VARIANT)" BASE="$(BASE)" TAG="$(TAG)" PACKAGES="$(PACKAGES)" docker/build.sh

sbom: ## print the image's bill of materials, CycloneDX: VARIANT=cuda, as the image has it in /app/sbom.cdx.json
	@$(PYTHON) docker/sbom.py $(or $(VARIANT),cpu)

lock: $(VENV)/installed ## choose the image's dependencies anew, by hash
	$(BIN)/python docker/lock.py

deploy: $(VENV)/installed ## apply k8s/: OVERLAY=small, single-user or production, IMAGE=name@sha256:…, WITH="downloads postgres@sha256:… …"
	KUBECTL=$(BIN)/kubectl k8s/render.sh "$(OVERLAY)" "$(IMAGE)" $(WITH) | $(BIN)/kubectl apply --server-side --force-conflicts -f -

bench: $(PEERS)/installed ## compare the speed of training with Hugging Face and fairseq: half an hour; QUICK=1: two minutes
	$(PEERS)/bin/python -m benchmarks $(if $(QUICK),--quick)

gpu: $(VENV)/installed ## check results and measure speed on a GPU: ten minutes; FULL=1: base and large; without .venv: python3 -m benchmarks.gpu
	$(BIN)/python -m benchmarks.gpu $(if $(FULL),--full)

clean: ## remove the virtual environment and what runs left behind
	rm -rf $(VENV) $(PEERS) $(STORE)

# Usage: $(call create_environment,DIRECTORY). The pip of Debian 12 (23.0) builds source packages in a way that fails for
# some of them, so upgrade pip first. Install torch next: as a dependency of another package, pip would take its newest
# version. A CPU build has the version 2.13.0+cpu, which pip prefers to the 2.13.0 of the package index.
PIP_INSTALL = -m pip install --quiet --quiet --disable-pip-version-check
define create_environment
$(PYTHON) -m venv $(1)
$(1)/bin/python $(PIP_INSTALL) pip==26.3
$(1)/bin/python $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0 -c constraints.txt
endef

$(VENV)/installed: pyproject.toml setup.py constraints.txt
	$(call create_environment,$(VENV))
	$(BIN)/python $(PIP_INSTALL) -e '.[dev]' -c constraints.txt
	touch $@

# The peers of the benchmarks have their own environment. The pinned wheel of fairseq fits Python 3.11 on x86-64 only.
$(PEERS)/installed: benchmarks/peers.txt benchmarks/fairseq.txt constraints.txt
	$(call create_environment,$(PEERS))
	$(PEERS)/bin/python $(PIP_INSTALL) -r benchmarks/peers.txt -c constraints.txt
	$(PEERS)/bin/python $(PIP_INSTALL) --no-deps --require-hashes -r benchmarks/fairseq.txt \
		|| echo "fairseq cannot be installed here. The benchmarks that compare with fairseq are skipped."
	$(PEERS)/bin/python $(PIP_INSTALL) --no-deps -e .
	touch $@
