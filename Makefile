PYTHON ?= python3
# For two cores: programs of the tests use two processes each, and wait for a good part of their time.
WORKERS ?= 3
# Tests start hundreds of processes; none has to compile again what another one has compiled.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-all test-oldest soak docs docs-screenshots lint browser
.NOTPARALLEL:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.demo ## Train on real data in two processes
	@echo 'Training on handwritten digits in two processes, with strategy="bucketddp": examples/digits.py'
	@.venv/bin/python examples/digits.py

test: .venv/.test browser ## Run the tests of every feature: ten minutes on two cores
	.venv/bin/python $(PYTEST) -m "not long"

test-long: .venv/.test browser ## Run the tests that `make test` leaves out: those that repeat, or install, or soak
	.venv/bin/python $(PYTEST) -m long

test-all: test test-long ## Run all tests

test-oldest: .venv-oldest/.test browser ## Run all tests with the oldest supported torch and Lightning
	.venv-oldest/bin/python $(PYTEST)

soak: .venv/.test ## Train under random faults: ROUNDS=20 MINUTES=10 JOBS=1 SEED=... FAULT=... LAUNCHER=... RESULT=...
	.venv/bin/python -m tests.soak --rounds $(or $(ROUNDS),20) --minutes $(or $(MINUTES),10) --jobs $(or $(JOBS),1) \
		$(if $(SEED),--seed $(SEED)) $(addprefix --fault ,$(FAULT)) $(addprefix --launcher ,$(LAUNCHER)) \
		$(if $(RESULT),--result $(RESULT))

docs: .venv/.docs ## Build the documents as a site; open site/index.html
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

lint: .venv/.lint ## Check style and types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

docs-screenshots: .venv/.test browser ## Train, make the page of the run, and take the pictures of it in docs/
	.venv/bin/python -m docs.make_screenshots

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
