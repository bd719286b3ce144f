package docker

import (
	"context"
	"sync"
	"time"
)

// Streams of commands may be silent for hours, and an engine that hangs, or whose
// machine is lost, does not close them. So the engine is pinged at an interval
// while any stream is open.
const (
	// pingInterval is the interval at which the executor pings the engine while commands run.
	pingInterval = 5 * time.Second
	// maxMissedPings is the number of consecutive failed pings after which the streams of all commands are closed.
	maxMissedPings = 2
)

// enginePinger pings the Docker engine while commands run in its containers, and closes the streams of all commands if the engine does not
// answer.
type enginePinger struct {
	p     *Provider
	every time.Duration

	mu   sync.Mutex
	open map[*process]bool
	stop context.CancelFunc // of ask; nil while it does not run
}

// addProcess makes the pinger ping the engine on behalf of a command, until remove is called for it.
func (w *enginePinger) addProcess(proc *process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open[proc] = true
	if w.stop == nil {
		var ctx context.Context
		ctx, w.stop = context.WithCancel(context.Background())
		go w.pingRepeatedly(ctx)
	}
}

func (w *enginePinger) removeProcess(proc *process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, proc)
	if len(w.open) == 0 && w.stop != nil {
		w.stop()
		w.stop = nil
	}
}

// pingRepeatedly pings the engine at the interval w.every until ctx ends. After maxMissedPings failed pings in a row it closes the streams
// of all commands.
func (w *enginePinger) pingRepeatedly(ctx context.Context) {
	tick := time.NewTicker(w.every)
	defer tick.Stop()
	for silent := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := w.p.callEngineNoResult(ctx, "ask for a sign of life", func(ctx context.Context) error {
			_, err := w.p.api.Ping(ctx)
			return err
		})
		if silent++; err == nil {
			silent = 0
		}
		if silent < maxMissedPings || ctx.Err() != nil {
			continue
		}
		w.mu.Lock()
		for proc := range w.open {
			proc.closeStreams(err)
		}
		w.mu.Unlock()
	}
}
