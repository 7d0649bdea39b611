# Every target makes its own environment in .venv, from nothing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test lint format clean

setup: .venv/.installed

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# The main job: train six mixers on equal terms, eight seeds each, and open the page that answers.
DEMO := runs/demo
demo: setup
	$(BIN)/langevin compare softmax ssmax heat sigmoid sima neighbor --data stories --seeds 0-7 \
	  --layers 2 --width 64 --context 64 --batch 32 --tokens 160000 --lr 5e-3 --equalise \
	  --eval-tokens 8192 --test-tokens 16384 --title "Which of six mixers learns small stories best?" --out $(DEMO) --open

test: setup
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build dist
