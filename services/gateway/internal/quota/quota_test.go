package quota_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/quota"
)

// answer is an answer of the read models.
type answer struct {
	bytes int64
	err   error
}

func refused(err error) bool {
	var p *problem.Error
	return errors.As(err, &p) && p.Code == problem.TenantStorage
}

// TestCheck_UsesTheLastAnswerWithoutReadModels tests that, while the read models do not respond, commands are checked against the last
// answer, or not at all before the first one, and that uploads fail.
func TestCheck_UsesTheLastAnswerWithoutReadModels(t *testing.T) {
	t.Parallel()
	away := errors.New("no answer")
	var now answer
	q := quota.New(quota.Config{
		Limit:  func(string) int64 { return 100 },
		Stored: func(context.Context, string) (int64, map[int]uint64, error) { return now.bytes, nil, now.err },
		Now:    time.Now,
	})
	for _, step := range []struct {
		now     answer
		refused bool
	}{{answer{0, away}, false}, {answer{100, nil}, true}, {answer{0, away}, true}, {answer{99, nil}, false}, {answer{0, away}, false}} {
		now = step.now
		if err := q.CheckLimit(t.Context(), "acme"); refused(err) != step.refused || !step.refused && err != nil {
			t.Errorf("%+v: %v", step.now, err)
		}
	}
	if _, err := q.Reserve(t.Context(), "acme", 1); !errors.Is(err, away) {
		t.Errorf("an upload: %v", err)
	}
}

// TestReserve_IgnoresAnswersThatWereOvertaken tests that the answer to an earlier query, which lacks an upload, is ignored after a
// later answer that includes it.
func TestReserve_IgnoresAnswersThatWereOvertaken(t *testing.T) {
	t.Parallel()
	asked, release := make(chan struct{}), make(chan struct{})
	slow := make(chan bool, 1)
	slow <- true
	q := quota.New(quota.Config{
		Limit: func(string) int64 { return 100 },
		Stored: func(context.Context, string) (int64, map[int]uint64, error) {
			select {
			case <-slow:
				close(asked)
				<-release
				return 0, nil, nil
			default:
				return 60, nil, nil
			}
		},
		Now: time.Now,
	})
	first := make(chan error)
	go func() {
		_, err := q.Reserve(t.Context(), "acme", 60)
		first <- err
	}()
	<-asked
	if _, err := q.Reserve(t.Context(), "acme", 60); !refused(err) {
		t.Errorf("the later one: %v", err)
	}
	close(release)
	if err := <-first; !refused(err) {
		t.Errorf("the earlier one: %v", err)
	}
}
