//go:build !linux

package main

import "errors"

// adoptOrphans returns an error, because only Linux supports it.
func adoptOrphans(bool) error {
	return errors.New("chaos needs Linux: it looks into /proc for what sandboxes leave")
}
