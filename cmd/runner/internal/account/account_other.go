//go:build !linux

package account

// SwitchUser does nothing on this system: sandboxes run Linux.
func SwitchUser(string) error { return nil }
