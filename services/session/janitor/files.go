package janitor

import (
	"context"
	"fmt"
	"math"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

// fileChange is a change of a session's workspace, an event file_put, whose file is in an object. N numbers the changes
// of a session.
type fileChange struct {
	Object string
	N      uint32
}

// removeUnneededUploads removes uploaded files that an existing session no longer needs: those of refused requests, to
// which no event refers, and those that the session's last snapshot contains.
func (p *pass) removeUnneededUploads(ctx context.Context, k sessionKey, list []bucketObject) error {
	var manifest uint64
	for _, o := range list {
		if strings.HasPrefix(o.lastNamePart(), "m-") {
			manifest = max(manifest, o.seq)
		}
	}
	var files []bucketObject
	for _, o := range list {
		upload := strings.HasPrefix(o.lastNamePart(), "u-") || strings.HasPrefix(o.lastNamePart(), "f-")
		found, needed := p.fileNeeded[o.seq]
		switch {
		case needed && found == manifest:
			p.stillNeeded[o.seq] = manifest
		case upload && o.At.Before(p.removalCutoff()):
			files = append(files, o)
		}
	}
	if len(files) == 0 {
		return nil
	}
	rows, err := p.conn.Query(ctx, `SELECT coalesce(event::json #>> '{data,object}', ''), coalesce(event::json #>> '{data,n}', '0')::bigint
		FROM events WHERE tenant = $1 AND session = $2 AND type = $3`, k.Tenant, k.ID, events.FilePut{}.EventType())
	if err != nil {
		return fmt.Errorf("look for the session's files: %w", err)
	}
	changes, err := pgx.CollectRows(rows, pgx.RowToStructByPos[fileChange])
	if err != nil {
		return fmt.Errorf("look for the session's files: %w", err)
	}
	// The read models may lag, so the log decides. The objects of a deleted session are removed with its content.
	l, err := p.sessions.Load(ctx, k.Tenant, k.ID, eventlog.LeaderOnly)
	if err != nil || l.Life.Status == session.Deleted {
		return err
	}
	begun := initialTranscript(l)
	refused, held := p.findUnneededFiles(files, append(changes, begun...), lastSnapshotChange(l), manifest)
	if len(refused)+len(held) == 0 {
		return nil
	}
	if changes, err = p.fileChanges(ctx, k); err != nil {
		return err
	}
	refused, held = p.findUnneededFiles(append(refused, held...), append(changes, begun...), lastSnapshotChange(l), manifest)
	if err := p.removeObjects(ctx, p.workspaces, ReportItem{Kind: KindUploads, Tenant: k.Tenant, Name: k.ID}, refused); err != nil {
		return err
	}
	if len(held) == 0 {
		return nil
	}
	// A fork that has no snapshot of its own yet may still apply files that its parent's next snapshot contains.
	snapshots, err := p.forkSnapshots(ctx, k)
	if err != nil || len(snapshots) > 0 {
		return err
	}
	return p.removeObjects(ctx, p.workspaces, ReportItem{Kind: KindFiles, Tenant: k.Tenant, Name: k.ID}, held)
}

// initialTranscript returns the transcript with which a session began, as a fileChange. No snapshot counts as
// containing it, because forks may begin with the transcript too.
func initialTranscript(l *eventlog.SessionState) []fileChange {
	if t := l.Life.Transcript; t != nil {
		return []fileChange{{t.Object, math.MaxUint32}}
	}
	return nil
}

// lastSnapshotChange returns the number of the last file change that the session's last snapshot contains; executors do
// not apply this change and earlier ones again. It returns 0 for a session that works in a folder of the host, which is
// never filled from a snapshot.
func lastSnapshotChange(l *eventlog.SessionState) uint32 {
	if l.Life.Options.HostPath != "" {
		return 0
	}
	return l.Run.Snapshot.Applied
}

// findUnneededFiles returns the files to which no change refers (refused), and those whose changes a snapshot contains
// (applied). It remembers the other files, so that passes before the session's next snapshot do not check them again.
func (p *pass) findUnneededFiles(files []bucketObject, changes []fileChange, held uint32, manifest uint64) (refused, applied []bucketObject) {
	last := map[string]uint32{}
	for _, c := range changes {
		last[c.Object] = max(last[c.Object], c.N)
	}
	for _, o := range files {
		switch n, referred := last[o.Name]; {
		case !referred:
			refused = append(refused, o)
		case n <= held:
			applied = append(applied, o)
		default:
			p.stillNeeded[o.seq] = manifest
		}
	}
	return refused, applied
}

// fileChanges reads the file changes of a session that refer to objects from the log.
func (p *pass) fileChanges(ctx context.Context, k sessionKey) (list []fileChange, err error) {
	shard := eventlog.Position{Shard: p.sessions.Position(k.ID, 1).Shard}
	for rec, err := range p.log.Read(ctx, shard, eventlog.Filter{Subject: events.LifeSubject(k.Tenant, k.ID)}) {
		if err != nil {
			return nil, fmt.Errorf("read the session's files: %w", err)
		}
		for _, e := range rec.Events {
			if d, ok := e.Data.(events.FilePut); ok {
				list = append(list, fileChange{d.Object, d.N})
			}
		}
	}
	return list, nil
}
