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
	start       string // when it began, to the second
	dead        bool   // a zombie
	stopped     bool   // by a signal
	command     string // with its environment, as far as the system shows it
}

// find looks a process up.
func find(pid int) (proc, bool) {
	for _, p := range list("-p", strconv.Itoa(pid)) {
		if p.pid == pid {
			return p, true
		}
	}
	return proc{}, false
}

// processes lists all that are there.
func processes() []proc { return list("-ax") }

func list(which ...string) []proc {
	args := append([]string{"-E", "-ww", "-o", "pid=,ppid=,stat=,lstart=,command="}, which...)
	raw, err := exec.Command("ps", args...).Output()
	if err != nil {
		return nil // none of that pid
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

// marked tells whether a process was started with a variable.
func (p proc) marked(variable string) bool { return strings.Contains(p.command, " "+variable+" ") }
