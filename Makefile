# Everything starts from a fresh clone with python3 >= 3.11 and make; .venv is made and kept by make itself.
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

demo: setup ## the main job: find an incident, then prove its fix on this machine
	$(BIN)/kb search "$(DEMO)"
	$(BIN)/kb verify checkpoint-save-allgather-timeout

system: ## the programs that some tests run (PostgreSQL, Chromium, nginx, ...), from Debian's packages; needs root
	.ci/system

test: setup ## all tests but `pythons` and proven probes, in parallel; TESTS=tests/kb/search for some, one after the other; COVERAGE=1 checks the floor
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(or $(TESTS),$(ALL_TESTS)) $(if $(COVERAGE),--cov)

test-all: setup ## also the probes that have not changed since they were proven; writes tests/proven.json
	PYTHONDONTWRITEBYTECODE= KB_ALL_PROBES=1 $(BIN)/python -m pytest $(ALL_TESTS)
	$(BIN)/python -m tests.support.proven

pythons: setup ## probes and kb with the other Pythons of this machine
	$(BIN)/python -m pytest $(IN_PARALLEL) $(PYTHONS)

quick: setup ## the tests that take no long time
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(ALL_TESTS) -m "not slow"

contract: setup ## record the JSON documents, /openapi.json and the MCP tools as they are now; read the diff
	KB_RECORD_CONTRACT=1 $(BIN)/python -m pytest -q tests/contract

lint: setup ## form of code and content
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy kb api cli probes tests docs/site .ci/audit.py .ci/shell.py
	$(BIN)/codespell kb api cli probes entries docs deploy README.md CONTRIBUTING.md CHANGELOG.md Makefile
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml kb api cli
	$(BIN)/kb lint
	$(BIN)/python .ci/shell.py

audit: setup ## known vulnerabilities of what is installed, where a service of advisories can be reached
	$(BIN)/python .ci/audit.py

docs: setup ## the site: a page per entry, the graph of causes; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

screenshots: setup ## docs/pages/*.png, with the Chromium of the system
	$(BIN)/python -m tests.browser.screenshots

bench: setup ## ratios within one run, printed as the tables of docs/benchmarks.md
	$(BIN)/python -m tests.bench

bench-search: setup ## search beside FTS5, tantivy and bm25s, also with 10,000 entries; ARGS=--small without those
	$(BIN)/python -m tests.bench.search_engines $(ARGS)

bench-diagnose: setup ## diagnoses of real logs and recorded jobs, MB/s beside ripgrep, hostile texts; ARGS="--cases FILE" adds cases
	$(BIN)/python -m tests.bench.diagnose_logs $(ARGS)
	$(BIN)/python -m tests.bench.stories

bench-service: setup ## the service under load, beside an endpoint that does nothing; takes some minutes
	$(BIN)/python -m tests.bench.service $(ARGS)

bench-capture: setup ## seconds to capture a hanging job, the culprit named, what it costs a running job; ARGS="--ranks 8 --times 10"
	$(BIN)/python -m tests.bench.capture $(ARGS)

decision: setup ## fit what makes a hit an answer; prints weights, curves and reliability; ARGS="--cases FILE" adds threads
	$(BIN)/python -m tests.bench.decision $(ARGS)

confusion: setup ## run every control arm and diagnose what it left; draws docs/confusion.svg
	$(BIN)/python -m tests.bench.confusion

healthy: setup ## record what healthy jobs print; PYTHON_OF=an environment with the training libraries
	$(BIN)/python tests/healthy/record.py

stories: setup ## record jobs that fail in chosen ways; JOBS="name ..." for some, STORY_PYTHONS="2.13=/x/bin/python,..." their environments
	$(BIN)/python -m tests.stories.record $(JOBS)

matrix: setup ## verify with releases of torch and of libraries, each in an environment (5 GB, removed); RELEASES="2.5.1" MONTHS="2024-12"
	$(BIN)/python -m tests.bench.releases
	$(BIN)/python -m tests.bench.libraries

wordings: setup ## look up the text of each signature in the releases that may print it; PACKAGES="torch peft"
	$(BIN)/python -m tests.bench.wordings

gpu-check: setup ## everything a machine with GPUs can prove, as one report file
	$(BIN)/python -m tests.bench.gpu_check

clean:
	rm -rf .venv build dist *.egg-info
