//go:build !linux

package account

// SwitchUser does nothing: sandboxes run Linux.
func SwitchUser(string) error { return nil }
