//go:build !linux

package main

import "errors"

func adoptOrphans(bool) error {
	return errors.New("chaos needs Linux: it looks into /proc for what sandboxes leave")
}
