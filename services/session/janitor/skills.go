package janitor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
	"github.com/spoolhq/spool/pkg/topology"
)

// removeSkillObjects removes uploads of skills whose push was decided, and ZIPs to which no version of a skill refers.
//
// A push may be in progress. The skills service stores the ZIP again unless the stored ZIP is at most a few minutes
// old, or the skill already has the version. A ZIP that is removed here is older, and objectBucket.removeObject keeps an
// object that was stored again.
func (p *pass) removeSkillObjects(ctx context.Context) error {
	var zips []bucketObject
	uploads, err := p.skills.listObjects(ctx, func(o bucketObject) bool {
		old := o.At.Before(p.removalCutoff())
		if old && events.IsDigest(o.Name) {
			zips = append(zips, o)
		}
		return old && strings.HasPrefix(o.Name, "upload/")
	})
	if err != nil {
		return err
	}
	zips, err = p.findUnreferencedZIPs(ctx, zips)
	for _, o := range append(uploads, zips...) {
		err = errors.Join(err, p.removeObjects(ctx, p.skills, ReportItem{Kind: KindSkill, Name: o.Name}, []bucketObject{o}))
	}
	return err
}

// findUnreferencedZIPs returns the ZIPs to which no version of a skill refers. It gets candidates from the read models
// with one query, and then checks them in the log.
func (p *pass) findUnreferencedZIPs(ctx context.Context, zips []bucketObject) ([]bucketObject, error) {
	digests := make([]string, len(zips))
	for i, o := range zips {
		digests[i] = o.Name
	}
	rows, err := p.conn.Query(ctx, `SELECT z.digest FROM unnest($1::text[]) AS z (digest)
		WHERE NOT EXISTS (SELECT FROM catalogue_versions v WHERE v.version = z.digest AND NOT v.removed)
		  AND NOT EXISTS (SELECT FROM executions x WHERE x.ended_at IS NULL AND strpos(x.resolved, z.digest) > 0)`, digests)
	if err != nil {
		return nil, fmt.Errorf("look for versions of skills: %w", err)
	}
	if digests, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
		return nil, fmt.Errorf("look for versions of skills: %w", err)
	}
	if len(digests) == 0 {
		return nil, nil
	}
	referred, err := p.referencedZIPs(ctx, digests)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(zips, func(o bucketObject) bool { return referred[o.Name] || !slices.Contains(digests, o.Name) }), nil
}

// referencedZIPs returns those of the digests to which skills in the log refer. A removed version still counts for a
// while, because its removal may happen between two steps of a push.
func (p *pass) referencedZIPs(ctx context.Context, digests []string) (map[string]bool, error) {
	by := map[string]map[string]bool{} // digests by the subject that mentions them
	for _, e := range p.streams {
		err := e.eachMessage(ctx, allMessagesConsumer(topology.SkillFilter), func(m streamMessage) {
			for _, d := range digests {
				if bytes.Contains(m.data, []byte(d)) {
					if by[m.subject] == nil {
						by[m.subject] = map[string]bool{}
					}
					by[m.subject][d] = true
				}
			}
		})
		if err != nil {
			return nil, err
		}
	}
	entries, referred := eventlog.Catalogue{Log: p.log}, map[string]bool{}
	for name, mentioned := range by {
		subject, err := p.log.Partitioning().ParseSubject(name)
		if err != nil {
			return nil, err
		}
		entry, err := entries.Load(ctx, subject, eventlog.LeaderOnly)
		if err != nil {
			return nil, err
		}
		head, err := p.log.CommitAt(ctx, entries.Position(entry))
		if err != nil {
			return nil, fmt.Errorf("read the last commit of %s: %w", subject, err)
		}
		for d := range mentioned {
			gone := slices.ContainsFunc(entry.State.Versions, func(v versions.Version) bool { return v.Digest == d && v.Removed })
			if !gone || !head.Time.Before(p.removalCutoff()) {
				referred[d] = true
			}
		}
	}
	return referred, nil
}
