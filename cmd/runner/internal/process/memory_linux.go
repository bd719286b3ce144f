package process

import (
	"bufio"
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// MemoryGroup is the control group that limits the memory of this process.
type MemoryGroup struct {
	file string // file with the kernel's counter; "" if there is none
	own  bool
}

// FindMemoryGroup finds the cgroup that limits the memory of this process, in the hierarchies of cgroup version 1 or 2
// that are mounted below root ("" for /).
func FindMemoryGroup(root string) MemoryGroup {
	g := MemoryGroup{own: os.Getpid() == 1}
	raw, err := os.ReadFile(filepath.Join(root, "/proc/self/cgroup"))
	if err != nil {
		return g
	}
	base := filepath.Join(root, "/sys/fs/cgroup")
	for line := range strings.Lines(string(raw)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) < 3 {
			continue
		}
		var mounts []string
		name := "memory.oom_control"
		switch {
		case strings.Contains(","+f[1]+",", ",memory,"):
			mounts = []string{filepath.Join(base, f[1]), filepath.Join(base, "memory")}
		case f[0] == "0":
			mounts, name = []string{base, filepath.Join(base, "unified")}, "memory.events"
		}
		for _, m := range mounts {
			// In a container the group's path is often that of the host, and the mount is the group itself.
			for _, dir := range []string{filepath.Join(m, f[2]), m} {
				file := filepath.Join(dir, name)
				if _, ok := readOOMKills(file); ok {
					g.file = file
					return g
				}
			}
		}
	}
	return g
}

// OOMKills returns the number of processes that the kernel has killed in the cgroup for lack of memory, and false if
// the kernel does not count them.
func (g MemoryGroup) OOMKills() (uint64, bool) {
	if g.file == "" {
		return 0, false
	}
	return readOOMKills(g.file)
}

// IsExclusive reports whether the cgroup contains only processes of the sandbox. In a container it does, because the
// container has a cgroup of its own.
func (g MemoryGroup) IsExclusive() bool { return g.own }

// readOOMKills returns the counter oom_kill in a file of a cgroup, and false if the file does not have it.
func readOOMKills(file string) (uint64, bool) {
	raw, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, false
	}
	lines := bufio.NewScanner(bytes.NewReader(raw))
	for lines.Scan() {
		if key, value, ok := strings.Cut(lines.Text(), " "); ok && key == "oom_kill" {
			n, err := strconv.ParseUint(value, 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
