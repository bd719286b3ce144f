package main

import "golang.org/x/sys/unix"

// adoptOrphans makes this program the parent of each of its descendants whose own parent ends. With false, the program
// stops to be that.
func adoptOrphans(adopt bool) error {
	var on uintptr
	if adopt {
		on = 1
	}
	return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, on, 0, 0, 0)
}
