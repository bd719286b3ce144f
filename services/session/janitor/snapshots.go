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

// workspaceObjects removes objects of sessions that are not deleted: snapshots beyond the retention, files whose
// request was refused, and objects named after a session that does not exist.
func (p *pass) workspaceObjects(ctx context.Context) error {
	list, err := p.workspaces.sessions(ctx)
	if err != nil {
		return err
	}
	absent, err := p.absentSessions(ctx, list)
	if err != nil {
		return err
	}
	var errs []error
	for _, k := range slices.SortedFunc(maps.Keys(list), compareKeys) {
		step := p.trimSession
		if absent[k] {
			step = p.removeUnowned
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

// compareKeys orders sessions by tenant, and then by id.
func compareKeys(a, b sessionKey) int {
	return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.ID, b.ID))
}

// absentSessions returns the sessions that the read models do not have, or whose content was removed, and that have no new
// objects.
func (p *pass) absentSessions(ctx context.Context, list map[sessionKey][]object) (map[sessionKey]bool, error) {
	var tenants, ids []string
	for k, objects := range list {
		if !slices.ContainsFunc(objects, func(o object) bool { return !o.At.Before(p.removeBefore()) }) {
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

// removeUnowned removes the objects of a session that does not exist: files that came with a refused request. The read
// models may lag, so the log decides.
func (p *pass) removeUnowned(ctx context.Context, k sessionKey, list []object) error {
	l, err := p.sessions.Load(ctx, k.Tenant, k.ID, eventlog.Leader)
	if err != nil {
		return err
	}
	if l.Life.Status != session.None && !l.Run.Retired {
		return p.trimSession(ctx, k, list)
	}
	return p.removeObjects(ctx, p.workspaces, Item{Kind: KindUploads, Tenant: k.Tenant, Name: k.ID}, list)
}

// trimSession removes the objects that an existing session does not need.
func (p *pass) trimSession(ctx context.Context, k sessionKey, list []object) error {
	return errors.Join(p.trimSnapshots(ctx, k, list), p.removeUploads(ctx, k, list))
}

// trimSnapshots removes a session's snapshots beyond the retention, and the packs that no other snapshot needs.
//
// An executor may be taking a snapshot at the same time. The new snapshot refers to packs of the session's last
// snapshot, which stay, and to packs that it stores itself, also if equal packs exist; see workspace.Snapshot. Only
// that executor can commit the snapshot, and no other commit can come in between: the log's guard refuses it.
func (p *pass) trimSnapshots(ctx context.Context, k sessionKey, list []object) error {
	var manifests, packs []object
	for _, o := range list {
		switch id := o.id(); {
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
	l, err := p.sessions.Load(ctx, k.Tenant, k.ID, eventlog.Leader)
	if err != nil || l.Life.Status == session.Deleted || l.Run.Snapshot.ID == "" {
		return err
	}
	last := workspace.ManifestName(k.Tenant, k.ID, l.Run.Snapshot.ID)
	if !slices.ContainsFunc(manifests, func(o object) bool { return o.Name == last }) {
		return nil // the snapshot is newer than the list; the next pass handles it
	}
	slices.SortFunc(manifests, func(a, b object) int { return cmp.Compare(b.seq, a.seq) })
	begun, err := p.forkSnapshots(ctx, k)
	if err != nil {
		return err
	}
	var stay, old []object
	for i, o := range manifests {
		if i >= p.cfg.Snapshots && o.Name != last && !begun[o.Name[strings.LastIndexByte(o.Name, '/')+1:]] && o.At.Before(p.removeBefore()) {
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
		if err := p.addNeeded(ctx, k, o, needed); err != nil {
			return err
		}
	}
	// Erase the packs first: as long as a manifest beyond the retention exists, the next pass removes the remaining
	// ones.
	packs = slices.DeleteFunc(packs, func(o object) bool { return needed[o.Name] || !o.At.Before(p.removeBefore()) })
	return p.removeObjects(ctx, p.workspaces, Item{Kind: KindSnapshots, Tenant: k.Tenant, Name: k.ID}, append(packs, old...))
}

// addNeeded adds the packs of a snapshot that is kept.
func (p *pass) addNeeded(ctx context.Context, k sessionKey, manifest object, needed map[string]bool) error {
	if p.store == nil {
		var err error
		if p.store, err = natsstore.Open(ctx, p.js, topology.BucketWorkspaces); err != nil {
			return err
		}
	}
	names, err := workspace.PackNames(ctx, p.store, k.Tenant, k.ID, manifest.id())
	if err != nil {
		return fmt.Errorf("no snapshot is removed while one that stays cannot be read: %w", err)
	}
	for _, name := range names {
		needed[name] = true
	}
	return nil
}
