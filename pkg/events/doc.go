// Package events defines the vocabulary of the log: ids, event types, commits, the hash chain and subjects. It is
// pure: no I/O, no clock, no randomness; times and entropy are arguments. Everything that reads or writes the log
// uses these definitions.
package events

//go:generate go run ./gen . ../../docs/events.md
