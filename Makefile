# A python3.11 may be a shim that has no interpreter behind it, so the choice is made by running it.
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
PYTHON313 ?= $(shell for p in python3.13 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.13*/bin/python3.13; do \
  $$p -c '' 2>/dev/null && echo $$p && break; done)
# JAX 0.10 is the last line for Python 3.11.
PINS := constraints/py$(if $(filter 3.11,$(shell $(PYTHON) -c \
  'import sys; print("%d.%d" % sys.version_info[:2])')),311,313).txt

BIN := .venv/bin
TRAIN := experiments.sweep --config=configs/digits.py --workdir=runs/digits
PYTEST := -m pytest -n 2 --dist=loadfile --doctest-modules tests jax_dsgd

.PHONY: install train test lint format types core-newest clean

install: .venv/installed

.venv/installed: setup.cfg $(PINS)
	@echo "install: $(PYTHON) makes .venv, pinned by $(PINS)"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c $(PINS) -e '.[experiments,test,lint,async]'
	@touch $@

train: install
	$(BIN)/python -m $(TRAIN)

test: install
	$(BIN)/python $(PYTEST)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install
	$(BIN)/pyright

# The library alone, without the experiments and what they import, on the newest JAX.
ifeq ($(PYTHON313),)
core-newest:
	@echo "core-newest: skipped, no working python3.13 here"
else
core-newest: .venv313/installed
	.venv313/bin/python $(PYTEST) --ignore=tests/experiments --ignore=tests/configs --ignore=tests/colabs
endif

.venv313/installed: setup.cfg constraints/py313.txt
	@echo "core-newest: $(PYTHON313) makes .venv313, pinned by constraints/py313.txt"
	@$(PYTHON313) -m venv --clear .venv313
	@.venv313/bin/python -m pip install -qq --disable-pip-version-check -c constraints/py313.txt -e '.[test]'
	@touch $@

clean:
	rm -rf .venv .venv313 .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
