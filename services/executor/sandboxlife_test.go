package executor_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
)

// aging returns a bench with metered sandboxes, and a function that sets the clock forward.
func aging(t *testing.T) (b *bench, forward func(time.Duration)) {
	b = newStoreBench(t, quick)
	b.sandbox = executor.ProviderModal
	var ahead atomic.Int64
	b.now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	return b, func(d time.Duration) { ahead.Add(int64(d)) }
}

// The sandbox of an idle session is ended, with a snapshot, before its provider ends it. The next turn has the same
// files.
func TestSandboxLife_IdleSandboxIsEndedBefore(t *testing.T) {
	t.Parallel()
	b, forward := aging(t)
	b.run(func(c *executor.Config) { c.SweepEvery = 20 * time.Millisecond })
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	s.put("a.txt", "A")
	s.until("the file is there", func(l *eventlog.SessionState) bool { return l.Run.Applied == 1 })
	first := s.load().Run.Sandbox.ID
	forward(20 * time.Hour)
	s.until("the sandbox is ended", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID == "" })
	if ends := of[events.SandboxTerminated](s); len(ends) != 1 || ends[0].Reason != "max_age" || ends[0].Kept {
		t.Errorf("ends %+v", ends)
	}
	b.until("nothing is left of it", func() bool { wiped, gone := b.provider.wiped(first); return wiped && gone })
	s.untilEnded(s.post("two"))
	if box := b.provider.onlyBox(); box.ID() == first || box.files.all() != "a.txt=A" {
		t.Errorf("sandbox %s after %s has %q", box.ID(), first, box.files.all())
	}
	s.checkUsage(0)
}

// A turn does not begin in a sandbox that its provider ends soon; the setting determines that time.
func TestSandboxLife_TurnBeginsInAnotherSandbox(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		life, age time.Duration
		sandbox   string
		replaced  bool
	}{
		"young":              {0, 19 * time.Hour, executor.ProviderModal, false},
		"old":                {0, 20 * time.Hour, executor.ProviderModal, true},
		"old by a setting":   {time.Hour, 50 * time.Minute, executor.ProviderModal, true},
		"another provider's": {time.Hour, 20 * time.Hour, executor.ProviderLocal, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, forward := aging(t)
			b.sandbox = c.sandbox
			b.run(func(cfg *executor.Config) { cfg.ModalTimeout = c.life })
			s := b.session(short(events.Options{}))
			s.untilEnded(s.post("one"))
			forward(c.age)
			s.untilEnded(s.post("two"))
			if replaced := b.provider.made == 2; replaced != c.replaced {
				t.Errorf("%d sandboxes were made", b.provider.made)
			}
		})
	}
}

// A sandbox stays in the pool for at most a tenth of its life.
func TestSandboxLife_PoolIsRenewed(t *testing.T) {
	t.Parallel()
	b, forward := aging(t)
	b.run(func(c *executor.Config) { c.Pool, c.PoolEvery = []string{"claude-code=1"}, 20*time.Millisecond })
	made := func(n int) func() bool {
		return func() bool {
			b.provider.mu.Lock()
			defer b.provider.mu.Unlock()
			return b.provider.made == n && len(b.provider.boxes) == 1
		}
	}
	b.until("the pool is filled", made(1))
	first := b.provider.onlyBox().ID()
	forward(2 * time.Hour)
	s := b.session(short(events.Options{}))
	s.untilEnded(s.post("one"))
	if id := s.load().Run.Sandbox.ID; id != first {
		t.Errorf("the session has %s in place of %s", id, first)
	}
	s.remove()
	s.job()
	b.until("the pool is filled again", made(2))
	second := b.provider.onlyBox().ID()
	forward(3 * time.Hour)
	b.until("it is renewed", made(3))
	if _, gone := b.provider.wiped(second); !gone {
		t.Error("the old one was not ended")
	}
}
