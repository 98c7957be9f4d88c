# make run PROMPT="..." · make test · make help; the first call sets up .venv, once

PYTHON ?= python3
PROMPT ?= What is 17 * 23?
ARGS ?=
MODELS ?= nano nano-0731

# a test that hangs says where, and fails
LIMIT := -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true
SLOW_LIMIT := -o faulthandler_timeout=1800 -o faulthandler_exit_on_timeout=true

BIN := .venv/bin
READY := .venv/.ready

# $(value) and the environment carry the prompt to the shell as it was typed: quotes, $$ and all
unexport PROMPT
run: export RUN_PROMPT := $(value PROMPT)

.PHONY: help run test test-all test-gpu quality style wheel completions nano drafter pictures
.DEFAULT_GOAL := help

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile | awk -F': ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

run: $(READY) ## answer PROMPT="..." with the default model
	@$(BIN)/dsv4 run --max-tokens 256 -- "$$RUN_PROMPT"

test: $(READY) ## run the default tests, no GPU, no network, no weights; ARGS="-k rope" chooses
	$(BIN)/python -m pytest -n 2 $(LIMIT) $(ARGS)

test-all: $(READY) ## run all tests that need no GPU, the slow ones too, in about an hour; ARGS chooses
	$(BIN)/python -m pytest -n 2 -m "not gpu" $(SLOW_LIMIT) $(ARGS)

# three workers for four cores: the tests wait for compilers more than for the GPU
test-gpu: ## run the GPU tests with the Python at hand, without set-up
	$(PYTHON) -m pytest -n $$(($$(nproc) * 3 / 4)) -m gpu $(ARGS)

quality: $(READY) ## check style and types, changing nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

style: $(READY) completions ## repair style and regenerate the completions
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: $(READY) ## build the sdist and the wheel of the last commit in dist/, twice, and compare
	$(BIN)/python -m tools.package

nano: ## train the built-in model anew, on a GPU of 141 GB in 22 minutes, with the Python at hand
	$(PYTHON) -m tools.nano.train --out build/nano/first --minutes 17
	$(PYTHON) -m tools.nano.train --out build/nano/last --resume build/nano/first --minutes 20.8 --rate 1.5e-3 --order LLS
	$(PYTHON) -m tools.nano.export build/nano/last/masters-*.safetensors --out dsv4cli/nano

drafter: ## train the drafters of nano and nano-0731 anew, on the same GPU in a minute each; MODELS=nano trains one
	mkdir -p build/nano
	$(PYTHON) -m tools.nano.pool build/nano/text.safetensors
	set -e; for model in $(MODELS); do \
	$(PYTHON) -m tools.nano.train_drafter $$model build/nano/text.safetensors --out build/nano/$$model; \
	cp build/nano/$$model/checkpoint/* dsv4cli/$$model; done

pictures: $(READY) ## record docs/pictures: a terminal and, with Chromium, the page
	$(BIN)/python -m tools.pictures

# zsh reads #compdef on the first line only, and Typer prints a blank line before it
completions: $(READY)
	_DSV4_COMPLETE=source_bash $(BIN)/python -m dsv4cli | sed '/./,$$!d' > completions/dsv4.bash
	_DSV4_COMPLETE=source_zsh $(BIN)/python -m dsv4cli | sed '/./,$$!d' > completions/_dsv4
	_DSV4_COMPLETE=source_fish $(BIN)/python -m dsv4cli | sed '/./,$$!d' > completions/dsv4.fish

$(READY): pyproject.toml constraints.txt # tools/set_up.py touches it last
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	"dsv4 needs Python 3.11 or newer, and $(PYTHON) is older: name another, as in make PYTHON=python3.12")'
	@$(PYTHON) tools/set_up.py
