package janitor

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

// forkTimeout is the maximum time that the session service takes from its last check that the parent of a fork is not
// deleted to the commit of the fork.
const forkTimeout = time.Minute

// unfoldedFork is a fork that is in the log and that the read models do not contain yet.
type unfoldedFork struct {
	sessionKey
	events.SessionForked
}

// unfoldedForks reads the forks from the log that the read models do not contain yet, up to the end that the log's
// leader reports.
func (p *pass) unfoldedForks(ctx context.Context) ([]unfoldedFork, error) {
	rows, err := p.conn.Query(ctx, "SELECT grp, position FROM checkpoints")
	if err != nil {
		return nil, fmt.Errorf("read the checkpoints: %w", err)
	}
	after := map[int]uint64{}
	var group int
	var position int64
	if _, err := pgx.ForEachRow(rows, []any{&group, &position}, func() error {
		after[group] = uint64(max(position, 0))
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the checkpoints: %w", err)
	}
	var out []unfoldedFork
	for partition := range p.log.Partitioning().PartitionCount() {
		from := eventlog.Position{Shard: partition % p.log.Shards(), Seq: after[p.log.Partitioning().GroupOfPartition(partition)]}
		for rec, err := range p.log.Read(ctx, from, eventlog.Filter{Partitions: []int{partition}}) {
			if err != nil {
				return nil, fmt.Errorf("look for forks that the read models do not have yet: %w", err)
			}
			for _, e := range rec.Events {
				if d, ok := e.Data.(events.SessionForked); ok {
					out = append(out, unfoldedFork{sessionKey{rec.Subject.Tenant, rec.Subject.ID}, d})
				}
			}
		}
	}
	return out, nil
}

// findLiveFork returns the id of a session that is not deleted and that was forked from the session k, directly or
// through other forks; "" if there is none. It reads the log once in a pass, because a session that was deleted long
// enough before the pass gets no new forks.
func (p *pass) findLiveFork(ctx context.Context, k sessionKey) (string, error) {
	if p.forks == nil {
		list, err := p.unfoldedForks(ctx)
		if err != nil {
			return "", err
		}
		p.forks = &list
	}
	seen := map[string]bool{}
	for parents := []string{k.ID}; len(parents) > 0; {
		rows, err := p.conn.Query(ctx, `SELECT id, true FROM sessions WHERE tenant = $1 AND parent <> '' AND parent = ANY ($2)
			UNION ALL SELECT id, false FROM deleted_sessions WHERE tenant = $1 AND parent <> '' AND parent = ANY ($2)`, k.Tenant, parents)
		if err != nil {
			return "", fmt.Errorf("look for forks of session %s: %w", k.ID, err)
		}
		var next []string
		var id, found string
		var there bool
		if _, err := pgx.ForEachRow(rows, []any{&id, &there}, func() error {
			if next = append(next, id); there {
				found = id
			}
			return nil
		}); err != nil {
			return "", fmt.Errorf("look for forks of session %s: %w", k.ID, err)
		}
		for _, f := range *p.forks {
			if found != "" || f.Tenant != k.Tenant || seen[f.ID] || !slices.Contains(parents, f.Parent) {
				continue
			}
			l, err := p.sessions.Load(ctx, f.Tenant, f.ID, eventlog.LeaderOnly)
			if err != nil {
				return "", err
			}
			seen[f.ID] = true
			if next = append(next, f.ID); l.Life.Status != session.Deleted {
				found = f.ID
			}
		}
		if found != "" {
			return found, nil
		}
		parents = next
	}
	return "", nil
}

// keptByForksReason returns the reason why a deleted session must be kept for its forks, or "" if it need not.
func (p *pass) keptByForksReason(ctx context.Context, l *eventlog.SessionState) (string, error) {
	rec, err := p.log.CommitAt(ctx, p.sessions.Position(l.ID, l.LifeHead.Seq))
	if err != nil {
		return "", fmt.Errorf("read the deletion of session %s: %w", l.ID, err)
	}
	if p.now().Before(rec.Time.Add(min(forkTimeout, p.cfg.Grace))) {
		return "a fork may be under way", nil
	}
	fork, err := p.findLiveFork(ctx, sessionKey{l.Tenant, l.ID})
	if err != nil || fork == "" {
		return "", err
	}
	return "session " + fork + " was forked from it", nil
}

// forkSnapshots returns the names of those snapshots of a session that its forks need: a fork begins with a snapshot of
// its parent, and needs it until it has a snapshot of its own.
func (p *pass) forkSnapshots(ctx context.Context, k sessionKey) (map[string]bool, error) {
	list, err := p.unfoldedForks(ctx)
	if err != nil {
		return nil, err
	}
	rows, err := p.conn.Query(ctx, "SELECT id, forked FROM sessions WHERE tenant = $1 AND parent <> '' AND snapshot = ''", k.Tenant)
	if err != nil {
		return nil, fmt.Errorf("look for snapshots that forks begin with: %w", err)
	}
	var id, text string
	if _, err := pgx.ForEachRow(rows, []any{&id, &text}, func() error {
		f := unfoldedFork{sessionKey: sessionKey{k.Tenant, id}}
		if err := json.Unmarshal([]byte(text), &f.SessionForked); err != nil {
			return fmt.Errorf("session %s: %w", id, err)
		}
		list = append(list, f)
		return nil
	}); err != nil {
		return nil, fmt.Errorf("look for snapshots that forks begin with: %w", err)
	}
	names := map[string]bool{}
	for _, f := range list {
		if f.Tenant == k.Tenant && f.FilesOwner() == k.ID {
			names[f.Snapshot] = true
		}
		if f.Tenant == k.Tenant && f.RecordsOwner() == k.ID {
			names[f.Records] = true
		}
	}
	return names, nil
}
