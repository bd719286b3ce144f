# Versions of the tools that are not in a go.mod or package.json. Sourced by scripts/install and scripts/dependencies.
# shellcheck shell=bash disable=SC2034
GOLANGCI_LINT_VERSION=v2.14.0
COMPOSE_VERSION=v5.0.2
GOVULNCHECK_VERSION=v1.9.0
SYFT_VERSION=v1.38.0
