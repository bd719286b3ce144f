package jslog_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
)

// TestChangedAmong_ManySubjects tests that all changes are found among more subjects than one request may name.
func TestChangedAmong_ManySubjects(t *testing.T) {
	t.Parallel()
	l := open(t, natstest.Conn(t, natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort})), 1)
	const many = 1100
	subjects, want := make([]events.Subject, many), map[string]uint64{}
	var mu sync.Mutex
	var writers sync.WaitGroup
	for i := range many {
		writers.Go(func() {
			name := fmt.Sprint("many ", i)
			subjects[i] = events.LifeSubject(eventlogtest.Tenant, eventlogtest.ID(events.KindSession, name))
			head, err := l.Append(t.Context(), eventlog.Head{Subject: subjects[i]}, eventlogtest.Draft(name, name))
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			want[subjects[i].String()] = head.Seq
		})
	}
	writers.Wait()
	c, err := l.ChangedAmong(t.Context(), eventlog.Position{}, subjects)
	if err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(c.Last, want) || c.Through.Seq != many {
		t.Errorf("found %d of %d subjects, through %s", len(c.Last), many, c.Through)
	}
}

// An answer is what a server sends to a request: headers for each message.
type answer []nats.Header

func stored(subject string, seq, before int) nats.Header {
	// The first value of each name is forged: it was stored with the message.
	return nats.Header{
		jetstream.SubjectHeader:  {"forged", subject},
		jetstream.SequenceHeader: {"999", fmt.Sprint(seq)},
		"Nats-Last-Sequence":     {"998", fmt.Sprint(before)},
		jetstream.TimeStampHeaer: {"2026-01-02T03:04:05Z"},
	}
}

func end(pending, last, upTo int) nats.Header {
	return nats.Header{
		"Status": {"204"}, "Nats-Num-Pending": {fmt.Sprint(pending)}, "Nats-Last-Sequence": {fmt.Sprint(last)}, "Nats-UpTo-Sequence": {fmt.Sprint(upTo)},
	}
}

// TestChangedAmong_Answers tests that a request is repeated if messages of its answer were lost, that a truncated
// answer is continued, and that the answer of a replica that lags does not move the end back.
func TestChangedAmong_Answers(t *testing.T) {
	t.Parallel()
	one := events.LifeSubject(eventlogtest.Tenant, eventlogtest.ID(events.KindSession, "one"))
	two := events.LifeSubject(eventlogtest.Tenant, eventlogtest.ID(events.KindSession, "two"))
	both := map[string]uint64{one.String(): 10, two.String(): 12}
	whole := answer{stored(one.String(), 10, 0), stored(two.String(), 12, 10), end(0, 12, 20)}
	for name, test := range map[string]struct {
		answers []answer
		want    map[string]uint64
		through uint64
		from    []uint64 // sequences of the requests
		fails   bool
	}{
		"whole":                             {answers: []answer{whole}, want: both, through: 20, from: []uint64{6}},
		"the first message was lost":        {answers: []answer{whole[1:], whole}, want: both, through: 20, from: []uint64{6, 6}},
		"the last message was lost":         {answers: []answer{{whole[0], whole[2]}, whole}, want: both, through: 20, from: []uint64{6, 6}},
		"the end was lost":                  {answers: []answer{whole[:2], whole}, want: both, through: 20, from: []uint64{6, 6}},
		"cut by the server":                 {answers: []answer{{whole[0], end(1, 10, 20)}, {stored(two.String(), 12, 0), end(0, 12, 21)}}, want: both, through: 21, from: []uint64{6, 11}},
		"a replica that has nothing":        {answers: []answer{{{"Status": {"404"}}}}, through: 5, from: []uint64{6}},
		"a replica that lags":               {answers: []answer{{end(0, 0, 3)}}, through: 5, from: []uint64{6}},
		"no server has the stream":          {answers: []answer{{{"Status": {"503"}}}, whole}, want: both, through: 20, from: []uint64{6, 6}},
		"refused":                           {answers: []answer{{{"Status": {"413"}, "Description": {"Too Many Results"}}}}, fails: true, from: []uint64{6}},
		"without the end of the replica":    {answers: []answer{{{"Status": {"204"}, "Nats-Num-Pending": {"0"}, "Nats-Last-Sequence": {"0"}}}}, fails: true, from: []uint64{6}},
		"with a sequence that is no number": {answers: []answer{{stored(one.String(), 10, 0), {jetstream.SubjectHeader: {"x"}, jetstream.SequenceHeader: {"x"}, "Nats-Last-Sequence": {"10"}}}}, fails: true, from: []uint64{6}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			nc := natstest.Conn(t, natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort}))
			asked := make(chan uint64, 10)
			answers := test.answers
			if _, err := nc.Subscribe("SCRIPT.DIRECT.GET.>", func(m *nats.Msg) {
				var request struct{ Seq uint64 }
				if err := json.Unmarshal(m.Data, &request); err != nil {
					t.Error(err)
				}
				asked <- request.Seq
				if len(answers) == 0 {
					return
				}
				for _, h := range answers[0] {
					if err := nc.PublishMsg(&nats.Msg{Subject: m.Reply, Header: h}); err != nil {
						t.Error(err)
					}
				}
				answers = answers[1:]
			}); err != nil {
				t.Fatal(err)
			}
			js, err := jetstream.NewWithAPIPrefix(nc, "SCRIPT")
			if err != nil {
				t.Fatal(err)
			}
			l, err := jslog.New(jslog.Config{JetStream: js, AckTimeout: 500 * time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			defer cancel()
			c, err := l.ChangedAmong(ctx, eventlog.Position{Seq: 5}, []events.Subject{one, two})
			if test.fails {
				if !errors.Is(err, eventlog.ErrUnavailable) {
					t.Errorf("ChangedAmong returned %+v, %v", c, err)
				}
			} else if err != nil || !maps.Equal(c.Last, test.want) || c.Through.Seq != test.through {
				t.Errorf("ChangedAmong returned %+v, %v, want %v through %d", c, err, test.want, test.through)
			}
			close(asked) // the log has its answer, or has given up
			var from []uint64
			for seq := range asked {
				from = append(from, seq)
			}
			if !slices.Equal(from, test.from) {
				t.Errorf("the requests begin at %v, want %v", from, test.from)
			}
		})
	}
}
