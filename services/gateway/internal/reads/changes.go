package reads

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// ChangeCursor is a position in the changes of a tenant's sessions: for each projector group, the stream sequence up to which the client has all
// changes.
type ChangeCursor []int64

// String returns the form of the cursor that clients see, which is opaque to them.
func (c ChangeCursor) String() string {
	var b strings.Builder
	for i, seq := range c {
		if i > 0 {
			b.WriteByte('.')
		}
		b.WriteString(strconv.FormatInt(seq, 36))
	}
	return b.String()
}

// ParseChangeCursor parses the cursor of a client, which must be one of this installation.
func (s *Store) ParseChangeCursor(field, text string) (ChangeCursor, error) {
	parts := strings.Split(text, ".")
	c := make(ChangeCursor, len(parts))
	err := error(nil)
	for i, p := range parts {
		if c[i], err = strconv.ParseInt(p, 36, 64); err != nil || c[i] < 0 {
			err = fmt.Errorf("not a number: %q", p)
			break
		}
	}
	if err != nil || len(parts) != s.cfg.Partitions.GroupCount() || c.String() != text {
		return nil, problem.Invalid(field, "%+q is not a cursor of this stream", truncate.Text(text, 64))
	}
	return c, nil
}

// SessionChange holds a session as lists show it after a change, or its deletion.
type SessionChange struct {
	Cursor  ChangeCursor     // the position of the change
	Session *spoolv1.Session // nil if the session was deleted
	JSON    []byte           // of Session or of the deletion
	Deleted *spoolv1.DeletedSession
	Agent   string // slug of the session's agent

	position changePosition
}

// maxChanges is the maximum number of changes in one read, of sessions that exist and of deleted ones each.
const maxChanges = 200

// changeBounds are the parameters of a read of changes.
type changeBounds struct {
	tenant      string
	groups      []int16
	after, upTo []int64
}

// changedSession is a row of a session that has changed.
type changedSession struct {
	Grp       int16
	ChangedAt int64
	queries.SessionRow
}

// deletedSession is a row of a session that was deleted.
type deletedSession struct {
	Grp       int16
	ChangedAt int64
	ID, Agent string
	DeletedAt time.Time
}

// ChangeTip returns the cursor after all changes that the read models have. complete is false while they are being folded from the log.
func (s *Store) ChangeTip(ctx context.Context) (tip ChangeCursor, complete bool, err error) {
	tip, complete = make(ChangeCursor, s.cfg.Partitions.GroupCount()), true
	progress, err := s.Progress(ctx)
	for g, p := range progress {
		if g < len(tip) {
			tip[g] = int64(p.Position) //nolint:gosec // sequences of streams are far below the limit
			complete = complete && p.CaughtUp
		}
	}
	return tip, complete, err
}

// Changes returns the changes of a tenant's sessions after a cursor: of each session that changed, its present state, once. next is the cursor for the
// next read, and more is set if that read need not wait. The order is that of the log within each projector group.
func (s *Store) Changes(ctx context.Context, tenant string, after ChangeCursor) (list []SessionChange, next ChangeCursor, more bool, err error) {
	// The bound is read first: what changes after it moves beyond it, and belongs to a later read.
	tip, _, err := s.ChangeTip(ctx)
	if err != nil {
		return nil, nil, false, err
	}
	b, next := changeBounds{tenant: tenant}, slices.Clone(after)
	for g, seq := range tip {
		if seq > after[g] {
			b.groups, b.after, b.upTo = append(b.groups, int16(g)), append(b.after, after[g]), append(b.upTo, seq) //nolint:gosec // at most 64 groups
			next[g] = seq
		}
	}
	if len(b.groups) == 0 {
		return nil, after, false, nil
	}
	changed, err := readChanges[changedSession](ctx, s, b, "sessions", changedSessionColumns())
	if err != nil {
		return nil, nil, false, err
	}
	deleted, err := readChanges[deletedSession](ctx, s, b, "deleted_sessions", [2]string{"SELECT deleted_sessions.grp, deleted_sessions.changed_at, id, agent, deleted_at", ""})
	if err != nil {
		return nil, nil, false, err
	}
	for _, r := range changed {
		m, err := sessionMessage(r.SessionRow)
		if err != nil {
			return nil, nil, false, err
		}
		list = append(list, SessionChange{position: changePosition{r.Grp, r.ChangedAt}, Session: m, JSON: wirejson.Marshal(m), Agent: r.Agent})
	}
	for _, r := range deleted {
		m := &spoolv1.DeletedSession{SessionId: r.ID, DeletedAt: wirejson.TimestampOf(r.DeletedAt)}
		list = append(list, SessionChange{position: changePosition{r.Grp, r.ChangedAt}, Deleted: m, JSON: wirejson.Marshal(m), Agent: r.Agent})
	}
	slices.SortFunc(list, func(a, b SessionChange) int { return a.position.compare(b.position) })
	for _, n := range []int{len(changed), len(deleted)} {
		more = more || n == maxChanges
	}
	if more { // what follows the last row of a list that was cut is missing
		var last *changePosition
		if len(changed) == maxChanges {
			last = &changePosition{changed[maxChanges-1].Grp, changed[maxChanges-1].ChangedAt}
		}
		if len(deleted) == maxChanges {
			if p := (changePosition{deleted[maxChanges-1].Grp, deleted[maxChanges-1].ChangedAt}); last == nil || p.compare(*last) < 0 {
				last = &p
			}
		}
		list = slices.DeleteFunc(list, func(c SessionChange) bool { return c.position.compare(*last) > 0 })
	}
	at := slices.Clone(after)
	for i, c := range list {
		for _, g := range b.groups {
			if g < c.position.group {
				at[g] = next[g]
			}
		}
		at[c.position.group] = c.position.seq
		list[i].Cursor = slices.Clone(at)
	}
	if more {
		next = at
	}
	return list, next, more, nil
}

// changePosition is the position of a change in the log.
type changePosition struct {
	group int16
	seq   int64
}

func (p changePosition) compare(o changePosition) int {
	return cmp.Or(cmp.Compare(p.group, o.group), cmp.Compare(p.seq, o.seq))
}

// changedSessionColumns returns the parts of the statement for one session before and after its table, with the columns of changedSession.
func changedSessionColumns() [2]string {
	columns, outer, _ := strings.Cut(queries.Session, "\nFROM sessions\n")
	_, columns, _ = strings.Cut(columns, "\nSELECT ")
	outer, _, _ = strings.Cut(outer, "\nWHERE ")
	return [2]string{"SELECT sessions.grp, sessions.changed_at, " + columns, outer}
}

// readChanges returns the rows of a table that changed within the bounds, in the order of the groups and of the log.
func readChanges[R any](ctx context.Context, s *Store, b changeBounds, table string, columns [2]string) ([]R, error) {
	sql := fmt.Sprintf(`%s
FROM (SELECT x.* FROM unnest($2::smallint[], $3::bigint[], $4::bigint[]) AS b(grp, after, up_to)
      CROSS JOIN LATERAL (SELECT t.* FROM %[2]s t WHERE t.tenant = $1 AND t.grp = b.grp AND t.changed_at > b.after AND t.changed_at <= b.up_to
                           ORDER BY t.changed_at LIMIT %[3]d) x
      ORDER BY x.grp, x.changed_at LIMIT %[3]d) AS %[2]s
%[4]s
ORDER BY %[2]s.grp, %[2]s.changed_at`, columns[0], table, maxChanges, columns[1])
	rows, err := s.db.Query(ctx, sql, b.tenant, b.groups, b.after, b.upTo)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[R])
}

// CheckChangeCursor returns CURSOR_AHEAD for a cursor that is ahead of all changes, or UNAVAILABLE while the read models are being folded.
func (s *Store) CheckChangeCursor(ctx context.Context, field string, after ChangeCursor) error {
	tip, complete, err := s.ChangeTip(ctx)
	if err != nil {
		return err
	}
	for g, seq := range after {
		if seq <= tip[g] {
			continue
		}
		if !complete {
			return errReadModelsFolding()
		}
		return problem.New(problem.CursorAhead, field, "the cursor is ahead of all changes: it is not one of this installation; list the sessions and start again without it")
	}
	return nil
}
