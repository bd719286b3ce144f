# The whole interface of the repository: run `make help`.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# What scripts/install puts here comes before what the machine has.
export PATH := $(CURDIR)/.tools/bin:$(CURDIR)/.tools/agents/node_modules/.bin:$(PATH)

ARGS ?=

.PHONY: help demo up images test race attacks matrix chaos lint generate verify bench dependencies record install

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## A query from start to end on the built-in agent and a scripted model; needs only Go
	@scripts/demo

up: ## Run everything in one process (ARGS="--listen 127.0.0.1:7700 …")
	@scripts/build
	@bin/spool up $(ARGS)

images: ## Make the images of deploy/compose.yaml, and the base images that no registry gives
	@scripts/images $(ARGS)

test: ## Run all tests (ARGS="-run Name"); with CI=true install what is missing and fail on any skip
	@scripts/test $(ARGS)

race: ## Run the tests of the log, the bus, the services and the runner with the race detector (ARGS="-run Name")
	@scripts/test --raced $(ARGS)

test-modal: ## Run the suite of sandbox providers against Modal itself, with the token in SPOOL_MODAL_TOKEN_ID and SPOOL_MODAL_TOKEN_SECRET
	@scripts/test-modal $(ARGS)

attacks: ## Run the attacks that docs/security.md names, each by the test that holds a promise
	@scripts/attacks $(ARGS)

matrix: ## Look at the past of a session of every agent in every way, and print a table (ARGS="-run TestMatrix/codex")
	@scripts/matrix $(ARGS)

chaos: ## Kill and freeze real processes while clients work, then check every promise (ARGS="-seed 7", ARGS="-long" for an hour)
	@scripts/chaos $(ARGS)

lint: ## Check style and import rules with golangci-lint (installed into .tools when missing)
	@scripts/lint

generate: ## Make the generated code and documents again
	@scripts/generate

verify: ## Build each module by itself, vet, gofmt, generate without a difference, lint
	@scripts/verify

bench: ## Run the benchmarks of test/bench into docs/performance.md (ARGS="append" runs one and prints it)
	@scripts/bench $(ARGS)

dependencies: ## Look for known vulnerabilities, where their database is reachable, and write what programs and images are made of into bin/sbom
	@scripts/dependencies $(ARGS)

record: ## Record the CLIs of the agents again and write their golden files (ARGS="-run TestConformance/goldens/two-turns")
	@scripts/record $(ARGS)

install: ## Put into .tools, or install, what the tests need: Postgres, the agents' CLIs, golangci-lint
	@scripts/install
