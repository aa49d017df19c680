# Every target makes the environment it needs in .venv first: only python3 and make have to be there.
# ARGS reaches the command: `make test ARGS="-k schedules"`, `make bench ARGS=--quick`.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python -m
ARGS   ?=

.PHONY: help demo examples test slow lint format docs pictures wheel bench clean
.NOTPARALLEL:
# A stamp whose install failed must not stand.
.DELETE_ON_ERROR:
# Compiling all of torch at install would double its time; what is imported is compiled then, and kept.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo    train a digit classifier on two virtual devices"
	@echo "make examples    run all examples, and the notebook into docs/_build/tour.html"
	@echo "make test    the test suite, in parallel"
	@echo "make slow    the tests marked slow"
	@echo "make lint    ruff and pyright"
	@echo "make format  let ruff rewrite the code"
	@echo "make docs    the documentation in docs/_build/html, warnings are errors"
	@echo "make pictures    measure and draw the pictures of the README and the docs; needs Chromium"
	@echo "make wheel   build a wheel and run the quick start from it in an empty environment"
	@echo "make bench   pipepart against its peers on the CPU"
	@echo "make clean   remove the environment and the caches"

demo: $(VENV)/.installed-demo
	@$(RUN) examples.digits $(ARGS)

examples: $(VENV)/.installed-test
	for name in digits language unlike_devices too_big transformers_finetune transformers_trainer lora; do \
	  $(RUN) examples.$$name || exit 1; done
	$(RUN) nbconvert --execute --to html --output-dir docs/_build examples/tour.ipynb

test: $(VENV)/.installed-test
	$(RUN) pytest -n auto --maxprocesses 8 --dist loadgroup $(ARGS)

# Two at a time, as pipelines have threads of their own; then those that measure times, with nothing beside them.
# Exit status 5 is pytest's "no test selected".
slow: $(VENV)/.installed-test
	$(RUN) pytest -m "slow and not alone" -n auto --maxprocesses 2 $(ARGS) || [ $$? -eq 5 ]
	$(RUN) pytest -m "slow and alone" $(ARGS) || [ $$? -eq 5 ]

lint: $(VENV)/.installed-dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) pyright --pythonpath $(VENV)/bin/python

format: $(VENV)/.installed-dev
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

docs: $(VENV)/.installed-docs
	$(RUN) sphinx -W --keep-going -q -b html docs docs/_build/html $(ARGS)
	@echo "docs/_build/html/index.html"

# Measured on this machine, so let nothing else run.
pictures: $(VENV)/.installed-test
	$(RUN) docs.make_pictures

wheel: $(VENV)/bin/python
	$(RUN) pip wheel --quiet --no-deps --disable-pip-version-check -w dist .
	$(VENV)/bin/python tests/wheel/try_wheel.py dist constraints.txt

bench: $(VENV)/.installed-bench
	$(RUN) benchmarks.cpu $(ARGS)

clean:
	rm -rf $(VENV) dist docs/_build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each set of extras in pyproject.toml, so that the demo does not wait for the type checker.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing pipepart[$*] into $(VENV) ..."
	@$(RUN) pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pipepart needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Creating the environment in $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
