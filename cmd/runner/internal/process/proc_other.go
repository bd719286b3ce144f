//go:build !linux

package process

import "errors"

// errNoSubreaper is returned because only Linux lets a process adopt the orphans of its descendants.
var errNoSubreaper = errors.New("this system has no subreaper: processes that leave the process group of an agent are not ended with the agent")

// becomeSubreaper returns errNoSubreaper.
func becomeSubreaper() error { return errNoSubreaper }

// listProcesses returns nil on this system: processes are ended only by their process group.
func listProcesses() []processInfo { return nil }

// raiseOOMScore does nothing on this system.
func raiseOOMScore(int) error { return nil }
