package local

import (
	"bytes"
	"os"
	"strconv"
	"strings"
)

// processInfo is a process of this machine, as /proc describes it.
type processInfo struct {
	pid, parent int
	start       string // start time; together with the pid it is unique since boot
	dead        bool   // a zombie
	stopped     bool   // stopped by a signal
}

// findProcess returns a process by its pid.
func findProcess(pid int) (processInfo, bool) {
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return processInfo{}, false
	}
	// The name in parentheses may contain any character, so fields are counted from its end.
	end := bytes.LastIndexByte(raw, ')')
	if end < 0 {
		return processInfo{}, false
	}
	f := strings.Fields(string(raw[end+1:]))
	if len(f) < 20 {
		return processInfo{}, false
	}
	parent, err := strconv.Atoi(f[1])
	if err != nil {
		return processInfo{}, false
	}
	return processInfo{pid: pid, parent: parent, start: f[19], dead: f[0] == "Z" || f[0] == "X", stopped: f[0] == "T"}, true
}

// listProcesses returns all processes.
func listProcesses() []processInfo {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var out []processInfo
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if p, ok := findProcess(pid); ok {
			out = append(out, p)
		}
	}
	return out
}

// hasMarker reports whether a process was started with a variable. It reports false for processes of other users.
func (p processInfo) hasMarker(variable string) bool {
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(p.pid) + "/environ")
	if err != nil {
		return false
	}
	return bytes.HasPrefix(raw, []byte(variable+"\x00")) || bytes.Contains(raw, []byte("\x00"+variable+"\x00"))
}
