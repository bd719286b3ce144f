package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// task is a process of this machine, as /proc lists it.
type task struct {
	pid, parent int
	dead        bool // the process has ended, and its parent has not waited for it
}

// listTasks returns all processes of this machine, except those that end meanwhile.
func listTasks() (list []task, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		if err != nil {
			continue
		}
		// The name of the program, in parentheses, may contain any character.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(fields) < 2 {
			continue
		}
		parent, err := strconv.Atoi(fields[1])
		if err != nil {
			continue
		}
		list = append(list, task{pid, parent, fields[0] == "Z" || fields[0] == "X"})
	}
	return list, nil
}

// descendants returns the processes that descend from one of roots.
func descendants(list []task, roots ...int) (pids []int) {
	known := slices.Clone(roots)
	for grown := true; grown; {
		grown = false
		for _, t := range list {
			if slices.Contains(known, t.parent) && !slices.Contains(known, t.pid) {
				known, grown = append(known, t.pid), true
			}
		}
	}
	return known[len(roots):]
}

// usesFolder reports whether a process uses a folder: its arguments or environment name the folder, or its working
// directory, its program or an open file is in the folder.
func usesFolder(pid int, folder string) bool {
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	for _, name := range []string{"cmdline", "environ"} {
		// The files of a process that has ended, or that belongs to another user, cannot be read.
		if raw, err := os.ReadFile(filepath.Join(proc, name)); err == nil && bytes.Contains(raw, []byte(folder)) {
			return true
		}
	}
	links, err := filepath.Glob(filepath.Join(proc, "fd", "*"))
	if err != nil {
		return false
	}
	for _, link := range append(links, filepath.Join(proc, "cwd"), filepath.Join(proc, "exe")) {
		if target, err := os.Readlink(link); err == nil && strings.HasPrefix(target, folder) {
			return true
		}
	}
	return false
}

// ownProcesses returns the ids of the processes in list that belong to the test itself and not to a sandbox: this program, the services
// and servers that it started, and the processes that Postgres and NATS started.
func (c *cluster) ownProcesses(list []task) []int {
	own := []int{os.Getpid()}
	for _, p := range c.processes() {
		own = append(own, p.pid())
		if p.name == "postgres" || p.name == "nats" {
			own = append(own, descendants(list, p.pid())...)
		}
	}
	return own
}

// leftProcesses returns the processes that sandboxes have left behind: those that use the executors' folder, and those that
// descend from this program, which adopts every orphan of an executor. It does not depend on what Spool itself knows
// about sandboxes.
func (c *cluster) leftProcesses() (pids []int, err error) {
	list, err := listTasks()
	if err != nil {
		return nil, err
	}
	own, descendants := c.ownProcesses(list), descendants(list, os.Getpid())
	for _, t := range list {
		if !t.dead && !slices.Contains(own, t.pid) && (slices.Contains(descendants, t.pid) || usesFolder(t.pid, c.sandboxFolder())) {
			pids = append(pids, t.pid)
		}
	}
	return pids, nil
}

// leftFolders returns what sessions have left in the executors' folder: workspaces, sandboxes and the state of
// agents.
func (c *cluster) leftFolders() ([]string, error) {
	return filepath.Glob(filepath.Join(c.sandboxFolder(), "*", "[a-z][a-z][a-z]_*"))
}

// reap waits for the ended orphans that this program has adopted, as process 1 does elsewhere.
func (c *cluster) reap() error {
	list, err := listTasks()
	if err != nil {
		return err
	}
	own := c.ownProcesses(list)
	for _, t := range list {
		if t.dead && t.parent == os.Getpid() && !slices.Contains(own, t.pid) {
			if _, err := syscall.Wait4(t.pid, nil, syscall.WNOHANG, nil); err != nil && !errors.Is(err, syscall.ECHILD) {
				return err
			}
		}
	}
	return nil
}

// describe returns the ids and arguments of processes, for messages.
func describe(pids []int) (list []string) {
	for _, pid := range pids {
		raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
		if err != nil {
			continue // the process has ended
		}
		command := string(bytes.ReplaceAll(raw, []byte{0}, []byte{' '}))
		list = append(list, strconv.Itoa(pid)+" "+command[:min(len(command), 200)])
	}
	return list
}

// sweep ends the processes that sandboxes left behind, which happens only after a failed run.
func (c *cluster) sweep() error {
	pids, err := c.leftProcesses()
	errs := []error{err}
	for _, pid := range pids {
		errs = append(errs, ignoreGone(syscall.Kill(pid, syscall.SIGKILL)))
	}
	return errors.Join(errs...)
}
