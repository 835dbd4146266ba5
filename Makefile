PYTHON ?= python3
# For two cores: programs of the tests use two processes each, and wait for a good part of their time.
WORKERS ?= 4
# What `make test-next` puts over the versions of constraints.txt.
NEXT ?= torch
NEXT_torch = --pre --index-url https://download.pytorch.org/whl/nightly/cpu torch
NEXT_lightning = 'lightning @ git+https://github.com/Lightning-AI/pytorch-lightning@master'
# Tests start hundreds of processes; none has to compile again what another one has compiled.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

SPHINX = -m sphinx --quiet --fail-on-warning --keep-going -c docs -d build/doctrees

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-all test-random test-oldest test-newest test-next soak fuzz docs links docs-screenshots lint format hooks dist browser
.NOTPARALLEL:

help: ## List the targets
	@awk -F ':.*## ' '/^##@ / {print "\n" substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Start

demo: .venv/.demo ## Train on real data in two processes
	@echo 'Training on handwritten digits in two processes, with strategy="bucketddp": examples/digits.py'
	@.venv/bin/python examples/digits.py

##@ Test

test: .venv/.test browser ## Run the tests of every feature: ten minutes on two cores
	.venv/bin/python $(PYTEST) -m "not long"

test-long: .venv/.test browser ## Run the tests that `make test` leaves out: those that repeat, or install, or soak
	.venv/bin/python $(PYTEST) -m long

test-all: test test-long ## Run all tests

test-random: .venv/.test browser ## Run the tests in a random order of files, and of the tests in each: SEED=...
	.venv/bin/python $(PYTEST) -m "not long" --shuffle=$(or $(SEED),$(shell date +%s))

test-oldest: .venv-oldest/.test browser ## Run the tests with the oldest supported torch and Lightning
	.venv-oldest/bin/python $(PYTEST) -m "not long"

test-newest: .venv-newest/.test browser ## Run the tests with the newest releases of torch and Lightning, and of all that we depend on
	.venv-newest/bin/python $(PYTEST) -m "not long"

test-next: .venv-next/.test browser ## Run the tests with what comes next: NEXT=torch (nightly) or NEXT=lightning (its main branch)
	.venv-next/bin/pip install -qq --disable-pip-version-check --upgrade $(NEXT_$(NEXT))
	.venv-next/bin/python $(PYTEST) -m "not long"

soak: .venv/.test ## Train under random faults: ROUNDS=20 MINUTES=10 JOBS=1 SEED=... FAULT=... LAUNCHER=... RESULT=...
	.venv/bin/python -m tests.soak --rounds $(or $(ROUNDS),20) --minutes $(or $(MINUTES),10) --jobs $(or $(JOBS),1) \
		$(if $(SEED),--seed $(SEED)) $(addprefix --fault ,$(FAULT)) $(addprefix --launcher ,$(LAUNCHER)) \
		$(if $(RESULT),--result $(RESULT))

fuzz: .venv/.test ## Draw programs and compare with ddp: MINUTES=10 SEED=... DEVICE=cpu|cuda RESULT=...
	.venv/bin/python -m tests.fuzz --minutes $(or $(MINUTES),10) --verbose $(if $(SEED),--seed $(SEED)) \
		$(if $(DEVICE),--device $(DEVICE)) $(if $(RESULT),--result $(RESULT))

##@ Change

lint: .venv/.lint ## Check style, types, spelling, and the files in .github
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/codespell
	.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml

format: .venv/.lint ## Lay the code out, and repair what ruff can
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

hooks: .venv/.lint ## Have git check style and types before each commit
	.venv/bin/pre-commit install

##@ Document

docs: .venv/.docs ## Draw the house, and build the documents as a site, site/index.html; a warning is an error
	.venv/bin/python -m docs.make_house
	.venv/bin/python $(SPHINX) . site
	@echo 'Open site/index.html'

links: .venv/.docs ## Ask every web address in the documents whether it answers; needs the network
	.venv/bin/python $(SPHINX) -b linkcheck . build/links

docs-screenshots: .venv/.test browser ## Train, make the page of the run, and take the pictures of it in docs/
	.venv/bin/python -m docs.make_screenshots

##@ Release

dist: .venv/.dist ## Build sdist and wheel, check both, and try the wheel in an environment of its own
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt .venv/bin/python -m build
	.venv/bin/twine check --strict dist/*
	.venv/bin/python -m tests.dist $(TAG)

# The pages that we make are tested in a real browser.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
		echo 'Installing a browser, in which the pages of reports are tested'; \
		$(if $(filter-out 0,$(shell id -u)),sudo) sh -c 'apt-get update -qq && \
			apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null'; }

# Each target installs the extra of its name in pyproject.toml, once, in versions that are known to work together.
define install
@echo "Installing the package and what \`make $*\` needs into $(@D); this is done once, and may take minutes"
@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
@$(@D)/bin/pip install -qq --disable-pip-version-check -c $< -e '.[$*]'
@touch $@
endef

.venv/.%: constraints.txt pyproject.toml
	$(install)

.venv-oldest/.%: constraints-oldest.txt pyproject.toml
	$(install)

# Without the pins of what the package depends on, and of what those pin themselves.
build/constraints-newest.txt: constraints.txt
	@mkdir -p $(@D)
	@grep -viE '^(torch|torchmetrics|lightning|pytorch-lightning|lightning-utilities|fsspec|numpy|rich|sympy)==' $< > $@

.venv-newest/.%: build/constraints-newest.txt pyproject.toml
	$(install)

.venv-next/.%: constraints.txt pyproject.toml
	$(install)
