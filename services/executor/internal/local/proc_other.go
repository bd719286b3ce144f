//go:build !linux

package local

import (
	"os/exec"
	"strconv"
	"strings"
)

// processInfo describes a process of this machine.
type processInfo struct {
	pid, parent int
	start       string // start time in seconds
	dead        bool   // a zombie
	stopped     bool   // stopped by a signal
	command     string // command line with the environment, as far as the system shows it
}

// findProcess returns a process by its pid.
func findProcess(pid int) (processInfo, bool) {
	for _, p := range psProcesses("-p", strconv.Itoa(pid)) {
		if p.pid == pid {
			return p, true
		}
	}
	return processInfo{}, false
}

// listProcesses returns all processes.
func listProcesses() []processInfo { return psProcesses("-ax") }

// psProcesses returns the processes that the program ps lists for the arguments which.
func psProcesses(which ...string) []processInfo {
	args := append([]string{"-E", "-ww", "-o", "pid=,ppid=,stat=,lstart=,command="}, which...)
	raw, err := exec.Command("ps", args...).Output()
	if err != nil {
		return nil // no process has the pid
	}
	var out []processInfo
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line)
		if len(f) < 9 {
			continue
		}
		pid, err1 := strconv.Atoi(f[0])
		parent, err2 := strconv.Atoi(f[1])
		if err1 != nil || err2 != nil {
			continue
		}
		out = append(out, processInfo{
			pid: pid, parent: parent, start: strings.Join(f[3:8], " "), dead: strings.HasPrefix(f[2], "Z"), stopped: strings.HasPrefix(f[2], "T"),
			command: " " + strings.Join(f[8:], " ") + " ",
		})
	}
	return out
}

// hasMarker reports whether a process was started with a variable.
func (p processInfo) hasMarker(variable string) bool {
	return strings.Contains(p.command, " "+variable+" ")
}
