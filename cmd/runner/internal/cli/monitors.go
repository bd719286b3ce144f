package cli

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/supervisor"
	"github.com/spoolhq/spool/cmd/runner/internal/watch"
	"github.com/spoolhq/spool/pkg/events"
)

// monitors holds the watcher of the workspace and the measurement of the disk usage, which run beside the supervisor.
type monitors struct {
	files *watch.Watcher
	// serve answers snapshots what has changed, until ctx ends; nil for a folder of the host, whose snapshots look at all
	// files.
	serve func(ctx context.Context) error
	disk  *watch.DiskWatch
	sup   *supervisor.Supervisor // set before run
}

// newMonitors returns the monitors of an agent's folders. The caller sets the field sup before it calls run.
func newMonitors(place agent.Folders, d diskConfig, descendants func() []int, log *slog.Logger) (*monitors, error) {
	m := &monitors{}
	dirs := []string{place.Workspace, place.State}
	if d.stateOnly {
		dirs = dirs[1:]
	}
	var err error
	m.disk, err = watch.NewDiskWatch(watch.DiskConfig{
		Dirs: dirs, Limit: d.limit, Log: log, Processes: descendants,
		Activity: func() watch.Activity { return m.currentActivity() },
		Exceeded: func(message string) { m.sup.KillForResource(supervisor.CodeDiskLimit, message) },
	})
	if err != nil {
		return nil, err
	}
	m.files, err = watch.New(watch.Config{
		Dir: place.Workspace, Sink: m, Log: log,
		Touched: func(rel string, before int64) {
			if d.stateOnly {
				return
			}
			m.disk.RecordTouched(filepath.Join(place.Workspace, filepath.FromSlash(rel)), before)
		},
	})
	if err != nil {
		return nil, err
	}
	if !d.stateOnly {
		m.serve = func(ctx context.Context) error { return m.files.ServeQueries(ctx, place.State, descendants) }
	}
	return m, nil
}

// JournalEvents journals the events and returns the id of the running execution, if any. See
// supervisor.Supervisor.JournalEvents.
func (m *monitors) JournalEvents(ctx context.Context, payloads ...events.Payload) string {
	return m.sup.JournalEvents(ctx, payloads...)
}

// currentActivity returns whether a turn, only processes, or nothing runs, which determines how often the disk usage is
// measured.
func (m *monitors) currentActivity() watch.Activity {
	switch running, resting := m.sup.Busy(); {
	case running:
		return watch.ActivityWorking
	case resting:
		return watch.ActivityResting
	}
	return watch.ActivityIdle
}

// run runs the watcher of the workspace and the measurement of the disk usage until ctx ends.
func (m *monitors) run(ctx context.Context, log *slog.Logger) error {
	var both errgroup.Group
	if m.serve != nil {
		both.Go(func() error {
			if err := m.serve(ctx); err != nil {
				log.Warn("snapshots look at all files", "err", err)
			}
			return nil
		})
	}
	both.Go(func() error {
		if err := m.files.Run(ctx); err != nil {
			return fmt.Errorf("watch the workspace: %w", err)
		}
		return nil
	})
	both.Go(func() error {
		if err := m.disk.Run(ctx); err != nil {
			return fmt.Errorf("watch the disk: %w", err)
		}
		return nil
	})
	return both.Wait()
}
