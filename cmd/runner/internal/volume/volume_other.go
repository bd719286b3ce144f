//go:build !linux

package volume

import "errors"

// Make is for Linux.
func Make(Limits, []Volume) error { return errors.ErrUnsupported }

// Attach is for Linux.
func Attach([]Volume) error { return errors.ErrUnsupported }

// Sweep is for Linux.
func Sweep() (int, error) { return 0, errors.ErrUnsupported }

func isFull(error) bool { return false }
