PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-slow papers lint clean

setup: $(STAMP)

# torch and torchvision stand in one pip command (through pyproject), so that they fit together.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e ".[dev]"
	@$(BIN)/fedsim weights fetch || echo "without LPIPS for now: fedsim weights fetch tries again"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fedsim audit experiments/demo.yaml -o runs/demo

# Two at a time with one thread each: more threads than cores make torch many times slower.
WORKERS ?= 2
test: $(STAMP) lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -n $(WORKERS) --dist loadfile

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow

# The papers' tables again, resumable: make papers CIFAR10=PATH FACES=olivettifaces.mat (hours on two
# cores; JOBS=2 runs two tables at a time). PAPER=1, on a GPU: the papers' own budgets.
CIFAR10 ?=
FACES ?=
JOBS ?= 1
PAPER ?=
papers: $(STAMP)
	$(BIN)/python -m experiments.papers -o runs/papers$(if $(PAPER),-paper) --jobs $(JOBS) $(if $(PAPER),--paper) \
	    $(if $(CIFAR10),--cifar10 "$(CIFAR10)") $(if $(FACES),--faces "$(FACES)")

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
