package account

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// SwitchUser changes the user of this process, and of every program that it starts, for good: no program, whatever its
// mode, can become root again. It does nothing if user is empty or the process does not run as root.
func SwitchUser(user string) error {
	if user == "" || os.Geteuid() != 0 {
		return nil
	}
	uid, gid, err := parseUser(user)
	if err != nil {
		return err
	}
	if _, _, errno := syscall.AllThreadsSyscall6(syscall.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return fmt.Errorf("give up new privileges: %w", errno)
	}
	if err := syscall.Setgroups(nil); err != nil {
		return fmt.Errorf("leave the groups of root: %w", err)
	}
	if err := syscall.Setgid(gid); err != nil {
		return fmt.Errorf("become group %d: %w", gid, err)
	}
	if err := syscall.Setuid(uid); err != nil {
		return fmt.Errorf("become user %d: %w", uid, err)
	}
	return nil
}
