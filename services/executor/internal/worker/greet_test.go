package worker

import (
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/commits"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

// Lines that the runner has removed are in the log. The worker does not wait for them on a stream that begins after
// them; otherwise it would never send the query.
func TestGreetAfterForgottenLines(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		seen, logged, first, last uint64
		want                      uint64
		gap                       bool
	}{
		"nothing kept, all seen":      {seen: 49, first: 50, last: 49, want: 49},
		"nothing kept, another saw":   {seen: 49, logged: 53, first: 54, last: 53, want: 53},
		"some kept, another saw some": {seen: 49, logged: 51, first: 52, last: 53, want: 51},
		"all kept":                    {seen: 0, first: 1, last: 7, want: 0},
		"an empty journal":            {seen: 0, first: 1, last: 0, want: 0},
		"forgotten, and not logged":   {seen: 49, logged: 50, first: 52, last: 53, want: 51, gap: true},
		"all forgotten":               {seen: 49, logged: 50, first: 54, last: 53, want: 53, gap: true},
		"a hello without bounds":      {seen: 3, want: 3},
	} {
		x := &runlog.Execution{Session: &eventlog.SessionState{Run: run.State{Sandbox: run.Sandbox{N: c.logged}}}, ID: "exe_new"}
		f := &follower{commits: commits.New(x, 0), turn: &turn{
			w: &Worker{deps: Deps{Now: time.Now}}, Execution: x,
			agent: &agents.Agent{Hello: &runner.Hello{First: c.first, Last: c.last}}, translator: &translate.Translator{Last: c.seen},
		}}
		f.readHello()
		if f.translator.Last != c.want || f.startAfter != c.last || c.gap != (f.gap != "") {
			t.Errorf("%s: seen is %d, want %d; the query waits for %d; gap %q", name, f.translator.Last, c.want, f.startAfter, f.gap)
		}
	}
}
