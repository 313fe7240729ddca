# A fresh clone needs only python3 >= 3.11 and make, which creates .venv and keeps it up to date.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEMO := ALLGATHER timeout save
IN_PARALLEL := -n auto --dist worksteal
PYTHONS := tests/cli/test_other_pythons.py
ALL_TESTS := $(IN_PARALLEL) --ignore $(PYTHONS)

.PHONY: setup system demo test test-all quick pythons contract lint audit docs screenshots bench bench-search bench-diagnose bench-service bench-capture decision confusion healthy stories matrix wordings gpu-check clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kb needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (torch is the large part) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,probes]'
	@touch $@

demo: setup ## find an incident, then verify its fix on this machine
	$(BIN)/kb search "$(DEMO)"
	$(BIN)/kb verify checkpoint-save-allgather-timeout

system: ## install the programs that some tests need (PostgreSQL, Chromium, nginx, ...) from Debian's packages; needs root
	.ci/system

test: setup ## all tests except `pythons` and proven probes, in parallel; TESTS=tests/kb/search runs some, sequentially; COVERAGE=1 checks the minimum
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(or $(TESTS),$(ALL_TESTS)) $(if $(COVERAGE),--cov)

test-all: setup ## all tests, including probes that have not changed since they were proven; writes tests/proven.json
	PYTHONDONTWRITEBYTECODE= KB_ALL_PROBES=1 $(BIN)/python -m pytest $(ALL_TESTS)
	$(BIN)/python -m tests.support.proven

pythons: setup ## test probes and kb with the other Pythons on this machine
	$(BIN)/python -m pytest $(IN_PARALLEL) $(PYTHONS)

quick: setup ## only the tests that are not slow
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(ALL_TESTS) -m "not slow"

contract: setup ## record the current JSON documents, /openapi.json and MCP tools; review the diff
	KB_RECORD_CONTRACT=1 $(BIN)/python -m pytest -q tests/contract

lint: setup ## check the form of code and content
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy kb api cli probes tests docs/site .ci/audit.py .ci/shell.py
	$(BIN)/codespell kb api cli probes entries docs deploy README.md CONTRIBUTING.md CHANGELOG.md Makefile
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml kb api cli
	$(BIN)/kb lint
	$(BIN)/python .ci/shell.py

audit: setup ## find known vulnerabilities of installed packages, if an advisory service can be reached
	$(BIN)/python .ci/audit.py

docs: setup ## build the site: a page per entry, the graph of causes; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

screenshots: setup ## take docs/pages/*.png with the system's Chromium
	$(BIN)/python -m tests.browser.screenshots

bench: setup ## measure ratios within one run, printed as the tables of docs/benchmarks.md
	$(BIN)/python -m tests.bench

bench-search: setup ## compare search with FTS5, tantivy and bm25s, also with 10,000 entries; ARGS=--small skips those
	$(BIN)/python -m tests.bench.search_engines $(ARGS)

bench-diagnose: setup ## diagnoses of real logs and recorded jobs, MB/s compared with ripgrep, hostile texts; ARGS="--cases FILE" adds cases
	$(BIN)/python -m tests.bench.diagnose_logs $(ARGS)
	$(BIN)/python -m tests.bench.stories

bench-service: setup ## the service under load, compared with an endpoint that does nothing; takes some minutes
	$(BIN)/python -m tests.bench.service $(ARGS)

bench-capture: setup ## time to capture a hanging job, how often the culprit is named, cost to a running job; ARGS="--ranks 8 --times 10"
	$(BIN)/python -m tests.bench.capture $(ARGS)

decision: setup ## fit the weights that decide whether a hit is an answer; prints weights, curves and reliability; ARGS="--cases FILE" adds threads
	$(BIN)/python -m tests.bench.decision $(ARGS)

confusion: setup ## run every control arm and diagnose its logs; draws docs/confusion.svg
	$(BIN)/python -m tests.bench.confusion

healthy: setup ## record what healthy jobs print; PYTHON_OF=the Python of an environment with the training libraries
	$(BIN)/python tests/healthy/record.py

stories: setup ## record jobs that fail in chosen ways; JOBS="name ..." selects some, STORY_PYTHONS="2.13=/x/bin/python,..." sets their environments
	$(BIN)/python -m tests.stories.record $(JOBS)

matrix: setup ## verify with releases of torch and libraries, each in a temporary environment (5 GB); RELEASES="2.5.1" MONTHS="2024-12"
	$(BIN)/python -m tests.bench.releases
	$(BIN)/python -m tests.bench.libraries

wordings: setup ## look up the text of each signature in the releases that may print it; PACKAGES="torch peft" selects packages
	$(BIN)/python -m tests.bench.wordings

gpu-check: setup ## verify everything that a machine with GPUs can prove, and write one record
	$(BIN)/python -m tests.bench.gpu_check

clean:
	rm -rf .venv build dist *.egg-info
