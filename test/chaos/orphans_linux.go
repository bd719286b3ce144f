package main

import "golang.org/x/sys/unix"

// adoptOrphans makes this program the parent of every process whose own parent dies, if it descends from this program.
func adoptOrphans(adopt bool) error {
	var on uintptr
	if adopt {
		on = 1
	}
	return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, on, 0, 0, 0)
}
