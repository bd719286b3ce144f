//go:build !linux

package process

// MemoryGroup is not known here.
type MemoryGroup struct{}

// FindMemoryGroup finds none here.
func FindMemoryGroup(string) MemoryGroup { return MemoryGroup{} }

// Kills cannot be told here.
func (MemoryGroup) Kills() (uint64, bool) { return 0, false }

// Own cannot be told here.
func (MemoryGroup) Own() bool { return false }
