package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

// DefaultTenant is the tenant of all sessions in tests without authentication.
const DefaultTenant = "default"

// ForSubtest returns the same cluster for the subtest t. Sessions and clients that are created through the result end
// with the subtest.
func (c *Cluster) ForSubtest(t testing.TB) *Cluster {
	sub := *c
	sub.T = t
	return &sub
}

// DeleteSession deletes the session id, unless it was deleted before, and calls AwaitDeleted. CreateSession makes the
// end of the test call it.
func (c *Cluster) DeleteSession(id string) {
	c.T.Helper()
	// The context of the test has ended when cleanups run.
	ctx, cancel := context.WithTimeout(context.Background(), WaitTimeout)
	defer cancel()
	l, err := eventlog.Sessions{Log: c.Servers.Log}.Load(ctx, DefaultTenant, id, eventlog.LeaderOnly)
	requireNoError(c.T, err)
	if l.Life.Status != session.Deleted {
		var answer struct{ Detail string }
		if code := c.Call(0, "DELETE", "/api/sessions/"+id, nil, &answer); code/100 != 2 {
			c.T.Fatalf("delete of session %s answered %d: %s", id, code, answer.Detail)
		}
	}
	c.AwaitDeleted(DefaultTenant, id)
}

// AwaitDeleted blocks until the log has the end of all queries and sandboxes of the deleted session id, no process of
// its sandboxes runs, and its workspace is removed.
func (c *Cluster) AwaitDeleted(tenant, id string) {
	c.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), WaitTimeout)
	defer cancel()
	sandboxes, err := c.awaitEndInLog(ctx, tenant, id)
	if err != nil {
		c.T.Fatalf("%v\n%s", err, executorStacks())
	}
	Eventually(c.T, "no process of the deleted session "+id+" is left", func() bool {
		return len(FindProcesses(append(sandboxes, c.WorkspaceFolder(id))...)) == 0
	})
	Eventually(c.T, "the workspace of the deleted session "+id+" is gone", func() bool {
		_, err := os.Stat(c.WorkspaceFolder(id))
		return errors.Is(err, fs.ErrNotExist)
	})
}

// awaitEndInLog reads the log until it has the deletion of the session id and the end of all queries and sandboxes of
// the session. It returns the ids of the sandboxes.
func (c *Cluster) awaitEndInLog(ctx context.Context, tenant, id string) (sandboxes []string, err error) {
	deleted, open := false, map[string]bool{}
	start := eventlog.Position{Shard: events.Partition(id) % c.Servers.Log.Shards()}
	for rec, err := range c.Servers.Log.Tail(ctx, start, eventlog.Filter{Subject: events.Subject{Tenant: tenant, ID: id}}) {
		if err != nil {
			return nil, fmt.Errorf("read session %s: %w", id, err)
		}
		for _, e := range rec.Events {
			switch d := e.Data.(type) {
			case events.SessionDeleted:
				deleted = true
			case events.MessageAccepted:
				open[e.ExecutionID] = true
			case events.SandboxCreating:
				open[d.SandboxID] = true
				sandboxes = append(sandboxes, d.SandboxID)
			case events.SandboxReady: // a pooled sandbox was not created for the session
				if d.Pooled {
					open[d.SandboxID] = true
					sandboxes = append(sandboxes, d.SandboxID)
				}
			case events.SandboxReplaced:
				delete(open, d.SandboxID)
			case events.SandboxFailed:
				delete(open, d.SandboxID)
			case events.SandboxTerminated:
				delete(open, d.SandboxID)
			}
			if events.IsTerminal(e.Type()) {
				delete(open, e.ExecutionID)
			}
		}
		if deleted && len(open) == 0 {
			return sandboxes, nil
		}
	}
	return nil, fmt.Errorf("session %s did not end within %s: deleted %t, still open %v", id, WaitTimeout, deleted, open)
}

// VerifyLog fails the test if the log is damaged or has an execution that has not ended. It is also called when the
// test ends.
func (c *Cluster) VerifyLog() {
	c.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), WaitTimeout)
	defer cancel()
	report, err := eventlog.Verify(ctx, c.Servers.Log, eventlog.VerifyScope{})
	requireNoError(c.T, err)
	if report.Problem != nil {
		c.T.Errorf("the log is broken: %v", report.Problem)
	}
	for _, x := range report.Open {
		c.T.Errorf("execution %s of session %s never ended", x.ExecutionID, x.Session)
	}
}

// WorkspaceFolder returns the folder of the workspace of the session id, with local sandboxes.
func (c *Cluster) WorkspaceFolder(id string) string {
	return filepath.Join(c.opts.Executor.DataDir, "workspaces", id)
}

// Process is a process that runs on this machine.
type Process struct {
	PID     int
	Command string
}

// FindProcesses returns the processes of this machine, except this one, whose arguments or initial environment contain one
// of the texts marks. It reads /proc, and returns none on systems without it.
func FindProcesses(marks ...string) (found []Process) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		// A process that ends meanwhile, or belongs to another user, cannot be read.
		command, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		environ, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if slices.ContainsFunc(marks, func(m string) bool {
			return bytes.Contains(command, []byte(m)) || bytes.Contains(environ, []byte(m))
		}) {
			found = append(found, Process{pid, string(bytes.ReplaceAll(command, []byte{0}, []byte{' '}))})
		}
	}
	return found
}

// formatProcesses formats a list of processes for a message, one a line.
func formatProcesses(list []Process) string {
	var s strings.Builder
	for _, p := range list {
		fmt.Fprintf(&s, "\n%d %.200s", p.PID, p.Command)
	}
	return s.String()
}

// checkNoProcesses fails the test if processes of the cluster's sandboxes still run, and kills these processes.
func (c *Cluster) checkNoProcesses() {
	left := FindProcesses(c.dir + string(filepath.Separator))
	if len(left) == 0 {
		return
	}
	c.T.Errorf("processes of sandboxes outlive the test: %s", formatProcesses(left))
	for _, p := range left {
		if err := syscall.Kill(p.PID, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			c.T.Errorf("kill process %d: %v", p.PID, err)
		}
	}
}
