//go:build !linux

package local

import (
	"os/exec"
	"strconv"
	"strings"
)

// proc is a process of this machine.
type proc struct {
	pid, parent int
	start       string // start time in seconds
	dead        bool   // a zombie
	stopped     bool   // stopped by a signal
	command     string // command line with the environment, as far as the system shows it
}

// find returns a process by its pid.
func find(pid int) (proc, bool) {
	for _, p := range list("-p", strconv.Itoa(pid)) {
		if p.pid == pid {
			return p, true
		}
	}
	return proc{}, false
}

// processes returns all processes.
func processes() []proc { return list("-ax") }

func list(which ...string) []proc {
	args := append([]string{"-E", "-ww", "-o", "pid=,ppid=,stat=,lstart=,command="}, which...)
	raw, err := exec.Command("ps", args...).Output()
	if err != nil {
		return nil // no process has the pid
	}
	var out []proc
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
		out = append(out, proc{
			pid: pid, parent: parent, start: strings.Join(f[3:8], " "), dead: strings.HasPrefix(f[2], "Z"), stopped: strings.HasPrefix(f[2], "T"),
			command: " " + strings.Join(f[8:], " ") + " ",
		})
	}
	return out
}

// marked reports whether a process was started with a variable.
func (p proc) marked(variable string) bool { return strings.Contains(p.command, " "+variable+" ") }
