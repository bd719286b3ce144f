package janitor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

// refusedFiles removes files of a session that exists, whose request was refused: no event refers to them.
func (p *pass) refusedFiles(ctx context.Context, k sessionKey, list []object) error {
	var files []object
	for _, o := range list {
		id := o.Name[strings.LastIndexByte(o.Name, '/')+1:]
		upload := strings.HasPrefix(id, "u-") || strings.HasPrefix(id, "f-")
		if upload && o.At.Before(p.settled()) && !p.fileNeeded[o.seq] {
			files = append(files, o)
		}
	}
	if len(files) == 0 {
		return nil
	}
	rows, err := p.conn.Query(ctx, `SELECT event::json #>> '{data,object}' FROM events WHERE tenant = $1 AND session = $2 AND type = $3`, k.Tenant, k.ID, events.FilePut{}.EventType())
	if err != nil {
		return fmt.Errorf("look for the session's files: %w", err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("look for the session's files: %w", err)
	}
	if files = p.withoutReference(files, names); len(files) == 0 {
		return nil
	}
	// The read models may lag, so the log decides. All that a deleted session has goes with it.
	l, err := p.sessions.Load(ctx, k.Tenant, k.ID, eventlog.Leader)
	if err != nil || l.Life.Status == session.Deleted {
		return err
	}
	if names, err = p.putFiles(ctx, k); err != nil {
		return err
	}
	files = p.withoutReference(files, names)
	return p.removeObjects(ctx, p.workspaces, Item{Kind: KindUploads, Tenant: k.Tenant, Name: k.ID}, files)
}

// withoutReference returns the objects whose name is not in names, and notes the others, so that later passes do not look again.
func (p *pass) withoutReference(list []object, names []string) []object {
	known := map[string]bool{}
	for _, name := range names {
		known[name] = true
	}
	return slices.DeleteFunc(list, func(o object) bool {
		if known[o.Name] {
			p.fileNeeded[o.seq] = true
		}
		return known[o.Name]
	})
}

// putFiles returns the names of the objects that the events of a session refer to.
func (p *pass) putFiles(ctx context.Context, k sessionKey) (names []string, err error) {
	shard := eventlog.Position{Shard: p.sessions.Position(k.ID, 1).Shard}
	for rec, err := range p.log.Read(ctx, shard, eventlog.Filter{Subject: events.LifeOf(k.Tenant, k.ID)}) {
		if err != nil {
			return nil, fmt.Errorf("read the session's files: %w", err)
		}
		for _, e := range rec.Events {
			if d, ok := e.Data.(events.FilePut); ok {
				names = append(names, d.Object)
			}
		}
	}
	return names, nil
}
