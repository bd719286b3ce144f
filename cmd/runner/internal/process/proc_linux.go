package process

import (
	"bytes"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// becomeSubreaper makes the kernel give this process the orphans of its descendants as children.
func becomeSubreaper() error {
	if os.Getpid() == 1 {
		return nil
	}
	return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
}

// agentOOMScore is the oom_score_adj of agents, out of 1000: if memory runs out, the kernel kills a process of an agent
// before the runner, whose end would end the sandbox.
const agentOOMScore = "500"

// raiseOOMScore sets a process's oom_score_adj to agentOOMScore, so that the kernel ends it before the runner.
func raiseOOMScore(pid int) error {
	return os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte(agentOOMScore), 0)
}

// listProcesses returns all processes in /proc, without those that end meanwhile.
func listProcesses() []processInfo {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close() //nolint:errcheck // nothing was written
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil
	}
	var out []processInfo
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue
		}
		if p, ok := parseStat(pid, stat); ok {
			out = append(out, p)
		}
	}
	return out
}

// parseStat parses the content of /proc/PID/stat, see proc_pid_stat(5). The name in parentheses may contain any
// character, so the fields are counted from its end; state is the first.
func parseStat(pid int, stat []byte) (processInfo, bool) {
	end := bytes.LastIndexByte(stat, ')')
	if end < 0 {
		return processInfo{}, false
	}
	f := bytes.Fields(stat[end+1:])
	if len(f) < 22 {
		return processInfo{}, false
	}
	num := func(i int) int { n, _ := strconv.Atoi(string(f[i])); return n }
	start, err := strconv.ParseUint(string(f[19]), 10, 64)
	if err != nil {
		return processInfo{}, false
	}
	pages, err := strconv.ParseUint(string(f[21]), 10, 64)
	if err != nil {
		pages = 0
	}
	return processInfo{
		pid: pid, parent: num(1), group: num(2), session: num(3), start: start,
		dead: f[0][0] == 'Z' || f[0][0] == 'X', resident: pages * uint64(os.Getpagesize()), //nolint:gosec // positive
	}, true
}
