# `make demo` and `make test` each work alone on a machine with Python 3.10+ and make.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# The tests start many processes that import torch. Each would compile it again, because the installation does not.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-scripts docs dist coverage bench results endurance clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/python -m lather demo

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST)

# Tests of examples, benchmarks, experiments and their reports.
test-scripts: setup
	$(PYTEST) -m scripts tests/scripts

# The site. A warning is an error, and so is a link to a page or heading that does not exist.
docs: setup
	$(BIN)/sphinx-build -W --keep-going -n -E -q docs docs/_build/html
	@echo "open docs/_build/html/index.html"

# Wheel and sdist. The wheel is built from the sdist, and must work in an environment that has nothing else but torch.
dist: setup
	rm -rf build dist
	$(BIN)/python -m build --outdir dist . > /dev/null
	$(PYTHON) -m venv --clear build/empty
	build/empty/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && empty/bin/python ../tests/smoke.py
	@ls -l dist

# Hours of use in about one: random lives of the optimizer, faults on several ranks, and a hundred thousand steps.
endurance: setup
	cd tests && ../$(BIN)/python -m endurance.fuzz --seeds 2500
	cd tests && ../$(BIN)/python -m endurance.fuzz --seeds 150 --layouts ddp2 fsdp3 hsdp22 fsdp_tp22
	cd tests && ../$(BIN)/python -m endurance.faults
	cd tests && ../$(BIN)/python -m endurance.soak

# The same tests with their lines counted, which takes half as long again.
coverage: setup
	$(PYTEST) --cov --cov-fail-under=95

bench: setup
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/solvers.py

# The tables and plots of docs/results.md, from the logs of the experiments.
results: setup
	$(BIN)/python -m experiments.report --write

clean:
	rm -rf .venv build dist docs/_build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage
