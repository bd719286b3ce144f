// Package api holds the public API: spool/v1, generated from spool.proto, and
// command, which gateways and services speak among themselves.
package api

//go:generate go run ./gen
