package server

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
)

// checkProgram checks that this program can run as the server and in sandboxes as the guest: it must be root, have
// nsenter and iptables, and be linked statically, since it must run in every image. It returns the path of the program.
func checkProgram() (string, error) {
	if os.Geteuid() != 0 {
		return "", errors.New("mockmodal must run as root: it sets the firewalls of its containers")
	}
	for _, tool := range []string{"nsenter", "iptables-restore"} {
		if _, err := exec.LookPath(tool); err != nil {
			return "", fmt.Errorf("mockmodal needs nsenter and iptables: %w", err)
		}
	}
	path, err := os.Executable()
	if err != nil {
		return "", err
	}
	file, err := elf.Open(path)
	if err != nil {
		return "", fmt.Errorf("read the program's own file: %w", err)
	}
	defer file.Close() //nolint:errcheck // read only
	for _, segment := range file.Progs {
		if segment.Type == elf.PT_INTERP {
			return "", errors.New("mockmodal is linked dynamically and cannot run in every image: build it with CGO_ENABLED=0")
		}
	}
	return path, nil
}
