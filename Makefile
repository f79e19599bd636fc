# make serve    sets everything up and serves the default model   (PORT=8000 MODEL=default ARGS="--max-running-requests 16")
# make test     sets everything up and runs the tests             (ARGS="-k barrier -x" JOBS=1)
# make soak     twenty minutes of mixed traffic on a server, and what must hold then   (ARGS="--minutes 5 --model default")
# make lint     ruff and mypy
# make sanitize builds csrc with its C++ tests under Thread-, Address- and UndefinedBehaviorSanitizer and runs them;
#               mistakes planted in it must be reported   (ARGS="--twin cpu --sanitizer thread")
# make verify   checks the model of the barrier and its mutants   (needs spin: apt-get install spin)
# make fuzz     random requests against the server, a minute for each way of making them; and LangChain as a client
# make bench    jaxserve beside transformers, and the four ways to update control rows beside each other
# make clean    removes what the other targets made
#
# PYTHON chooses the interpreter the virtual environment is made from (3.11 or newer).

PYTHON ?= python3
PORT ?= 8000
MODEL ?= default
ARGS ?=
# Test files that run beside each other. Most of their time goes into compiling, on one core each; memory: some 2 GB each.
JOBS ?= 2
VENV ?= .venv
# The peer of `make bench`: any interpreter that has torch, transformers and safetensors.
PEERS_VENV ?= .venv-peers
PEERS_PYTHON ?= $(PEERS_VENV)/bin/python

BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none)
# The version is part of the stamp, so another PYTHON makes another environment.
INSTALLED := $(VENV)/.installed-$(VERSION)
SOURCES := pyproject.toml setup.py $(shell find csrc -type f)

# Ahead of the server, so that the download is seen; if it fails, the server says why.
FETCH := from jaxserve.models.loading.default_model import default_model_path as fetch; print('default model:', fetch())

.PHONY: serve test soak sanitize verify fuzz bench lint clean
.DEFAULT_GOAL := serve

serve: $(INSTALLED)
	@if [ "$(MODEL)" = default ]; then $(BIN)/python -c "$(FETCH)" 2>/dev/null || true; fi
	$(BIN)/jaxserve serve --model "$(MODEL)" --port $(PORT) $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

soak: $(INSTALLED)
	$(BIN)/python tests/soak.py $(ARGS)

# In build/sanitize; only what has changed is compiled anew. The interpreter is the one with jaxlib: its FFI headers.
sanitize: $(INSTALLED)
	$(BIN)/python tests/native/sanitize.py $(ARGS)

# Installs nothing: standard library, spin and a C compiler.
verify:
	@command -v spin >/dev/null || { echo "make verify needs spin; on Debian and Ubuntu: apt-get install spin" >&2; exit 2; }
	$(PYTHON) verification/run.py $(ARGS)

fuzz: $(VENV)/.clients-$(VERSION)
	JAXSERVE_FUZZ_SECONDS=60 $(BIN)/python -m pytest tests/server/test_server_fuzz.py tests/server/test_server_clients.py $(ARGS)

bench: $(INSTALLED) $(PEERS_PYTHON)
	$(BIN)/python bench/run.py --peers-python "$(PEERS_PYTHON)" $(ARGS)

lint: $(VENV)/.lint-$(VERSION)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(PEERS_VENV) build dist *.egg-info jaxserve/*.so .pytest_cache .mypy_cache .ruff_cache
	find jaxserve tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

# pip runs with build isolation: the build needs the headers of the oldest supported jaxlib, the run the newest.
$(INSTALLED): $(SOURCES)
	@PYTHON="$(PYTHON)" sh .ci/check-tools
	@if [ ! -x $(BIN)/python ] || [ "$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != "$(VERSION)" ]; \
	then $(PYTHON) -m venv --clear $(VENV); fi
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@

$(VENV)/.clients-$(VERSION): $(INSTALLED)
	$(BIN)/python -m pip install --quiet 'langchain-openai>=0.3' 'schemathesis>=4'
	@touch $@

$(VENV)/.lint-$(VERSION): $(INSTALLED)
	$(BIN)/python -m pip install --quiet 'ruff>=0.8' 'mypy>=1.11'
	@touch $@

$(PEERS_VENV)/bin/python:
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet torch 'transformers>=4.57' safetensors
