//go:build !linux

package watch

// mapped returns nil: there is no tracker on this system, and snapshots look at all files.
func mapped(string, []int) []string { return nil }
