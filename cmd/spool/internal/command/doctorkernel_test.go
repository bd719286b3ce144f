package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDoctor_KernelSettings(t *testing.T) {
	t.Parallel()
	enough := map[string]string{
		"fs/inotify/max_user_instances": "512\n", "fs/inotify/max_user_watches": "65536\n", "fs/file-max": "9223372036854775807\n",
		"kernel/pid_max": "4194304\n", "kernel/pty/max": "65536\n", "kernel/keys/root_maxkeys": "1000000\n",
	}
	for name, c := range map[string]struct {
		change map[string]string // "" for a missing file
		host   string
		status string
		says   []string
		never  string
	}{
		"high enough": {status: "ok", says: []string{"6 settings"}},
		"one is low": {
			change: map[string]string{"fs/inotify/max_user_instances": "128\n"}, status: "note",
			says: []string{"fs.inotify.max_user_instances is 128", "sysctl -w fs.inotify.max_user_instances=512; also"}, never: "max_user_watches",
		},
		"two are low": {
			change: map[string]string{"kernel/pid_max": "32768", "kernel/pty/max": "4096"}, status: "note",
			says: []string{"kernel.pid_max is 32768", "kernel.pty.max is 4096", "sysctl -w kernel.pid_max=262144 kernel.pty.max=65536;"},
		},
		"one is not shown": {change: map[string]string{"kernel/keys/root_maxkeys": ""}, status: "ok", says: []string{"5 settings"}},
		"none is shown": {change: map[string]string{
			"fs/inotify/max_user_instances": "", "fs/inotify/max_user_watches": "", "fs/file-max": "", "kernel/pid_max": "", "kernel/pty/max": "", "kernel/keys/root_maxkeys": "",
		}, status: "note", says: []string{"no Linux kernel settings", "machine of the Docker engine"}},
		"no number":        {change: map[string]string{"fs/file-max": "many"}, status: "failed", says: []string{`fs.file-max is "many"`}},
		"a remote engine":  {host: "ssh://spool@engine", status: "note", says: []string{"another machine, ssh://spool@engine", "run spool doctor on that machine"}},
		"an engine's path": {host: "unix:///run/docker.sock", status: "ok", says: []string{"6 settings"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for file, value := range enough {
				if changed, ok := c.change[file]; ok {
					value = changed
				}
				if value == "" {
					continue
				}
				path := filepath.Join(dir, file)
				if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(value), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			x := &doctorChecks{doctorCommand: &doctorCommand{sysctls: dir, environ: func(name string) string {
				if name == "SPOOL_DOCKER_HOST" {
					return c.host
				}
				return ""
			}}}
			f := x.checkKernel(t.Context())
			text := f.Detail + " " + f.Remedy
			if f.Status != c.status || c.never != "" && strings.Contains(text, c.never) {
				t.Errorf("found %+v", f)
			}
			for _, says := range c.says {
				if !strings.Contains(text, says) {
					t.Errorf("%q lacks %q", text, says)
				}
			}
		})
	}
}
