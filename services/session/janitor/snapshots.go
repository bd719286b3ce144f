package janitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
)

// removeWorkspaceObjects removes objects of sessions that are not deleted: snapshots beyond the retention, files whose
// request was refused, and objects named after a session that does not exist.
func (p *pass) removeWorkspaceObjects(ctx context.Context) error {
	list, err := p.workspaces.objectsBySession(ctx)
	if err != nil {
		return err
	}
	absent, err := p.findAbsentSessions(ctx, list)
	if err != nil {
		return err
	}
	var errs []error
	for _, k := range slices.SortedFunc(maps.Keys(list), compareSessionKeys) {
		step := p.removeUnneededObjects
		if absent[k] {
			step = p.removeObjectsOfAbsent
		}
		if err := step(ctx, k, list[k]); err != nil {
			errs = append(errs, fmt.Errorf("objects of session %s of tenant %s: %w", k.ID, k.Tenant, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// compareSessionKeys orders sessions by tenant, and then by id.
func compareSessionKeys(a, b sessionKey) int {
	return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.ID, b.ID))
}

// findAbsentSessions returns those sessions in list that the read models do not contain, or whose content was removed,
// and that have no new objects.
func (p *pass) findAbsentSessions(ctx context.Context, list map[sessionKey][]bucketObject) (map[sessionKey]bool, error) {
	var tenants, ids []string
	for k, objects := range list {
		if !slices.ContainsFunc(objects, func(o bucketObject) bool { return !o.At.Before(p.removalCutoff()) }) {
			tenants, ids = append(tenants, k.Tenant), append(ids, k.ID)
		}
	}
	rows, err := p.conn.Query(ctx, `SELECT k.tenant, k.id FROM unnest($1::text[], $2::text[]) AS k (tenant, id)
		WHERE NOT EXISTS (SELECT FROM sessions s WHERE s.tenant = k.tenant AND s.id = k.id)
		  AND NOT EXISTS (SELECT FROM deleted_sessions d WHERE d.tenant = k.tenant AND d.id = k.id AND NOT d.removed)`, tenants, ids)
	if err != nil {
		return nil, fmt.Errorf("look for sessions: %w", err)
	}
	absent := map[sessionKey]bool{}
	keys, err := pgx.CollectRows(rows, pgx.RowToStructByPos[sessionKey])
	if err != nil {
		return nil, fmt.Errorf("look for sessions: %w", err)
	}
	for _, k := range keys {
		absent[k] = true
	}
	return absent, nil
}

// removeObjectsOfAbsent removes the objects of a session that does not exist: files that came with a refused request.
// The read models may lag, so it checks the log first.
func (p *pass) removeObjectsOfAbsent(ctx context.Context, k sessionKey, list []bucketObject) error {
	l, err := p.sessions.Load(ctx, k.Tenant, k.ID, eventlog.LeaderOnly)
	if err != nil {
		return err
	}
	if l.Life.Status != session.None && !l.Run.Retired {
		return p.removeUnneededObjects(ctx, k, list)
	}
	return p.removeObjects(ctx, p.workspaces, ReportItem{Kind: KindUploads, Tenant: k.Tenant, Name: k.ID}, list)
}

// removeUnneededObjects removes those objects in list that the existing session k does not need.
func (p *pass) removeUnneededObjects(ctx context.Context, k sessionKey, list []bucketObject) error {
	return errors.Join(p.removeOldSnapshots(ctx, k, list), p.removeUnneededUploads(ctx, k, list))
}

// removeOldSnapshots removes a session's snapshots beyond the retention, and the packs that no other snapshot needs.
//
// An executor may be taking a snapshot at the same time. The new snapshot refers to packs of the session's last
// snapshot, which stay, and to packs that it stores itself, also if equal packs exist; see workspace.Snapshot. Only
// that executor can commit the snapshot, and no other commit can come in between: the log's guard refuses it.
func (p *pass) removeOldSnapshots(ctx context.Context, k sessionKey, list []bucketObject) error {
	var manifests, packs []bucketObject
	for _, o := range list {
		switch id := o.lastNamePart(); {
		case strings.HasPrefix(id, "m-"):
			manifests = append(manifests, o)
		case strings.HasPrefix(id, "p-"):
			packs = append(packs, o)
		}
	}
	// Wait until there are a tenth more than the retention, because trimming reads all remaining manifests.
	if len(manifests) <= p.cfg.Snapshots+p.cfg.Snapshots/10 {
		return nil
	}
	// Load after listing, so that a snapshot that is committed later is not in the list.
	l, err := p.sessions.Load(ctx, k.Tenant, k.ID, eventlog.LeaderOnly)
	if err != nil || l.Life.Status == session.Deleted || l.Run.Snapshot.ID == "" {
		return err
	}
	last := workspace.ManifestName(k.Tenant, k.ID, l.Run.Snapshot.ID)
	if !slices.ContainsFunc(manifests, func(o bucketObject) bool { return o.Name == last }) {
		return nil // the snapshot is newer than the list; the next pass handles it
	}
	slices.SortFunc(manifests, func(a, b bucketObject) int { return cmp.Compare(b.seq, a.seq) })
	begun, err := p.forkSnapshots(ctx, k)
	if err != nil {
		return err
	}
	var stay, old []bucketObject
	for i, o := range manifests {
		if i >= p.cfg.Snapshots && o.Name != last && !begun[o.Name[strings.LastIndexByte(o.Name, '/')+1:]] && o.At.Before(p.removalCutoff()) {
			old = append(old, o)
		} else {
			stay = append(stay, o)
		}
	}
	if len(old) == 0 {
		return nil
	}
	needed := map[string]bool{}
	for _, o := range stay {
		if err := p.addNeededPacks(ctx, k, o, needed); err != nil {
			return err
		}
	}
	// Erase the packs first: as long as a manifest beyond the retention exists, the next pass removes the remaining
	// ones.
	packs = slices.DeleteFunc(packs, func(o bucketObject) bool { return needed[o.Name] || !o.At.Before(p.removalCutoff()) })
	return p.removeObjects(ctx, p.workspaces, ReportItem{Kind: KindSnapshots, Tenant: k.Tenant, Name: k.ID}, append(packs, old...))
}

// addNeededPacks reads the manifest of a snapshot that is kept, and adds the names of its packs to needed.
func (p *pass) addNeededPacks(ctx context.Context, k sessionKey, manifest bucketObject, needed map[string]bool) error {
	if p.store == nil {
		var err error
		if p.store, err = natsstore.Open(ctx, p.js, topology.BucketWorkspaces); err != nil {
			return err
		}
	}
	names, err := workspace.PackNames(ctx, p.store, k.Tenant, k.ID, manifest.lastNamePart())
	if err != nil {
		return fmt.Errorf("no snapshot is removed while one that stays cannot be read: %w", err)
	}
	for _, name := range names {
		needed[name] = true
	}
	return nil
}
