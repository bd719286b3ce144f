//go:build !linux

package main

import "errors"

// adoptOrphans returns an error: on Linux, it makes this program the parent of descendants whose own parent ends, and no
// other system supports this.
func adoptOrphans(bool) error {
	return errors.New("chaos needs Linux: it looks into /proc for what sandboxes leave")
}
