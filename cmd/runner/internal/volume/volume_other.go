//go:build !linux

package volume

import "errors"

// MakeFileSystems returns errors.ErrUnsupported: volumes of a fixed size need the loop devices of Linux.
func MakeFileSystems(Limits, []Volume) error { return errors.ErrUnsupported }

// AttachFileSystems returns errors.ErrUnsupported, as MakeFileSystems does.
func AttachFileSystems([]Volume) error { return errors.ErrUnsupported }

// DetachUnusedDevices returns errors.ErrUnsupported, as MakeFileSystems does.
func DetachUnusedDevices() (int, error) { return 0, errors.ErrUnsupported }

// isNoSpace returns false on this system, where no volume is created.
func isNoSpace(error) bool { return false }
