package janitor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// storedSecret is the encrypted value of a secret in the bucket secrets. The gateway stores it before it sends the
// command that refers to it, so the value stays in the bucket if the command is refused.
type storedSecret struct {
	key string // <tenant>.x.<execution>.<random>, or <tenant>.e.<random> of an environment
	at  time.Time
}

// executionID returns the id of the execution to which the secret belongs. ok is false for a secret of an environment.
func (s storedSecret) executionID() (id string, ok bool) {
	parts := strings.Split(s.key, ".")
	if len(parts) == 4 && parts[1] == "x" {
		return parts[2], true
	}
	return "", false
}

// removeRefusedSecrets removes the secrets of commands that were refused, or not decided by their deadline, so that no
// commit refers to them.
func (p *pass) removeRefusedSecrets(ctx context.Context) error {
	list, err := p.secretsNotInReadModels(ctx)
	if err != nil || len(list) == 0 {
		return err
	}
	if list, err = p.secretsNotInLog(ctx, list); err != nil {
		return err
	}
	for _, s := range list {
		p.addItem(ReportItem{Kind: KindSecret, Name: s.key, Objects: 1})
		if p.dry {
			continue
		}
		if err := p.secrets.purge(ctx, secretSubjectPrefix+s.key); err != nil {
			return err
		}
		p.counts.countRemoved(KindSecret, 1, 0)
	}
	return nil
}

// secretSubjectPrefix is the beginning of the NATS subjects of all secrets in the bucket secrets.
const secretSubjectPrefix = "$KV." + topology.BucketSecrets + "."

// secretsNotInReadModels returns the stored secrets that are old enough to be removed and to which the read models do
// not refer.
func (p *pass) secretsNotInReadModels(ctx context.Context) ([]storedSecret, error) {
	info, err := p.secrets.stream.Info(ctx, jetstream.WithSubjectFilter(secretSubjectPrefix+">"))
	if err != nil {
		return nil, fmt.Errorf("list secrets: %w", err)
	}
	var keys, tenants, executions []string
	for subject := range info.State.Subjects {
		s := storedSecret{key: strings.TrimPrefix(subject, secretSubjectPrefix)}
		execution, _ := s.executionID()
		tenant, _, _ := strings.Cut(s.key, ".")
		keys, tenants, executions = append(keys, s.key), append(tenants, tenant), append(executions, execution)
	}
	rows, err := p.conn.Query(ctx, `WITH kept AS MATERIALIZED (
			SELECT DISTINCT variable.value ->> 'sealed' AS key FROM catalogue_versions v JOIN catalogue_entries e USING (tenant, id),
				json_each(CASE json_typeof(v.spec::json -> 'variables') WHEN 'object' THEN v.spec::json -> 'variables' ELSE '{}' END) AS variable
			WHERE e.kind = 'environment')
		SELECT k.key FROM unnest($1::text[], $2::text[], $3::text[]) AS k (key, tenant, execution)
		WHERE CASE WHEN k.execution = '' THEN NOT EXISTS (SELECT FROM kept WHERE kept.key = k.key)
			ELSE NOT EXISTS (SELECT FROM executions x WHERE x.tenant = k.tenant AND x.id = k.execution) END
		ORDER BY 1`, keys, tenants, executions)
	if err != nil {
		return nil, fmt.Errorf("look for secrets without a reference: %w", err)
	}
	if keys, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
		return nil, fmt.Errorf("look for secrets without a reference: %w", err)
	}
	var list []storedSecret
	for _, key := range keys {
		m, err := p.secrets.stream.GetLastMsgForSubject(ctx, secretSubjectPrefix+key)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read when a secret was stored: %w", err)
		}
		// A removed secret leaves a marker without a value.
		if len(m.Data) > 0 && m.Time.Before(p.removalCutoff()) {
			list = append(list, storedSecret{key, m.Time})
		}
	}
	return list, nil
}

// secretsNotInLog returns those secrets in list to which no commit refers. It reads the log, because the read models
// may lag, from shortly before the oldest secret was stored, because the servers of a cluster have different clocks.
func (p *pass) secretsNotInLog(ctx context.Context, list []storedSecret) ([]storedSecret, error) {
	from := slices.MinFunc(list, func(a, b storedSecret) int { return a.at.Compare(b.at) }).at.Add(-minObjectAge)
	found := map[string]bool{}
	environments := map[string]bool{}
	for _, e := range p.streams {
		err := e.eachMessage(ctx, messagesSinceConsumer(topology.LifeFilter, from), func(m streamMessage) {
			for _, s := range list {
				if id, ok := s.executionID(); ok && bytes.Contains(m.data, []byte(id)) {
					found[s.key] = true
				}
			}
		})
		if err != nil {
			return nil, err
		}
		err = e.eachMessage(ctx, messagesSinceConsumer(topology.EnvironmentFilter, from), func(m streamMessage) { environments[m.subject] = true })
		if err != nil {
			return nil, err
		}
	}
	for name := range environments {
		if err := p.addEnvironmentSecretKeys(ctx, name, found); err != nil {
			return nil, err
		}
	}
	return slices.DeleteFunc(list, func(s storedSecret) bool { return found[s.key] }), nil
}

// addEnvironmentSecretKeys adds the keys of all secrets to which any version of an environment refers to found.
func (p *pass) addEnvironmentSecretKeys(ctx context.Context, name string, found map[string]bool) error {
	subject, err := p.log.Partitioning().ParseSubject(name)
	if err != nil {
		return err
	}
	shard := eventlog.Position{Shard: p.sessions.Position(subject.ID, 1).Shard}
	for rec, err := range p.log.Read(ctx, shard, eventlog.Filter{Subject: subject}) {
		if err != nil {
			return fmt.Errorf("read %s: %w", subject, err)
		}
		for _, e := range rec.Events {
			if d, ok := e.Data.(events.EnvironmentApplied); ok {
				for _, v := range d.Spec.Variables {
					found[v.Sealed] = true
				}
			}
		}
	}
	return nil
}
