package process_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/process"
)

func TestMemoryGroup(t *testing.T) {
	t.Parallel()
	const (
		v1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
		v2 = "low 0\nhigh 0\nmax 12\noom 5\noom_kill 4\noom_group_kill 0\n"
	)
	for name, tc := range map[string]struct {
		cgroup string
		files  map[string]string
		want   uint64
		known  bool
	}{
		"v1":                 {"4:memory:/a/b\n0::/x\n", map[string]string{"memory/a/b/memory.oom_control": v1, "memory/memory.oom_control": "oom_kill 99\n"}, 3, true},
		"v1 joined":          {"4:cpu,memory:/a\n", map[string]string{"cpu,memory/a/memory.oom_control": v1}, 3, true},
		"v1 in a container":  {"4:memory:/docker/0123\n", map[string]string{"memory/memory.oom_control": v1}, 3, true},
		"v1 of old kernels":  {"4:memory:/a\n", map[string]string{"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, 0, false},
		"v2":                 {"0::/a\n", map[string]string{"a/memory.events": v2}, 4, true},
		"v2 in a container":  {"0::/\n", map[string]string{"memory.events": v2}, 4, true},
		"v2 of another view": {"0::/../host\n", map[string]string{"memory.events": v2}, 4, true},
		"hybrid":             {"4:memory:/a\n0::/a\n", map[string]string{"memory/a/memory.oom_control": v1, "unified/a/cgroup.procs": ""}, 3, true},
		"nothing mounted":    {"4:memory:/a\n0::/a\n", nil, 0, false},
		"no groups":          {"", nil, 0, false},
	} {
		root := t.TempDir()
		put := func(path, content string) {
			t.Helper()
			path = filepath.Join(root, path)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		put("proc/self/cgroup", tc.cgroup)
		for path, content := range tc.files {
			put(filepath.Join("sys/fs/cgroup", path), content)
		}
		if n, ok := process.FindMemoryGroup(root).OOMKills(); n != tc.want || ok != tc.known {
			t.Errorf("%s: %d, %v; want %d, %v", name, n, ok, tc.want, tc.known)
		}
	}
	// Any result is right for the machine that runs the test, as long as the number can be read again.
	if g := process.FindMemoryGroup(""); g.IsExclusive() {
		t.Error("a test is no container's first process")
	}
}
