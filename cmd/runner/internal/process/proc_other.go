//go:build !linux

package process

import "errors"

// errNoReaper: only Linux lets a process adopt the orphans of its descendants.
var errNoReaper = errors.New("not possible on this system: what leaves an agent's process group is not ended with it")

func becomeSubreaper() error { return errNoReaper }

// snapshot knows nothing here: processes are ended by their group alone.
func snapshot() []proc { return nil }

// sacrifice has nothing to do here.
func sacrifice(int) error { return nil }
