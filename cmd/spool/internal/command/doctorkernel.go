package command

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// KernelSetting is a limit of the kernel that sandboxes can reach.
type KernelSetting struct {
	Name    string
	Least   int64  // below it, spool doctor reports the setting
	Purpose string // who shares the limit, and what counts towards it
}

// KernelSettings are the limits that spool doctor checks. A Docker sandbox has a user of its
// own; local sandboxes share the user of the executor.
func KernelSettings() []KernelSetting {
	return []KernelSetting{
		{"fs.inotify.max_user_instances", 512, "each user; the runner and every program that watches files take one"},
		{"fs.inotify.max_user_watches", 65536, "each user; one for each folder of a workspace"},
		{"fs.file-max", 16777216, "all sandboxes together; open files"},
		{"kernel.pid_max", 262144, "all sandboxes together; processes and threads"},
		{"kernel.pty.max", 65536, "all sandboxes together; pseudo terminals"},
		{"kernel.keys.root_maxkeys", 10000, "all containers together, each of which takes one"},
	}
}

// kernel checks the limits of this machine's kernel, which is also that of an engine on this machine.
func (x *examination) kernel(context.Context) finding {
	if host := cmp.Or(x.environ("SPOOL_DOCKER_HOST"), x.environ("DOCKER_HOST")); host != "" && !strings.HasPrefix(host, "unix:") {
		return note("sandboxes are on another machine, "+host, "run spool doctor on that machine")
	}
	root := cmp.Or(x.sysctls, "/proc/sys")
	var low, set []string
	read := 0
	for _, s := range KernelSettings() {
		raw, err := os.ReadFile(filepath.Join(root, strings.ReplaceAll(s.Name, ".", "/")))
		if err != nil { // an older kernel, a container that does not show it, or not Linux
			continue
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
		if err != nil {
			return failed(fmt.Sprintf("%s is %q, which is not a number", s.Name, strings.TrimSpace(string(raw))), "")
		}
		read++
		if n < s.Least {
			low = append(low, fmt.Sprintf("%s is %d (for %s)", s.Name, n, s.Purpose))
			set = append(set, fmt.Sprintf("%s=%d", s.Name, s.Least))
		}
	}
	switch {
	case read == 0:
		return note("this machine shows no settings of a Linux kernel", "run spool doctor on the machine of the Docker engine")
	case len(low) > 0:
		return note("low on this machine: "+strings.Join(low, "; "), "sysctl -w "+strings.Join(set, " ")+"; also write these settings to a file in /etc/sysctl.d, for the next start of the machine")
	}
	return ok("%d settings of this machine's kernel are high enough for sandboxes", read)
}
