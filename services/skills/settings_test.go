package skills_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/skill/skilltest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/skills"
)

// blockingLog blocks all callers of Last, and counts them.
type blockingLog struct {
	eventlog.Log
	full chan struct{} // closed when limit callers wait
	pass chan struct{} // closed to release them

	mu                     sync.Mutex
	limit, inside, maximum int
}

func (l *blockingLog) Last(ctx context.Context, subject events.Subject, f eventlog.Freshness) (eventlog.Head, error) {
	l.mu.Lock()
	l.inside++
	if l.maximum = max(l.maximum, l.inside); l.inside == l.limit {
		select {
		case <-l.full:
		default:
			close(l.full)
		}
	}
	l.mu.Unlock()
	select {
	case <-l.pass:
	case <-ctx.Done():
	}
	l.mu.Lock()
	l.inside--
	l.mu.Unlock()
	return l.Log.Last(ctx, subject, f)
}

// TestSettingWorkers tests that the service executes as many commands at once as the setting allows, and no more.
func TestSettingWorkers(t *testing.T) {
	t.Parallel()
	for _, workers := range []int{1, 3} {
		b := newFixture(t)
		js, err := jetstream.New(b.conn(topology.UserSkills))
		must(t, err)
		log, err := jslog.New(jslog.Config{JetStream: js})
		must(t, err)
		blocked := &blockingLog{Log: log, limit: workers, full: make(chan struct{}), pass: make(chan struct{})}
		b.run(skills.Config{Workers: workers}, skills.Deps{Log: blocked})
		var all sync.WaitGroup
		for range 6 {
			all.Go(func() {
				b.send(command.TypeRemoveSkill, id(events.KindCommand), command.RemoveEntry{Ref: ref})
			})
		}
		select {
		case <-blocked.full:
		case <-time.After(20 * time.Second):
			t.Error("the configured number of commands is never reached")
		}
		close(blocked.pass)
		all.Wait()
		if blocked.maximum != workers {
			t.Errorf("%d at once, want %d", blocked.maximum, workers)
		}
	}
}

// TestSettingScratch tests that ZIPs are stored in the configured folder while they are checked. If the folder is
// missing, the service logs that, and a push waits for it.
func TestSettingScratch(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	scratch := filepath.Join(t.TempDir(), "scratch")
	must(t, os.Mkdir(scratch, 0o700))
	var said lines
	b.run(skills.Config{Scratch: scratch}, skills.Deps{Logger: slog.New(slog.NewTextHandler(&said, nil))})
	must(t, os.Remove(scratch))
	answered := make(chan command.Answer, 1)
	go func() { answered <- b.push(version(1)) }()
	for deadline := time.Now().Add(20 * time.Second); !said.has(scratch); {
		if time.Now().After(deadline) {
			t.Fatal("the missing folder was not logged")
		}
		select {
		case a := <-answered:
			t.Fatalf("answered without the folder: %+v", a)
		case <-time.After(10 * time.Millisecond):
		}
	}
	must(t, os.Mkdir(scratch, 0o700))
	b.ok(<-answered)
}

// lines holds log output.
type lines struct {
	mu  sync.Mutex
	all strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.Write(p)
}

func (l *lines) has(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.all.String(), s)
}

func TestNew_RefusesInvalidSettings(t *testing.T) {
	t.Parallel()
	for field, c := range map[string]skills.Config{
		"workers:": {Workers: topology.SkillsMaxAckPending + 1}, "scratch:": {Scratch: "/nowhere/at/all"}, "are required": {},
	} {
		if _, err := skills.New(c, skills.Deps{}); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s %v", field, err)
		}
	}
	if _, err := skills.New(skills.Config{Workers: -1}, skills.Deps{}); err == nil {
		t.Error("a negative number of workers was accepted")
	}
}

// TestMetrics_CountCommandsAndZIPs tests that commands by outcome, and stored ZIPs, are counted.
func TestMetrics_CountCommandsAndZIPs(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	registry := prometheus.NewRegistry()
	stop := b.run(skills.Config{}, skills.Deps{Metrics: registry})
	b.ok(b.push(version(1)))
	b.ok(b.push(version(1)))
	b.push(skilltest.BuildZIP(skilltest.FileEntry("x", "x")))
	b.send("nonsense", id(events.KindCommand), nil)
	stop() // commands are counted after their answer
	want := map[string]float64{
		"spool_skills_commands_total push_skill ok":                     2,
		"spool_skills_commands_total push_skill SKILL_DOCUMENT_INVALID": 1,
		"spool_skills_commands_total unknown INVALID_REQUEST":           1,
		"spool_skills_command_seconds push_skill":                       3,
		"spool_skills_kept_total":                                       1,
	}
	got := map[string]float64{}
	list, err := registry.Gather()
	must(t, err)
	for _, f := range list {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			for _, l := range []string{"type", "outcome"} {
				if labels[l] != "" {
					name += " " + labels[l]
				}
			}
			if h := m.GetHistogram(); h != nil {
				got[name] = float64(h.GetSampleCount())
			} else {
				got[name] = m.GetCounter().GetValue()
			}
		}
	}
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s is %v, want %v", name, got[name], n)
		}
	}
}

// TestRun_WaitsForTheBucket tests that the service may start before the bucket exists.
func TestRun_WaitsForTheBucket(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	must(t, b.admin.DeleteObjectStore(t.Context(), topology.BucketSkills))
	nc := b.conn(topology.UserSkills)
	var said lines
	svc, err := skills.New(skills.Config{}, skills.Deps{NATS: nc, Log: b.entries.Log, Logger: slog.New(slog.NewTextHandler(&said, nil))})
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- svc.Run(ctx) }()
	defer func() { cancel(); must(t, <-done) }()
	for deadline := time.Now().Add(20 * time.Second); !said.has("waiting for the bucket"); {
		if time.Now().After(deadline) {
			t.Fatal("the service does not log that it waits")
		}
		select {
		case <-svc.Ready():
			t.Fatal("ready without a bucket")
		case <-time.After(10 * time.Millisecond):
		}
	}
	must(t, topology.Provision(t.Context(), b.admin, topology.ProvisionConfig{}))
	select {
	case <-svc.Ready():
	case <-time.After(20 * time.Second):
		t.Fatal("the service does not notice the bucket")
	}
}
