// Package queries holds the statements with which the gateway reads Postgres. sqlc generates a method for each statement in the .sql
// files, and checks the statements against the migrations of the read models.
package queries

// sqlc is built without cgo, because its parser in C takes minutes to compile; the same parser in WebAssembly does not.
//go:generate env CGO_ENABLED=0 GOFLAGS= GOWORK=off go run github.com/sqlc-dev/sqlc/cmd/sqlc@v1.31.1 generate
