PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest soak lint browser docs-screenshots

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.installed ## Train on real data in two processes
	.venv/bin/python examples/digits.py

test: .venv/.installed browser ## Run the test suite
	.venv/bin/python -m pytest

test-oldest: .venv-oldest/.installed browser ## Run the test suite with the oldest supported torch and Lightning
	.venv-oldest/bin/python -m pytest

soak: .venv/.installed ## Train under random faults: ROUNDS=20 MINUTES=10 SEED=... FAULT=... LAUNCHER=...
	.venv/bin/python -m tests.soak --rounds $(or $(ROUNDS),20) --minutes $(or $(MINUTES),10) \
		$(if $(SEED),--seed $(SEED)) $(addprefix --fault ,$(FAULT)) $(addprefix --launcher ,$(LAUNCHER))

lint: .venv/.installed ## Check style and types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

docs-screenshots: .venv/.installed browser ## Train, make the page of the run, and take the pictures of it in docs/
	.venv/bin/python -m docs.make_screenshots

# The pages that we make are tested in a real browser.
browser:
	@command -v chromium chromedriver >/dev/null || $(if $(filter-out 0,$(shell id -u)),sudo) sh -c \
		'apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver'

.venv/.installed: constraints.txt pyproject.toml
.venv-oldest/.installed: constraints-oldest.txt pyproject.toml

.venv/.installed .venv-oldest/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -c $< -e '.[test,lint,bench,docs]'
	touch $@
