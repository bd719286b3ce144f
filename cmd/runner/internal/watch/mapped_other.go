//go:build !linux

package watch

// mappedFiles returns nil on this system, which has no changeTracker: snapshots read all files.
func mappedFiles(string, []int) []string { return nil }
