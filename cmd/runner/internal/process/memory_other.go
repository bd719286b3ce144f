//go:build !linux

package process

// MemoryGroup limits nothing, because memory groups are not supported on this system.
type MemoryGroup struct{}

// FindMemoryGroup returns an empty group.
func FindMemoryGroup(string) MemoryGroup { return MemoryGroup{} }

// OOMKills returns false: the number is unknown.
func (MemoryGroup) OOMKills() (uint64, bool) { return 0, false }

// IsExclusive returns false.
func (MemoryGroup) IsExclusive() bool { return false }
