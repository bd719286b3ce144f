package eventlog_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// TestNewestAuditEntries_FitsIntoACommit tests that, of a session with very many audit entries, the newest ones are kept in
// order and fit into a commit without the object store. The objects of a session are deleted with the session.
func TestNewestAuditEntries_FitsIntoACommit(t *testing.T) {
	t.Parallel()
	var list []events.AuditEntry
	for i := range 10_000 {
		actor := author()
		actor.User = strings.Repeat("u", events.MaxUserBytes)
		list = append(list, events.AuditEntry{Seq: uint64(i + 1), Time: time.Unix(1_750_000_000, 0), Actor: actor, Types: []events.Type{"message_accepted"}, ExecutionID: fmt.Sprint("exe_", i)})
	}
	kept, err := eventlog.NewestAuditEntries(list)
	if err != nil || len(kept) < 300 || kept[len(kept)-1].Seq != 10_000 || kept[0].Seq != uint64(10_000-len(kept)+1) {
		t.Fatalf("NewestAuditEntries kept %d entries, %v", len(kept), err)
	}
	if b, err := json.Marshal(events.RunRetired{Audit: kept}); err != nil || len(b) > events.MaxInlineBytes {
		t.Errorf("the kept entries have %d bytes, %v", len(b), err)
	}
	if kept, err = eventlog.NewestAuditEntries(list[:100]); err != nil || len(kept) != 100 {
		t.Errorf("NewestAuditEntries kept %d of 100 entries, %v", len(kept), err)
	}
	if kept, err = eventlog.NewestAuditEntries(nil); err != nil || len(kept) != 0 {
		t.Errorf("NewestAuditEntries kept %d of 0 entries, %v", len(kept), err)
	}
}
