// Package api contains the public API, spool/v1, which is generated from spool.proto, and command, the protocol
// between gateways and services.
package api

//go:generate go run ./gen
