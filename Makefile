# The course's commands. Each makes the environment first, if it is not there or out of date.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST ?= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
READY  := $(VENV)/.installed

.PHONY: help course test lab notebooks check grade-demo clean

help:
	@echo "make course      build the site (start here)"
	@echo "make test        run the whole test suite"
	@echo "make lab         open the labs in JupyterLab, on your own copies in work/"
	@echo "make grade-demo  grade five made-up learners with nbgrader"
	@echo "make notebooks   (authors) make the notebooks from solutions/"
	@echo "make check       (authors) ruff, tests, doctests, notebooks in sync, site with warnings as errors"
	@echo "make clean       remove _build; your work and the environment stay"

$(READY): pyproject.toml requirements.lock
	$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed, this is ' + sys.version) if sys.version_info < (3, 11) else None"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --progress-bar on -c requirements.lock -e ".[course,tests]"
	@touch $(READY)

course: $(READY)
	$(BIN)/tfm site

test: $(READY)
	$(PYTEST)

lab: $(READY)
	$(BIN)/tfm lab

notebooks: $(READY)
	$(BIN)/tfm notebooks

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/tfm notebooks --check
	$(PYTEST)
	$(BIN)/tfm site

grade-demo: $(READY)
	$(BIN)/tfm grade --demo

clean:
	rm -rf _build
