package cli_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

// sleepers returns the processes that sleep in a folder.
func sleepers(dir string) (pids []int) {
	paths, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range paths {
		cwd, err := os.Readlink(p + "/cwd")
		if err != nil || cwd != dir {
			continue
		}
		if line, err := os.ReadFile(p + "/cmdline"); err == nil && strings.HasPrefix(string(line), "sleep\x00") {
			pid, _ := strconv.Atoi(filepath.Base(p))
			pids = append(pids, pid)
		}
	}
	return pids
}

// children returns the child processes of a process, including zombies.
func children(of int) (pids []int) {
	paths, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, p := range paths {
		stat, err := os.ReadFile(p)
		if err != nil {
			continue
		}
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if fields[1] == strconv.Itoa(of) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(p)))
			pids = append(pids, pid)
		}
	}
	return pids
}
