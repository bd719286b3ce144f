package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// clockTick is the unit of the processor times in /proc/PID/stat. Linux uses this value for all programs.
const clockTick = 10 * time.Millisecond

// Process is a process of this machine, with the processor time that it has used.
type Process struct {
	PID, Parent int
	CPU         time.Duration // processor time, also of its children that have ended and that it has waited for
}

// Processes returns the process with the id root and all its descendants. It works on Linux only.
func Processes(root int) ([]Process, error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	children := map[int][]Process{}
	var tree []Process
	for _, file := range files {
		raw, err := os.ReadFile(file) //nolint:gosec // a file of the kernel
		if err != nil {
			continue // the process has ended
		}
		p, err := parseProcStat(raw)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if p.PID == root {
			tree = append(tree, p)
		}
		children[p.Parent] = append(children[p.Parent], p)
	}
	if len(tree) == 0 {
		return nil, fmt.Errorf("/proc has no process %d", root)
	}
	for i := 0; i < len(tree); i++ {
		tree = append(tree, children[tree[i].PID]...)
	}
	return tree, nil
}

// parseProcStat parses the content of /proc/PID/stat. The name of the program, in parentheses, may contain spaces and
// parentheses.
func parseProcStat(raw []byte) (Process, error) {
	pid, _, found := bytes.Cut(raw, []byte(" "))
	end := bytes.LastIndexByte(raw, ')')
	if !found || end < 0 {
		return Process{}, errors.New("not in the format of the kernel")
	}
	f := strings.Fields(string(raw[end+1:])) // from the third field, the state
	if len(f) < 15 {
		return Process{}, fmt.Errorf("%d fields", len(f))
	}
	var err error
	number := func(s string) int {
		n, e := strconv.Atoi(s)
		err = errors.Join(err, e)
		return n
	}
	p := Process{PID: number(string(pid)), Parent: number(f[1])}
	// utime, stime, cutime, cstime
	p.CPU = clockTick * time.Duration(number(f[11])+number(f[12])+number(f[13])+number(f[14]))
	return p, err
}

// TotalCPU returns the sum of the processor time that the processes of the list have used.
func TotalCPU(list []Process) (sum time.Duration) {
	for _, p := range list {
		sum += p.CPU
	}
	return sum
}

// TotalMemory returns the resident memory of processes, in bytes. A page that several processes share is counted once,
// in equal parts, if this process may read these values (Pss), and otherwise in each process.
func TotalMemory(list []Process) (sum uint64) {
	for _, p := range list {
		for _, f := range []struct{ file, name string }{{"smaps_rollup", "Pss:"}, {"status", "VmRSS:"}} {
			raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", p.PID, f.file))
			if n, ok := procFileBytes(string(raw), f.name); err == nil && ok {
				sum += n
				break
			}
		}
	}
	return sum
}

// procFileBytes returns the value with the given name, in bytes, from the content of a /proc file of "name: value kB"
// lines. It returns false if the file does not have it.
func procFileBytes(file, name string) (uint64, bool) {
	for line := range strings.Lines(file) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == name {
			n, err := strconv.ParseUint(f[1], 10, 64)
			return n << 10, err == nil
		}
	}
	return 0, false
}

// SplitSubtree splits a list of processes into those that are the process root or its descendants (in), and the others.
// Parents must come before their children.
func SplitSubtree(list []Process, root int) (in, others []Process) {
	ids := []int{root}
	for _, p := range list { // parents come before their children
		if p.PID == root || slices.Contains(ids, p.Parent) {
			ids, in = append(ids, p.PID), append(in, p)
		} else {
			others = append(others, p)
		}
	}
	return in, others
}

// MachineCPU returns the processor time that all processes of this machine have used since it started. It includes the
// time that other virtual machines used on the same processors (steal). It works on Linux only.
func MachineCPU() (sum time.Duration, err error) {
	raw, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(raw), "\n")
	f := strings.Fields(line) // cpu user nice system idle iowait irq softirq steal guest guest_nice; guest is part of user
	if len(f) < 9 || f[0] != "cpu" {
		return 0, fmt.Errorf("/proc/stat begins with %q", line)
	}
	for _, i := range []int{1, 2, 3, 6, 7, 8} {
		n, err := strconv.Atoi(f[i])
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		sum += clockTick * time.Duration(n)
	}
	return sum, nil
}
