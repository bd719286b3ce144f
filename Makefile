# The interface of the repository; `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Programs that scripts/install installed come before those of the machine.
export PATH := $(CURDIR)/.tools/bin:$(CURDIR)/.tools/agents/node_modules/.bin:$(PATH)

ARGS ?=

.PHONY: help demo up images test race slow attacks matrix approvals chaos lint generate verify bench dependencies record install

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## Run a query from start to end with the built-in agent and a scripted model; needs only Go
	@scripts/demo

up: ## Run everything in one process (ARGS="--listen 127.0.0.1:7700 …")
	@scripts/build
	@bin/spool up $(ARGS)

images: ## Build the images of deploy/compose.yaml, and the base images that cannot be pulled
	@scripts/images $(ARGS)

test: ## Run all tests (ARGS="-run Name"); with CI=true install missing programs and fail on unexpected skips
	@scripts/test $(ARGS)

race: ## Run the tests of the log, the bus, the services and the runner with the race detector (ARGS="-run Name")
	@scripts/test --raced $(ARGS)

slow: ## Run make race and make test with half of the processor time (ARGS="go test ./…" runs that instead); needs root
	@scripts/slow $(ARGS)

test-modal: ## Run the suite of sandbox providers against Modal itself, with the token in SPOOL_MODAL_TOKEN_ID and SPOOL_MODAL_TOKEN_SECRET
	@scripts/test-modal $(ARGS)

attacks: ## Run the attacks on the promises of docs/security.md: the tests that it names
	@scripts/attacks $(ARGS)

matrix: ## Read the past of a session of every agent in every way, and print a table (ARGS="-run TestMatrix/codex")
	@scripts/matrix $(ARGS)

approvals: ## Let people decide what every agent does, in the scenario of docs/approvals.md, and print a table (ARGS="-run TestApprovals/codex")
	@scripts/approvals $(ARGS)

chaos: ## Kill and freeze real processes while clients work, then check every promise (ARGS="-seed 7", ARGS="-long" for an hour)
	@scripts/chaos $(ARGS)

lint: ## Check style and import rules with golangci-lint (installed into .tools when missing)
	@scripts/lint

generate: ## Generate the generated code and documents
	@scripts/generate

verify: ## Check that each module builds alone, vet, gofmt, generated files, lint, retired words, references of documents
	@scripts/verify

bench: ## Run the benchmarks of test/bench and write docs/performance.md (ARGS="append" runs one and prints it)
	@scripts/bench $(ARGS)

dependencies: ## Check for known vulnerabilities, if their database is reachable, and write bills of materials to bin/sbom
	@scripts/dependencies $(ARGS)

record: ## Record the CLIs of the agents again and write their golden files (ARGS="-run TestConformance/goldens/two-turns")
	@scripts/record $(ARGS)

install: ## Install the programs that tests need, into .tools where possible: Postgres, the agents' CLIs, golangci-lint
	@scripts/install
