//go:build !linux

package volume

import "errors"

// Make returns errors.ErrUnsupported: volumes of a fixed size need the loop devices of Linux.
func Make(Limits, []Volume) error { return errors.ErrUnsupported }

// Attach returns errors.ErrUnsupported, as Make does.
func Attach([]Volume) error { return errors.ErrUnsupported }

// Sweep returns errors.ErrUnsupported, as Make does.
func Sweep() (int, error) { return 0, errors.ErrUnsupported }

func isFull(error) bool { return false }
