PYTHON ?= python3
PIP_FLAGS ?= --quiet --disable-pip-version-check
BIN := .venv/bin
WORKERS ?= 3
FAST_WORKERS ?= 2

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' Makefile

.PHONY: help demo test test-fast lint check figures docs published bench parity endure gpu interop

$(BIN)/fivefold: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[train,show,web,dev]'
	touch $@

demo: $(BIN)/fivefold  ## from a question to a trained step, predicted next to measured (four minutes)
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

test: $(BIN)/fivefold  ## all tests that a change needs; CPU seconds of each in build/cpu-times.txt, the most at the end
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 30 --durations-min 2 --cpu-times=build/cpu-times.txt

test-fast: $(BIN)/fivefold  ## the tests that start no process and no browser, with few cases and drawn examples
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(FAST_WORKERS) --dist worksteal --durations 10 --fast

lint: $(BIN)/fivefold  ## format, style, spelling, types and imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python -m tests.docs.prose
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test  ## lint and test

.venv-docs/bin/zensical: docs/site/requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install $(PIP_FLAGS) -e . -r docs/site/requirements.txt
	touch $@

figures: $(BIN)/fivefold  ## write the figures that pages quote again (published runs, configs, stacks, tutorials, README)
	FIVEFOLD_FREEZE=1 $(BIN)/python -m pytest --long tests/benchmarks/published/test_accuracy.py
	FIVEFOLD_FREEZE=1 $(BIN)/python -m pytest tests/interop/test_pages.py tests/interop/test_published.py tests/stack/test_page.py
	$(BIN)/python -m tests.docs.questions 0
	$(BIN)/python -m tests.docs.tutorials

docs: .venv-docs/bin/zensical  ## the documentation as a site, build/docs/site/index.html, in an environment of its own
	.venv-docs/bin/python docs/site/pages.py build/docs
	cd build/docs && ../../.venv-docs/bin/zensical build --strict -f mkdocs.yml
	@echo build/docs/site/index.html

published: $(BIN)/fivefold  ## score the predictions against published runs, and compare the pages with the scores
	$(BIN)/python -m benchmarks.published
	$(BIN)/python -m pytest --long tests/benchmarks/published/test_accuracy.py

bench: $(BIN)/fivefold  ## speed of search, training, dry run, traces and page, as ratios; predictions against runs on this computer
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps -r benchmarks/speed/requirements.txt
	$(BIN)/python benchmarks/speed/search.py
	$(BIN)/python benchmarks/speed/bench.py
	$(BIN)/python benchmarks/speed/dry_run.py
	$(BIN)/python benchmarks/speed/traces.py
	$(BIN)/python benchmarks/speed/page.py
	$(BIN)/python -m tests.agree.network --quick --folder runs/network-quick
	$(BIN)/python -m tests.agree.time --groups 2 --each 2 --folder runs/time-quick

parity: $(BIN)/fivefold  ## every layout of the matrix, and 300 drawn ones, against one process (hours; it resumes)
	$(BIN)/python -m tests.agree.parity.matrix --markdown docs/explanation/measurements/003-parity.md
	$(BIN)/python -m tests.agree.parity.drawn --count 300
	$(BIN)/python -m tests.agree.parity.families
	$(BIN)/python -m tests.agree.dry_run.drawn --count 300

endure: $(BIN)/fivefold  ## long tests: kills, faults, drawn jobs, layouts, commands, configs and requests (hours; it resumes)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --long
	$(BIN)/python -m tests.endure.kills --kills 200
	$(BIN)/python -m tests.endure.runs --runs 300
	$(BIN)/python -m tests.endure.runs --runs 100 --load 4 --folder runs/endure-busy
	$(BIN)/python -m tests.endure.hosts
	$(BIN)/python -m tests.endure.slurm
	$(BIN)/python -m tests.endure.rows
	$(BIN)/python -m tests.endure.families
	$(BIN)/python -m tests.endure.commands --inputs 20000
	$(BIN)/python -m tests.endure.answers --inputs 2000
	$(BIN)/python -m tests.endure.catalog
	$(BIN)/python -m tests.endure.plans --count 5000
	$(BIN)/python -m tests.endure.bounds --count 2000
	$(BIN)/python -m tests.agree.planned_time
	$(BIN)/python -m tests.endure.formats --count 1700 --broken 500 --searched 8
	$(BIN)/python -m tests.endure.keys --configs 100
	$(BIN)/python -m tests.endure.requests --count 10000
	$(BIN)/python -m tests.endure.documented
	$(BIN)/python -m tests.endure.mutations
	$(BIN)/python -m tests.endure.package
	$(BIN)/python -m tests.examples.notebooks --check

gpu: $(BIN)/fivefold  ## all that needs a GPU, written to docs/explanation/measurements/013-gpu.md (it resumes; GPU="--seconds 540")
	$(BIN)/python -m tests.gpu.run $(GPU)

# What `fivefold write` makes is parsed by the software that it is for, in an environment of its own.
.venv-interop/bin/fivefold: pyproject.toml constraints.txt tests/third_party/requirements.txt
	$(PYTHON) -m venv .venv-interop
	.venv-interop/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[train,show,dev]'
	.venv-interop/bin/python -m pip install $(PIP_FLAGS) --no-deps -r tests/third_party/requirements.txt
	touch $@

interop: .venv-interop/bin/fivefold  ## what `fivefold write` makes, parsed, built and trained by the packages that it is for
	.venv-interop/bin/python -m pytest tests/third_party -W ignore -rs
	.venv-interop/bin/python -m tests.third_party.measured --markdown docs/explanation/measurements/014-interop.md
