//go:build !linux

package process

import "errors"

// errNoSubreaper is returned because only Linux lets a process adopt the orphans of its descendants.
var errNoSubreaper = errors.New("not possible on this system: what leaves an agent's process group is not ended with it")

// becomeSubreaper returns errNoSubreaper.
func becomeSubreaper() error { return errNoSubreaper }

// listProcesses returns nil on this system: processes are ended only by their process group.
func listProcesses() []processInfo { return nil }

// raiseOOMScore does nothing on this system.
func raiseOOMScore(int) error { return nil }
