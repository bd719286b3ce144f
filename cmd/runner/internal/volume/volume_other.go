//go:build !linux

package volume

import "errors"

// Make is only supported on Linux.
func Make(Limits, []Volume) error { return errors.ErrUnsupported }

// Attach is only supported on Linux.
func Attach([]Volume) error { return errors.ErrUnsupported }

// Sweep is only supported on Linux.
func Sweep() (int, error) { return 0, errors.ErrUnsupported }

func isFull(error) bool { return false }
