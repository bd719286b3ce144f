package executor

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/topology"
)

const (
	// adoptEvery is the interval at which the executor looks for jobs of engines whose executors are gone.
	adoptEvery = 5 * time.Second
	// jobNak is the delay before a failed job is delivered again.
	jobNak = 2 * time.Second
	// handoverTimeout is the time limit for handing over jobs at the end.
	handoverTimeout = 10 * time.Second
)

// jobs receives the jobs of this executor's engine, and those of engines whose executors are gone.
type jobs struct {
	e      *Executor
	router *bus.Router
}

func newJobs(e *Executor) (*jobs, error) {
	j := &jobs{e: e}
	var err error
	j.router, err = j.newRouter(topology.JobsAnyConsumer(e.cfg.Sandbox), topology.JobsOnConsumer(e.cfg.Sandbox, e.cfg.Engine))
	return j, err
}

func (j *jobs) newRouter(durables ...topology.Durable) (*bus.Router, error) {
	router, err := bus.NewRouter(bus.RouterConfig{DeadLetter: j.e.publisher, CloseTimeout: handoverTimeout + 5*time.Second, Logger: j.e.deps.Logger})
	if err != nil {
		return nil, err
	}
	for _, d := range durables {
		cfg, topic, err := bus.ForDurable(j.e.js, d)
		if err != nil {
			return nil, err
		}
		cfg.Concurrency = deliveries(j.e.cfg.Slots)
		cfg.HeartBeat = time.Second
		// The requests for further jobs of a frozen executor expire before its present jobs are delivered again.
		cfg.PullExpiry = 3 * time.Second
		cfg.NakDelay = jobNak
		cfg.DoubleAck = true
		cfg.CloseTimeout = handoverTimeout
		cfg.Logger = j.e.deps.Logger
		sub, err := bus.NewSubscriber(cfg)
		if err != nil {
			return nil, err
		}
		// Neither the duration of a run nor the number of deliveries of a job is limited.
		if err := router.Handle(d.Config.Durable, topic, sub, j.e.worker.Handle, bus.WithTimeout(-1), bus.WithMaxDeliveries(-1)); err != nil {
			return nil, err
		}
	}
	return router, nil
}

// run receives jobs until ctx ends, and returns when the handlers of all jobs have returned.
func (j *jobs) run(ctx context.Context, ready chan<- struct{}) error {
	var waiting sync.WaitGroup
	defer waiting.Wait()
	done := make(chan struct{})
	defer close(done)
	waiting.Go(func() {
		select {
		case <-j.router.Running():
			close(ready)
		case <-done:
		}
	})
	return j.router.Run(ctx)
}

// adopt receives the jobs of engines whose executors are gone, until such an engine has an executor again. It blocks
// until ctx ends.
func (j *jobs) adopt(ctx context.Context) {
	var routers sync.WaitGroup
	defer routers.Wait()
	adopted := map[string]context.CancelFunc{}
	tick := time.NewTicker(min(adoptEvery, j.e.cfg.EngineGone))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			for _, stop := range adopted {
				stop()
			}
			return
		case <-tick.C:
		}
		waiting, err := j.waiting(ctx)
		if err != nil {
			if ctx.Err() == nil {
				j.e.deps.Logger.Warn("look for jobs of engines that are gone", "error", err)
			}
			continue
		}
		for engine, stop := range adopted {
			if !waiting[engine] {
				stop()
				delete(adopted, engine)
			}
		}
		for engine := range waiting {
			if adopted[engine] == nil {
				adopted[engine] = j.take(ctx, engine, &routers)
			}
		}
	}
}

// waiting returns the other engines that have jobs and that have had no live executor for longer than the setting
// engine-gone.
func (j *jobs) waiting(ctx context.Context) (map[string]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, adoptEvery)
	defer cancel()
	stream, err := j.e.js.Stream(ctx, topology.StreamJobs)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", topology.StreamJobs, err)
	}
	prefix := topology.JobOn(j.e.cfg.Sandbox, "")
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(prefix+"*"))
	if err != nil {
		return nil, fmt.Errorf("look into %s: %w", topology.StreamJobs, err)
	}
	out := map[string]bool{}
	for subject := range info.State.Subjects {
		engine := strings.TrimPrefix(subject, prefix)
		if engine != j.e.cfg.Engine && j.e.leases.EngineGoneFor(j.e.cfg.Sandbox, engine) >= j.e.cfg.EngineGone {
			out[engine] = true
		}
	}
	return out, nil
}

// take starts to receive the jobs of another engine, until the returned function is called.
func (j *jobs) take(ctx context.Context, engine string, routers *sync.WaitGroup) context.CancelFunc {
	ctx, stop := context.WithCancel(ctx)
	router, err := j.newRouter(topology.JobsOnConsumer(j.e.cfg.Sandbox, engine))
	if err != nil {
		j.e.deps.Logger.Error("jobs of an engine that is gone cannot be taken", "engine", engine, "error", err)
		return stop
	}
	j.e.deps.Logger.Info("taking the jobs of an engine that is gone", "engine", engine)
	routers.Go(func() {
		if err := router.Run(ctx); err != nil {
			j.e.deps.Logger.Error("jobs of an engine that is gone are no longer taken", "engine", engine, "error", err)
		}
	})
	return stop
}

// deliveries returns the number of jobs that an executor with the given number of slots handles at once without
// releasing the delivery. A long job releases its delivery when it has a permit or begins to wait for one, so more jobs
// than that may run.
func deliveries(slots int) int { return 2*slots + 4 }
