# demo: from a question to a trained step, predicted next to measured · test: all tests that a change needs, with the slowest named at the end
# test-fast: the tests that start no process and no browser, with few drawn examples · check: lint and test
# published: scores predictions against published runs, as docs/explanation/how-a-step-costs/published.md has it
# figures: writes the figures of the pages anew, of published runs, configs, stacks, planning questions, tutorials and README; the tests say which are stale
# docs: the pages of docs/ with the reference as a site, in an environment of its own: build/docs/site/index.html
# bench: how fast we are, as ratios; our reading of traces against HolisticTraceAnalysis; two layouts over a link of a known
#        speed (by root: network namespaces); four predictions of step time against the run
# parity: every layout of the matrix, and 300 random ones, against one process (long; it resumes)
# endure: the cases that the tests leave out for time; 200 kills at random moments; 300 short runs, each of which must end well, and 100 on busy cores; a host that is cut off;
#         a Slurm that takes the node away; published rows with changed cells; every key of every Hugging Face family, changed;
#         20,000 random command lines; every catalog model on five machines; 5,000 random jobs, planned; bounds of 2,000 random searches; 500 and more written to each software's config and read back, 100 configs of each with random keys; 10,000 requests of the page; every command of the docs; the package in empty environments; notebooks (hours; kills and runs resume)
# interop: what `fivefold write` makes, parsed, built and trained by the packages that it is for; PyTorch's DDP, FSDP2, tensor and
#          pipeline parallelism on two processes, measured beside what is predicted of them
# gpu: everything that wants a GPU, into docs/explanation/measurements/013-gpu.md: tests, calibration, memory, speed, traces (it resumes; GPU="--seconds 540")
PYTHON ?= python3
PIP_FLAGS ?= --quiet --disable-pip-version-check
BIN := .venv/bin
WORKERS ?= 3

.PHONY: demo test test-fast lint check figures docs published bench parity endure gpu interop

$(BIN)/fivefold: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[train,show,web,dev]'
	touch $@

demo: $(BIN)/fivefold
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

test: $(BIN)/fivefold
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 30 --durations-min 2

test-fast: $(BIN)/fivefold
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 10 --fast

lint: $(BIN)/fivefold
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python -m tests.docs.prose
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

.venv-docs/bin/zensical: docs/site/requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install $(PIP_FLAGS) -e . -r docs/site/requirements.txt
	touch $@

figures: $(BIN)/fivefold
	FIVEFOLD_FREEZE=1 $(BIN)/python -m pytest tests/benchmarks/published/test_accuracy.py tests/interop/test_pages.py tests/interop/test_published.py tests/stack/test_page.py
	$(BIN)/python -m tests.docs.questions 0
	$(BIN)/python -m tests.docs.tutorials

docs: .venv-docs/bin/zensical
	.venv-docs/bin/python docs/site/pages.py build/docs
	cd build/docs && ../../.venv-docs/bin/zensical build --strict -f mkdocs.yml
	@echo build/docs/site/index.html

published: $(BIN)/fivefold
	$(BIN)/python -m benchmarks.published

bench: $(BIN)/fivefold
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps -r benchmarks/speed/requirements.txt
	$(BIN)/python benchmarks/speed/search.py
	$(BIN)/python benchmarks/speed/bench.py
	$(BIN)/python benchmarks/speed/dry_run.py
	$(BIN)/python benchmarks/speed/traces.py
	$(BIN)/python benchmarks/speed/page.py
	$(BIN)/python -m tests.agree.network --quick --folder runs/network-quick
	$(BIN)/python -m tests.agree.time --groups 2 --each 2 --folder runs/time-quick

parity: $(BIN)/fivefold
	$(BIN)/python -m tests.agree.parity.matrix --markdown docs/explanation/measurements/003-parity.md
	$(BIN)/python -m tests.agree.parity.drawn --count 300
	$(BIN)/python -m tests.agree.parity.families
	$(BIN)/python -m tests.agree.dry_run.drawn --count 300

endure: $(BIN)/fivefold
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --long
	$(BIN)/python -m tests.endure.kills --kills 200
	$(BIN)/python -m tests.endure.runs --runs 300
	$(BIN)/python -m tests.endure.runs --runs 100 --load 4 --folder runs/endure-busy
	$(BIN)/python -m tests.endure.hosts
	$(BIN)/python -m tests.endure.slurm
	$(BIN)/python -m tests.endure.rows
	$(BIN)/python -m tests.endure.families
	$(BIN)/python -m tests.endure.commands --inputs 20000
	$(BIN)/python -m tests.endure.catalog
	$(BIN)/python -m tests.endure.plans --count 5000
	$(BIN)/python -m tests.endure.bounds --count 2000
	$(BIN)/python -m tests.endure.formats --count 1700 --broken 500 --searched 8
	$(BIN)/python -m tests.endure.requests --count 10000
	$(BIN)/python -m tests.endure.documented
	$(BIN)/python -m tests.endure.package
	$(BIN)/python -m tests.examples.notebooks --check

gpu: $(BIN)/fivefold
	$(BIN)/python -m tests.gpu.run $(GPU)

# What `fivefold write` makes is parsed by the software that it is for, in an environment of its own.
.venv-interop/bin/fivefold: pyproject.toml constraints.txt tests/third_party/requirements.txt
	$(PYTHON) -m venv .venv-interop
	.venv-interop/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[train,show,dev]'
	.venv-interop/bin/python -m pip install $(PIP_FLAGS) --no-deps -r tests/third_party/requirements.txt
	touch $@

interop: .venv-interop/bin/fivefold
	.venv-interop/bin/python -m pytest tests/third_party -W ignore -rs
	.venv-interop/bin/python -m tests.third_party.measured --markdown docs/explanation/measurements/014-interop.md
