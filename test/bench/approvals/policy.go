package approvals

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spoolhq/spool/cmd/runner/permitter"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

const (
	// maxPolicyMicrosPerCall is the performance target: the maximum processor time, in microseconds, that a policy of 100
	// rules adds to the decision about a call.
	maxPolicyMicrosPerCall = 50.0
	// maxTurnRatio is the performance target: the maximum time of a turn with a policy, divided by that of a turn without
	// one.
	maxTurnRatio = 1.05
)

// callsPerRound is the number of decisions about calls in one measured round. A round takes 5 to 25 ms, so that two
// adjacent rounds meet the same load of a shared machine.
const callsPerRound = 2000

// decidedCalls returns the calls that a measured round decides, again and again: half of them are commands. An agent
// without permissions may make them too.
func decidedCalls() []permission.Call {
	return []permission.Call{
		{Tool: "Bash", Kind: permission.KindShell, Command: "cd /workspace && go test ./... 2>&1 | tail -20"},
		{Tool: "Edit", Kind: permission.KindEdit, Paths: []permission.Path{{Path: "internal/server/server.go"}}},
		{Tool: "Bash", Kind: permission.KindShell, Command: `git commit -am "server: close idle connections"`},
		{Tool: "Read", Kind: permission.KindRead, Paths: []permission.Path{{Path: "internal/server/server_test.go"}}},
	}
}

// measureInPairs calls measure once for kind 0 and once for kind 1 in each pair. The kinds take turns to begin a pair.
// It returns the results by kind and pair.
func measureInPairs(pairs int, measure func(kind int) (float64, error)) (values [2][]float64, err error) {
	for i := range pairs {
		for j := range 2 {
			kind := (i + j) % 2
			v, err := measure(kind)
			if err != nil {
				return values, err
			}
			values[kind] = append(values[kind], v)
		}
	}
	return values, nil
}

// pairRatios returns, for each pair of measurements, the value of kind 1 divided by that of kind 0.
func pairRatios(values [2][]float64) (ratios []float64) {
	for i, v := range values[0] {
		ratios = append(ratios, values[1][i]/v)
	}
	return ratios
}

// compareCalls compares the processor time of decisions about calls with and without a permission policy, and returns
// the row of docs/performance.md.
func compareCalls(ctx context.Context, pairs int) (row.Row, error) {
	var deciders [2]*permitter.Permitter
	for kind, p := range []*events.Permissions{{}, hundredRules()} {
		var err error
		if deciders[kind], err = permitter.New(ctx, *p); err != nil {
			return row.Row{}, err
		}
	}
	all := decidedCalls()
	round := func(kind int) (float64, error) {
		used, err := harness.CPUTime(func() error {
			for i := range callsPerRound {
				if c := all[i%len(all)]; !deciders[kind].IsAllowed(c) {
					return fmt.Errorf("the policy denies a call of %s", c.Tool)
				}
			}
			return nil
		})
		return used.Seconds() * 1e6 / callsPerRound, err
	}
	if _, err := measureInPairs(2, round); err != nil { // the process has just started
		return row.Row{}, err
	}
	costs, err := measureInPairs(pairs, round)
	if err != nil {
		return row.Row{}, err
	}
	var added []float64
	for i, without := range costs[0] {
		added = append(added, costs[1][i]-without)
	}
	low, high := harness.MedianBounds(added)
	return row.Row{
		What:     "permission policy of 100 rules, processor time for each call of a tool",
		Target:   fmt.Sprintf("at most +%.0f µs over no permissions", maxPolicyMicrosPerCall),
		Measured: fmt.Sprintf("%+.1f µs", harness.Median(added)),
		Against:  fmt.Sprintf("no permissions %.1f µs a call, with the record of the decision", harness.Median(costs[0])),
		Ratio:    harness.Median(pairRatios(costs)),
		OK:       harness.Median(added) <= maxPolicyMicrosPerCall,
		Note: fmt.Sprintf("median of %d pairs of rounds of %d calls, 95 %% interval %.1f to %.1f µs; the last rule matches; the others are about tools, paths and commands; half of the calls are commands, which are parsed",
			pairs, callsPerRound, low, high),
	}, nil
}

const (
	// turnsPerBlock is the number of turns between two readings of processor times, which have a resolution of 10 ms.
	turnsPerBlock = 5
	// pairsPerSession is the number of pairs of blocks of turns after which new sessions begin, because the conversation
	// grows.
	pairsPerSession = 4
)

// compareTurns compares turns of the built-in agent with and without a permission policy, and reports the rows of
// docs/performance.md: the time of a turn, and the processor time of all processes.
func compareTurns(ctx context.Context, b *harness.Bench, sys *system.System, pairs int) error {
	slugs := [2]string{"unrestricted", "restricted"}
	for kind, p := range []*events.Permissions{nil, hundredRules()} {
		if err := applyAgent(ctx, sys, slugs[kind], architecture.Spool, p); err != nil {
			return err
		}
	}
	var took, used [2][]float64 // milliseconds a turn, by kind and block
	for len(took[0]) < pairs {
		if err := measureSessions(ctx, sys, slugs, min(pairsPerSession, pairs-len(took[0])), &took, &used); err != nil {
			return err
		}
	}
	for _, m := range []struct {
		what   string
		values [2][]float64
	}{
		{fmt.Sprintf("turn of %d calls with a permission policy of 100 rules, message posted to the end of the turn, the built-in agent", callsPerTurn), took},
		{"the same: processor time of all processes", used},
	} {
		if err := b.ReportRow(turnRow(m.what, m.values)); err != nil {
			return err
		}
	}
	return nil
}

// turnRow returns a row of docs/performance.md that compares turns with and without a permission policy. values are
// milliseconds a turn, by kind (0 is without a policy) and pair; what names the measured time.
func turnRow(what string, values [2][]float64) row.Row {
	ratios := pairRatios(values)
	ratio := harness.Median(ratios)
	low, high := harness.MedianBounds(ratios)
	return row.Row{
		What:     what,
		Target:   "5 % over no permissions",
		Measured: fmt.Sprintf("%.1f ms", harness.Median(values[1])),
		Against:  fmt.Sprintf("no permissions %.1f ms", harness.Median(values[0])),
		Ratio:    ratio,
		OK:       ratio <= maxTurnRatio,
		Note: fmt.Sprintf("ratio: median of those of %d pairs of adjacent blocks of %d turns, 95 %% interval %.3f to %.3f; the last rule allows the calls; half of them run a command",
			len(ratios), turnsPerBlock, low, high),
	}
}

// measureSessions measures pairs of blocks of turns in two new sessions, one without a policy and one with it. It adds
// milliseconds a turn to took (the time of a turn) and used (processor time). The first turn of each session is not
// measured.
func measureSessions(ctx context.Context, sys *system.System, slugs [2]string, pairs int, took, used *[2][]float64) (err error) {
	var sessions [2]*session
	for kind := range sessions {
		s, err := newSession(ctx, sys, slugs[kind])
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.Close()) }()
		if _, err := s.timeManyCalls(ctx); err != nil {
			return err
		}
		sessions[kind] = s
	}
	cpu, err := measureInPairs(pairs, func(kind int) (float64, error) {
		before, err := harness.Processes(os.Getpid())
		if err != nil {
			return 0, err
		}
		var sum time.Duration
		for range turnsPerBlock {
			d, err := sessions[kind].timeManyCalls(ctx)
			if err != nil {
				return 0, err
			}
			sum += d
		}
		took[kind] = append(took[kind], float64(sum.Microseconds())/1000/turnsPerBlock)
		after, err := harness.Processes(os.Getpid())
		return (harness.TotalCPU(after) - harness.TotalCPU(before)).Seconds() * 1000 / turnsPerBlock, err
	})
	for kind := range cpu {
		used[kind] = append(used[kind], cpu[kind]...)
	}
	return err
}

// timeManyCalls takes a turn with several calls of tools, all of which the policy must allow without a person. It
// returns the time from the POST of the message to the end of the turn.
func (s *session) timeManyCalls(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	allowed := 0
	var ended time.Time
	t, err := s.client.TakeTurn(ctx, s.socket, s.id, manyCallsMessage, func(w events.WireEvent, received time.Time) error {
		if d, ok := w.Event().Data.(events.PermissionDecided); ok && d.Decision == events.PermissionAllow {
			allowed++
		}
		ended = received
		return nil
	})
	if err == nil && allowed != callsPerTurn {
		err = fmt.Errorf("%d calls were allowed, want %d", allowed, callsPerTurn)
	}
	return ended.Sub(t.Posted), err
}
