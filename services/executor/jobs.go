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
	// adoptInterval is the interval at which the executor looks for jobs of other engines that have no executor any more.
	adoptInterval = 5 * time.Second
	// jobRetryDelay is the delay after which a failed job is delivered again.
	jobRetryDelay = 2 * time.Second
	// handoverTimeout is the maximum time that running jobs may take to hand their executions over when the executor stops.
	handoverTimeout = 10 * time.Second
)

// jobReceiver receives the jobs of this executor's engine, and those of other engines that have no executor any more.
type jobReceiver struct {
	e      *Executor
	router *bus.Router
}

// newJobReceiver returns a jobReceiver, which receives no jobs before run is called.
func newJobReceiver(e *Executor) (*jobReceiver, error) {
	j := &jobReceiver{e: e}
	var err error
	j.router, err = j.newRouter(topology.ProviderJobsConsumer(e.cfg.Sandbox), topology.EngineJobsConsumer(e.cfg.Sandbox, e.cfg.Engine))
	return j, err
}

// newRouter returns a router that passes the jobs of the given JetStream consumers to the worker.
func (j *jobReceiver) newRouter(durables ...topology.Durable) (*bus.Router, error) {
	router, err := bus.NewRouter(bus.RouterConfig{DeadLetter: j.e.publisher, CloseTimeout: handoverTimeout + 5*time.Second, Logger: j.e.deps.Logger})
	if err != nil {
		return nil, err
	}
	for _, d := range durables {
		cfg, topic, err := bus.ConfigForDurable(j.e.js, d)
		if err != nil {
			return nil, err
		}
		cfg.Concurrency = maxDeliveries(j.e.cfg.Slots)
		cfg.HeartBeat = time.Second
		// The requests for further jobs of a frozen executor expire before its present jobs are delivered again.
		cfg.PullExpiry = 3 * time.Second
		cfg.NakDelay = jobRetryDelay
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

// run receives jobs until ctx ends, and returns when the handling of all jobs has ended. It closes ready when it begins to
// receive.
func (j *jobReceiver) run(ctx context.Context, ready chan<- struct{}) error {
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

// adoptEngines receives the jobs of other engines that have no executor, until such an engine has an executor again. It
// blocks until ctx ends.
func (j *jobReceiver) adoptEngines(ctx context.Context) {
	var routers sync.WaitGroup
	defer routers.Wait()
	adopted := map[string]context.CancelFunc{}
	tick := time.NewTicker(min(adoptInterval, j.e.cfg.EngineGone))
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
		waiting, err := j.abandonedEngines(ctx)
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
				adopted[engine] = j.receiveJobsOf(ctx, engine, &routers)
			}
		}
	}
}

// abandonedEngines returns the names of the other engines that have jobs, and that have had no executor for longer than the
// setting engine-gone.
func (j *jobReceiver) abandonedEngines(ctx context.Context) (map[string]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, adoptInterval)
	defer cancel()
	stream, err := j.e.js.Stream(ctx, topology.StreamJobs)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", topology.StreamJobs, err)
	}
	prefix := topology.EngineJobSubject(j.e.cfg.Sandbox, "")
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

// receiveJobsOf starts to receive the jobs of another engine, until the returned function is called.
func (j *jobReceiver) receiveJobsOf(ctx context.Context, engine string, routers *sync.WaitGroup) context.CancelFunc {
	ctx, stop := context.WithCancel(ctx)
	router, err := j.newRouter(topology.EngineJobsConsumer(j.e.cfg.Sandbox, engine))
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

// maxDeliveries returns the number of jobs that an executor with the given number of slots handles at the same time. A job
// that has a permit, or waits for one, no longer counts, so more jobs than that may run.
func maxDeliveries(slots int) int { return 2*slots + 4 }
