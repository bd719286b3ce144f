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

// beside is what goes on beside the agents: the watch over the workspace's files and over the disk.
type beside struct {
	files *watch.Watcher
	disk  *watch.Disk
	sup   *supervisor.Supervisor // set once there is one
}

// newBeside makes what a supervisor is given.
func newBeside(place agent.Place, d disk, descendants func() []int, log *slog.Logger) (*beside, error) {
	b := &beside{}
	dirs := []string{place.Workspace, place.State}
	if d.stateOnly {
		dirs = dirs[1:]
	}
	var err error
	b.disk, err = watch.NewDisk(watch.DiskConfig{
		Dirs: dirs, Limit: d.limit, Log: log, Processes: descendants,
		Activity: func() watch.Activity { return b.activity() },
		Exceeded: func(message string) { b.sup.Exhaust(supervisor.CodeDiskLimit, message) },
	})
	if err != nil {
		return nil, err
	}
	b.files, err = watch.New(watch.Config{
		Dir: place.Workspace, Sink: b, Log: log,
		Touched: func(rel string, before int64) {
			if d.stateOnly {
				return
			}
			b.disk.Touched(filepath.Join(place.Workspace, filepath.FromSlash(rel)), before)
		},
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Tell is the supervisor's.
func (b *beside) Tell(ctx context.Context, payloads ...events.Payload) string {
	return b.sup.Tell(ctx, payloads...)
}

func (b *beside) activity() watch.Activity {
	switch running, resting := b.sup.Busy(); {
	case running:
		return watch.Working
	case resting:
		return watch.Resting
	}
	return watch.Idle
}

// run watches until ctx ends.
func (b *beside) run(ctx context.Context) error {
	var both errgroup.Group
	both.Go(func() error {
		if err := b.files.Run(ctx); err != nil {
			return fmt.Errorf("watch the workspace: %w", err)
		}
		return nil
	})
	both.Go(func() error {
		if err := b.disk.Run(ctx); err != nil {
			return fmt.Errorf("watch the disk: %w", err)
		}
		return nil
	})
	return both.Wait()
}
