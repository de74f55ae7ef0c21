# `make run` serves a model, `make test` checks everything. Both make their own environment in .venv first.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The newest Python that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for python in python3.14 python3.13 python3.12 python3.11 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)

.PHONY: help run test llama cover test-clients test-vllm fuzz test-redis7 test-cluster test-hosts cancels kills program-kills unloads idle sweep programs faults-long lint chaos chaos-long recovery bench-program-full docker-check docker-lock clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STAMP) ## Fetch the model, then serve it on PORT, or else server.port (8000).
	$(BIN)/genpool models pull
	@exec $(BIN)/genpool up $(if $(PORT),--port $(PORT))

llama: $(STAMP) ## Build llama.cpp, once for this machine (minutes; needs a C++ compiler), and install it.
	@$(BIN)/python tools/build_llama.py

test: lint llama ## Lint, then run all tests.
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

cancels: $(STAMP) ## Leave 1,000 generations at random moments; nothing may be left of them (SEED=N replays).
	CANCELS=1000 $(if $(SEED),SEED=$(SEED)) $(BIN)/python -m pytest -q tests/faults/test_leaving.py

kills: llama ## Kill workers 30 times with each engine under a steady load of streams; nobody can tell (SEED=N replays).
	KILLS=30 $(if $(SEED),SEED=$(SEED)) $(BIN)/python -m pytest -q -s tests/faults/test_llama_kills.py \
		tests/faults/test_preempted_kills.py

unloads: $(STAMP) ## Unload and load a model 40 times in one process: each time it answers, and memory is back (about 3 minutes).
	UNLOADS=40 $(BIN)/python -m pytest -q -s tests/faults/test_f22_unload.py -k memory

idle: $(STAMP) ## Leave a system without work for a minute: silence, next to no CPU, and the next job at once.
	IDLE=long $(BIN)/python -m pytest -q tests/faults/test_f13_idle.py

programs: $(STAMP) ## Do 20,000 random events to Programs on a real state server, against plain objects (about 5 minutes).
	PROGRAM_STEPS=20000 $(BIN)/python -m pytest -q -n0 tests/stateful/test_programs_model.py

program-kills: $(STAMP) ## Kill a process and then the state server under 40 agents, 30 times (about 10 minutes; SEED=N replays).
	$(BIN)/python -m tests.chaos.program_kills $(if $(SEED),--seed $(SEED))

cover: $(STAMP) ## Show that the tests of the rules of Programs and sessions take every branch, without a state server.
	$(BIN)/python -m coverage run --branch --source=pool.rules.programs,pool.rules.affinity,pool.program_settings \
		-m pytest -q tests/unit/test_program_*.py tests/unit/test_affinity.py
	$(BIN)/python -m coverage report --show-missing --fail-under=100

# The second has KV for a little more than the longest session.
SWEEP := $(BIN)/genpool sweep smollm2-135m-instruct --prompts 1-2000 --max-tokens 64 --seed 3
sweep: $(STAMP) ## SmolLM2 at 1, 2, 4, 8, 16 sessions, with room, then crowded, in pieces and with cancels: same tokens (8 minutes).
	@mkdir -p build
	$(SWEEP) --json build/sweep.json --plot build/sweep.svg
	$(SWEEP) --json build/sweep-crowded.json --plot build/sweep-crowded.svg \
		--kv-tokens 2560 --overcommit 64 --prefill-tokens 256 --cancels 4

test-redis7: $(STAMP) ## Run the store's and the state server's tests on Redis 7.0, every Lua verb included.
	redis7=$$($(BIN)/python -m tests.redis7) && EVERY_VERB=1 GENPOOL_VALKEY_SERVER="$$redis7" \
		$(BIN)/python -m pytest -q tests/store tests/integration/test_state_server.py

test-cluster: $(STAMP) ## Run the store's tests on a Redis Cluster of three nodes, every Lua verb included, and those of clusters.
	STATE=cluster EVERY_VERB=1 $(BIN)/python -m pytest -q tests/store
	$(BIN)/python -m pytest -q tests/cluster

test-hosts: $(STAMP) ## Cut one of four hosts (network namespaces) off for 20 seconds in the middle of generations.
	HOSTS=long $(BIN)/python -m pytest -q tests/hosts

faults-long: $(STAMP) ## Do every fault of the state server on both servers, with all settings; hot ranks and full budgets for longer.
	FAULTS=long $(BIN)/python -m pytest -q tests/faults/test_faulty_server.py \
		tests/faults/test_f40_hot_ranks.py tests/faults/test_f43_full_budgets.py

test-clients: $(STAMP) ## Official clients and frameworks against a live system, each in an environment of its own (needs npm).
	$(BIN)/python -m tests.clients

test-vllm: $(STAMP) ## The tests of backends against vLLM's CPU build (a first run installs gigabytes and compiles for minutes).
	VLLM=1 $(BIN)/python -m pytest -q -n0 --timeout 1200 tests/backends/test_black_box.py tests/backends/test_vllm.py

fuzz: $(STAMP) ## Send 20,000 hostile requests, then those of schemathesis (SEED=N replays).
	$(BIN)/python -m tests.fuzz $(if $(SEED),--seed $(SEED))

lint: $(STAMP) ## Check format, style, types, the layers' borders, file lengths and Lua headers.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/architecture

bench-program-full: llama ## Run every cell of benchmarks/program.py (a day); goes on where it ended.
	$(BIN)/python benchmarks/program.py --full

bench-%: $(STAMP) ## Run benchmarks/NAME.py.
	$(BIN)/python benchmarks/$*.py

chaos: $(STAMP) ## Kill, stop and cut off processes for ten minutes, and show that nothing is lost (SEED=N replays).
	$(BIN)/python -m tests.chaos.driver --seconds 600 $(if $(SEED),--seed $(SEED))

chaos-long: $(STAMP) ## The same for an hour.
	$(BIN)/python -m tests.chaos.driver --seconds 3600 $(if $(SEED),--seed $(SEED))

recovery: bench-recovery ## Kill each kind of process 50 times in the middle of streams, and time what readers notice.

# Programs of other projects that only docker-check needs: in an environment of their own beside genpool's.
DOCKER_TOOLS := build/docker-tools
docker-check: $(STAMP) ## Parse, lint, install and start what docker/ describes, without an engine (root, Debian 12; OPTIONS=...).
	$(BIN)/python -m venv $(DOCKER_TOOLS)
	$(DOCKER_TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[test,docker]"
	$(DOCKER_TOOLS)/bin/python -m tests.images $(OPTIONS)

docker-lock: $(STAMP) ## Pin the images' Python packages anew (docker/requirements).
	$(BIN)/python -m pip install --quiet --disable-pip-version-check ".[docker]"
	docker/lock.sh $(BIN)/uv --upgrade

clean: ## Remove the environment and the tools' caches.
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "genpool needs Python 3.11 or later; none was found on PATH (found: $$(python3 --version 2>&1))." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "genpool needs Python 3.11 or later; $(PYTHON) is $$("$(PYTHON)" --version 2>&1)." >&2; exit 1; }
	@echo "Installing into $(VENV); the first time takes about a minute."
	@"$(PYTHON)" -m venv $(VENV) || { echo "The venv module is missing; on Debian: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@
