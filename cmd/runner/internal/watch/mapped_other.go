//go:build !linux

package watch

// mappedFiles returns nil: there is no changeTracker on this system, and snapshots look at all files.
func mappedFiles(string, []int) []string { return nil }
