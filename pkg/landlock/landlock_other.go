//go:build !linux

package landlock

import "os/exec"

// ABI returns 0, because only Linux has Landlock.
func ABI() int { return 0 }

// Start returns ErrUnsupported.
func (Rules) Start(*exec.Cmd, string, ...string) error { return ErrUnsupported }

// Exec returns ErrUnsupported.
func Exec([]string) error { return ErrUnsupported }
