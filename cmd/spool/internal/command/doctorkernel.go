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

// KernelSetting is a limit of the Linux kernel that many sandboxes on one machine can reach, with the lowest value that
// doctor accepts.
type KernelSetting struct {
	Name    string
	Least   int64  // spool doctor reports lower values
	Purpose string // who shares the limit, and what counts towards it
}

// KernelSettings returns the kernel limits that "spool doctor" checks. A Docker sandbox has a user of its own; local
// sandboxes share the user of the executor.
func KernelSettings() []KernelSetting {
	return []KernelSetting{
		{"fs.inotify.max_user_instances", 512, "per user; the runner and every program that watches files use one"},
		{"fs.inotify.max_user_watches", 65536, "per user; one per folder of a workspace"},
		{"fs.file-max", 16777216, "open files of all sandboxes"},
		{"kernel.pid_max", 262144, "processes and threads of all sandboxes"},
		{"kernel.pty.max", 65536, "pseudo terminals of all sandboxes"},
		{"kernel.keys.root_maxkeys", 10000, "one per container, over all containers"},
	}
}

// checkKernel checks the limits of this machine's kernel, which a Docker engine on this machine uses too.
func (x *doctorChecks) checkKernel(context.Context) finding {
	if host := cmp.Or(x.environ("SPOOL_DOCKER_HOST"), x.environ("DOCKER_HOST")); host != "" && !strings.HasPrefix(host, "unix:") {
		return noteFinding("sandboxes are on another machine, "+host, "run spool doctor on that machine")
	}
	root := cmp.Or(x.sysctls, "/proc/sys")
	var low, set []string
	read := 0
	for _, s := range KernelSettings() {
		raw, err := os.ReadFile(filepath.Join(root, strings.ReplaceAll(s.Name, ".", "/")))
		if err != nil { // an older kernel, a container that hides the setting, or not Linux
			continue
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
		if err != nil {
			return failedFinding(fmt.Sprintf("%s is %q, which is not a number", s.Name, strings.TrimSpace(string(raw))), "")
		}
		read++
		if n < s.Least {
			low = append(low, fmt.Sprintf("%s is %d (for %s)", s.Name, n, s.Purpose))
			set = append(set, fmt.Sprintf("%s=%d", s.Name, s.Least))
		}
	}
	switch {
	case read == 0:
		return noteFinding("no Linux kernel settings are readable on this machine", "run spool doctor on the machine of the Docker engine")
	case len(low) > 0:
		return noteFinding("low on this machine: "+strings.Join(low, "; "), "sysctl -w "+strings.Join(set, " ")+"; also write these settings to a file in /etc/sysctl.d, so that they survive a reboot")
	}
	return okFinding("%d settings of this machine's kernel are high enough for sandboxes", read)
}
