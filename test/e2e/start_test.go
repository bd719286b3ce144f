package e2e

import (
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestStart_ServicesRepeatEveryRequestThatNATSDoesNotAnswer starts each service while NATS does not answer the first
// request on any subject. The service sends each of these requests again, and becomes ready. Package daemon tests the
// requests that open the log.
func TestStart_ServicesRepeatEveryRequestThatNATSDoesNotAnswer(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Outages: true})
	c.StopProjectors() // a second projector sends nothing while the first one works
	for service, start := range map[string]func(*harness.Cluster) func(){
		"session":   func(c *harness.Cluster) func() { return c.StartSessionService("start") },
		"executor":  (*harness.Cluster).StartExecutor,
		"projector": (*harness.Cluster).StartProjector,
		"skills":    (*harness.Cluster).StartSkills,
		"gateway":   (*harness.Cluster).StartGateway,
	} {
		t.Run(service, func(t *testing.T) {
			t.Parallel()
			startLosingRequests(t, c, start)
		})
	}
}

// startLosingRequests starts a service, does not forward its first request on each subject to NATS, and returns when
// the service has sent each of these requests again.
func startLosingRequests(t *testing.T, c *harness.Cluster, start func(*harness.Cluster) func()) {
	t.Helper()
	var mu sync.Mutex
	sent := map[string]int{}
	relay := natstest.RunRelay(t, strings.TrimPrefix(c.Servers.NATSURL, "nats://"), func(subject string) bool {
		if subject == "PING" {
			return false // of the connection, not of the service
		}
		mu.Lock()
		defer mu.Unlock()
		// The sixth token of a request for a temporary consumer is a name that is new with each request.
		tokens := strings.Split(subject, ".")
		request := strings.Join(tokens[:min(len(tokens), 5)], ".")
		sent[request]++
		return sent[request] == 1
	})
	through, servers := c.ForSubtest(t), *c.Servers
	servers.Connect = func(string) (*nats.Conn, eventlog.Log, error) {
		nc, err := nats.Connect(relay.URL, bus.ConnOptions(natstest.Logger(t))...)
		if err != nil {
			return nil, nil, err
		}
		js, err := jetstream.New(nc)
		if err != nil {
			return nil, nil, err
		}
		log, err := jslog.New(jslog.Config{JetStream: js})
		return nc, log, err
	}
	through.Servers = &servers
	stop := start(through)
	defer stop()
	harness.Eventually(t, "the service repeats what NATS did not answer", func() bool {
		mu.Lock()
		defer mu.Unlock()
		for _, n := range sent {
			if n == 1 {
				return false
			}
		}
		return len(sent) > 0
	})
}
