# Every target makes its own environment in .venv, from nothing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test lint format clean

setup: .venv/.installed

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# The main job: check every mixer, then measure them on this machine.
demo: setup
	$(BIN)/langevin check
	$(BIN)/langevin bench mixers

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build dist
