package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

// faultInjector injects faults into an installation.
type faultInjector struct {
	c     *cluster
	thaws sync.WaitGroup // the frozen processes that continue later

	mu   sync.Mutex
	errs []error // of processes that could not be continued
}

// injectFaults injects the number of faults that the settings demand, and returns when no process is frozen any more.
func injectFaults(ctx context.Context, c *cluster, s settings) error {
	plan, began, injector := newFaultSchedule(s.seed, len(c.parts)), time.Now(), &faultInjector{c: c}
	defer injector.thaws.Wait()
	for len(c.faults) < s.faults || time.Since(began) < s.least {
		f := plan.next()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(f.after):
		}
		if err := c.reapOrphans(); err != nil {
			return err
		}
		if err := injector.inject(f); err != nil {
			return err
		}
	}
	injector.thaws.Wait()
	return errors.Join(injector.errs...)
}

// inject injects one fault. A process that is frozen continues later.
func (j *faultInjector) inject(f plannedFault) error {
	hit := []*restartedProcess{j.c.parts[f.part]}
	switch f.kind {
	case faultStalledStart:
		hit = append(hit, j.c.partsNamed("nats")...)
	case faultFrozenSessions:
		hit = j.c.partsNamed("session-")
	}
	made := injectedFault{at: time.Now(), plannedFault: f}
	for _, p := range hit {
		made.parts = append(made.parts, p.name)
	}
	j.c.faults = append(j.c.faults, made)
	fmt.Fprintf(os.Stderr, "%s  %s\n", made.at.Format(clockFormat), made)
	switch f.kind {
	case faultKill:
		return hit[0].kill(f.length)
	case faultStalledStart:
		if err := hit[0].kill(0); err != nil {
			return err
		}
		service, _, _ := strings.Cut(hit[0].name, "-")
		j.c.awaitConnection("spool-"+service, made.at)
		time.Sleep(f.delay)
		return j.freeze(hit[1:], f.length)
	}
	return j.freeze(hit, f.length)
}

// freeze freezes processes, and continues them after the time length.
func (j *faultInjector) freeze(parts []*restartedProcess, length time.Duration) error {
	for _, p := range parts {
		if err := p.freeze(); err != nil {
			return err
		}
		j.thaws.Go(func() {
			time.Sleep(length)
			if err := p.thaw(); err != nil {
				j.mu.Lock()
				j.errs = append(j.errs, err)
				j.mu.Unlock()
			}
		})
	}
	return nil
}

// partsNamed returns the processes whose names begin with prefix.
func (c *cluster) partsNamed(prefix string) (list []*restartedProcess) {
	for _, p := range c.parts {
		if strings.HasPrefix(p.name, prefix) {
			list = append(list, p)
		}
	}
	return list
}

const (
	// connectionTimeout is the maximum time for which awaitConnection waits. NATS may be frozen by an earlier fault.
	connectionTimeout = 3 * time.Second
	// connzTimeout is the time limit of one request for the connections of NATS.
	connzTimeout = 500 * time.Millisecond
)

// awaitConnection blocks until NATS has a connection with the given name that began after the time since, or until
// connectionTimeout is over. A service sends the requests of its start in the first milliseconds after it has connected.
func (c *cluster) awaitConnection(name string, since time.Time) {
	client := http.Client{Timeout: connzTimeout}
	for time.Since(since) < connectionTimeout {
		var list struct {
			Connections []struct {
				Name  string
				Start time.Time
			}
		}
		resp, err := client.Get("http://" + c.natsHTTP + "/connz?limit=4096")
		if err == nil {
			err = errors.Join(json.NewDecoder(resp.Body).Decode(&list), resp.Body.Close())
		}
		for _, conn := range list.Connections {
			if err == nil && conn.Name == name && conn.Start.After(since) {
				return
			}
		}
		time.Sleep(time.Millisecond)
	}
}
