package local

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/landlock"
	"github.com/spoolhq/spool/pkg/runner"
)

// startRestricted starts a process of the sandbox. The process and its descendants cannot open files of the provider's
// hidden folders, except those that belong to the sandbox itself. The record of the sandbox does not: it contains the
// secret with which executors prove themselves to the runner, and so decide approval requests.
func (b *box) startRestricted(cmd *exec.Cmd) error {
	if len(b.p.cfg.Hidden) == 0 {
		return cmd.Start()
	}
	if err := os.MkdirAll(b.p.skillsDir(), 0o700); err != nil {
		return fmt.Errorf("folder of skills: %w", err)
	}
	rules := landlock.Rules{
		Hidden:   b.p.cfg.Hidden,
		Readable: []string{b.p.skillsDir()},
		Visible:  []string{filepath.Join(b.dir, "home"), filepath.Join(b.dir, "tmp"), filepath.Join(b.p.stateDir(b.rec.Labels.Session), "agent"), b.workspaceDir()},
		Sockets:  []string{filepath.Dir(b.rec.Socket)},
	}
	if b.rec.Layer != "" {
		rules.Visible = append(rules.Visible, b.rec.Layer)
	}
	return rules.Start(cmd, b.p.cfg.Runner, runner.RestrictedCommand)
}
