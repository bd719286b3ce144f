package executor_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor"
)

// An execution fails with HOST_PATH_REFUSED if the executor's setting does not allow the session's folder, or if the
// folder has become a link or is gone. Otherwise it runs in the folder.
func TestSettingHostPaths(t *testing.T) {
	t.Parallel()
	b := newLocalBench(t, program)
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	allowed, other := filepath.Join(dir, "allowed"), filepath.Join(dir, "other")
	for _, d := range []string{allowed, other} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	e := b.run(func(c *executor.Config) { c.HostPaths = []string{allowed} })
	in := func(path string) *talk {
		return b.session(func(c *events.SessionCreated) { c.Architecture, c.Options.HostPath = "spool", path })
	}
	s := in(allowed)
	if l := s.ended(s.post("write a program")); l.Run.Phase != run.Completed {
		t.Errorf("it ended as %s", l.Run.Phase)
	}
	if _, err := os.Stat(filepath.Join(allowed, "hello.sh")); err != nil {
		t.Errorf("the agent did not work in the folder: %v", err)
	}
	gone := filepath.Join(allowed, "gone")
	link := filepath.Join(allowed, "link")
	if err := os.Symlink(other, link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{other, gone, link} {
		s := in(path)
		execution := s.post("write a program")
		s.ended(execution)
		if end, ok := s.last(execution).(events.ExecutionFailed); !ok || end.Code != "HOST_PATH_REFUSED" {
			t.Errorf("%s: %+v", path, s.last(execution))
		}
	}
	if left, err := os.ReadDir(other); err != nil || len(left) > 0 {
		t.Errorf("the other folder has %v, %v", left, err)
	}
	s.removeAll(e)
	if _, err := os.Stat(filepath.Join(allowed, "hello.sh")); err != nil {
		t.Errorf("the session's deletion removed a file of the folder: %v", err)
	}
}
