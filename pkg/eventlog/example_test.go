package eventlog_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
)

// Two copies of a service hold the same head. The guard accepts the append of one of them.
func Example() {
	ctx := context.Background()
	log, err := memlog.New(memlog.Config{})
	if err != nil {
		panic(err)
	}
	life := events.LifeSubject("default", events.DeriveID(events.KindSession, "example"))
	head, err := log.Last(ctx, life, eventlog.AnyReplica)
	if err != nil {
		panic(err)
	}
	for _, copy := range []string{"first", "second"} {
		_, err := log.Append(ctx, head, events.Draft{
			ID: events.DeriveID(events.KindCommit, copy), Actor: events.Actor{Kind: "service", ID: "session"},
			Events: []events.Event{{
				ID: events.DeriveID(events.KindEvent, copy), Time: time.Unix(1_750_000_000, 0), Source: events.FromServer,
				Data: events.SessionCreated{Agent: "default", Architecture: copy},
			}},
		})
		var conflict *eventlog.ConflictError
		fmt.Println(copy, "is refused:", errors.As(err, &conflict))
	}
	for n, err := range eventlog.SessionEvents(ctx, log, life.Tenant, life.ID) {
		fmt.Println(n.Seq, n.Position, n.Aspect, n.Event.Type(), err)
	}
	report, err := eventlog.Verify(ctx, log, eventlog.VerifyScope{})
	fmt.Println(report.Commits, report.Problem == nil, err)
	// Output:
	// first is refused: false
	// second is refused: true
	// 1 0-1 life session_created <nil>
	// 1 true <nil>
}
