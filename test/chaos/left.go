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

// machineProcess is a process of this machine, as /proc lists it.
type machineProcess struct {
	pid, parent int
	dead        bool // the process has ended, and its parent has not waited for it
}

// listProcesses returns all processes of this machine, except those that end meanwhile.
func listProcesses() (list []machineProcess, err error) {
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
		list = append(list, machineProcess{pid, parent, fields[0] == "Z" || fields[0] == "X"})
	}
	return list, nil
}

// descendants returns the ids of the processes in list that are children, grandchildren and so on of the processes
// roots. It does not return roots.
func descendants(list []machineProcess, roots ...int) (pids []int) {
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

// usesFolder reports whether a process uses a folder: its arguments or its environment name the folder, or its working
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

// testProcesses returns the ids of the processes in list that belong to the chaos test itself and not to a sandbox:
// this program, the services and servers that it started, and the processes that Postgres and NATS started.
func (c *cluster) testProcesses(list []machineProcess) []int {
	own := []int{os.Getpid()}
	for _, p := range c.allProcesses() {
		own = append(own, p.pid())
		if p.name == "postgres" || p.name == "nats" {
			own = append(own, descendants(list, p.pid())...)
		}
	}
	return own
}

// remainingSandboxProcesses returns the ids of the processes that sandboxes have started and that still run. These are
// the processes that use the executors' folder, and the descendants of this program, which adopts the orphans of the
// executors. The result does not depend on what Spool itself knows about sandboxes.
func (c *cluster) remainingSandboxProcesses() (pids []int, err error) {
	list, err := listProcesses()
	if err != nil {
		return nil, err
	}
	own, descendants := c.testProcesses(list), descendants(list, os.Getpid())
	for _, t := range list {
		if !t.dead && !slices.Contains(own, t.pid) && (slices.Contains(descendants, t.pid) || usesFolder(t.pid, c.executorFolder())) {
			pids = append(pids, t.pid)
		}
	}
	return pids, nil
}

// remainingSessionFolders returns the folders of sessions that still exist in the executors' folder: workspaces,
// sandboxes and the state of agents.
func (c *cluster) remainingSessionFolders() ([]string, error) {
	return filepath.Glob(filepath.Join(c.executorFolder(), "*", "[a-z][a-z][a-z]_*"))
}

// reapOrphans waits for the ended processes that this program has adopted, as process 1 does on other machines.
func (c *cluster) reapOrphans() error {
	list, err := listProcesses()
	if err != nil {
		return err
	}
	own := c.testProcesses(list)
	for _, t := range list {
		if t.dead && t.parent == os.Getpid() && !slices.Contains(own, t.pid) {
			if _, err := syscall.Wait4(t.pid, nil, syscall.WNOHANG, nil); err != nil && !errors.Is(err, syscall.ECHILD) {
				return err
			}
		}
	}
	return nil
}

// describeProcesses returns the ids and arguments of processes, for messages.
func describeProcesses(pids []int) (list []string) {
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

// killRemainingProcesses ends the processes that sandboxes have started and that still run. Only a failed run leaves
// such processes.
func (c *cluster) killRemainingProcesses() error {
	pids, err := c.remainingSandboxProcesses()
	errs := []error{err}
	for _, pid := range pids {
		errs = append(errs, ignoreEndedProcess(syscall.Kill(pid, syscall.SIGKILL)))
	}
	return errors.Join(errs...)
}
