//go:build !linux

package process

import "errors"

// errNoReaper is returned because only Linux lets a process adopt the orphans of its descendants.
var errNoReaper = errors.New("not possible on this system: what leaves an agent's process group is not ended with it")

// becomeSubreaper returns errNoReaper.
func becomeSubreaper() error { return errNoReaper }

// listProcesses returns nil: processes are ended only by their group.
func listProcesses() []proc { return nil }

// raiseOOMScore does nothing on this system.
func raiseOOMScore(int) error { return nil }
