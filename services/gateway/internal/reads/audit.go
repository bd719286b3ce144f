package reads

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// AuditFilter selects entries of a tenant's audit; the zero value selects all.
type AuditFilter struct {
	Session string // id
	Actor   string // id or name of a key, an end user, or the id of an actor
	Since   string // RFC 3339
}

// auditCursor is the position in the audit at which a page ended.
type auditCursor struct {
	Filter string `json:"f"` // digest of the tenant and the filter
	Micros int64  `json:"t"`
	Shard  int16  `json:"s"`
	Seq    int64  `json:"n"`
}

// Audit returns a page of a tenant's audit, newest first, and the token of the next page, or "" after the last one.
func (s *Store) Audit(ctx context.Context, tenant string, f AuditFilter, token string, size int) (list []*spoolv1.AuditEntry, next string, err error) {
	// While the read models are being folded from the log's beginning, an empty result could be wrong; checkpoints then
	// returns an error.
	if _, err := s.readCheckpoints(ctx); err != nil {
		return nil, "", err
	}
	q, digest, err := s.auditQuery(ctx, tenant, f, token)
	if err != nil {
		return nil, "", err
	}
	// The statement is not in package queries: each filter has an index of its own, and a prepared statement with optional
	// conditions can get a generic plan, which uses the index of none.
	sql := `SELECT a.*, coalesce(k.name, '') FROM (SELECT x.at, x.shard, x.seq, x.aspect, x.subject, x.about, x.execution, x.types,
			x.actor_kind, x.actor, x.key, x.end_user, x.service, x.address
		FROM audit x WHERE ` + strings.Join(q.where, " AND ") + ` ORDER BY x.at DESC, x.shard DESC, x.seq DESC LIMIT ` + q.addArgument(size+1) + `) AS a
		LEFT JOIN keys k ON k.tenant = $1 AND k.id = a.key ORDER BY a.at DESC, a.shard DESC, a.seq DESC`
	var places []auditCursor
	err = s.queryRows(ctx, func(r pgx.Rows) error {
		e, p, err := scanAuditEntry(r)
		list, places = append(list, e), append(places, p)
		return err
	}, sql, q.args...)
	if err != nil {
		return nil, "", err
	}
	if len(list) > size {
		list = list[:size]
		next = places[size-1].encodeToken(digest)
	}
	if len(list) == 0 && f.Session != "" && token == "" {
		err = s.checkSessionExisted(ctx, tenant, f.Session)
	}
	return list, next, err
}

// checkSessionExisted returns SESSION_NOT_FOUND unless the tenant has, or had, the session.
func (s *Store) checkSessionExisted(ctx context.Context, tenant, session string) error {
	existed, err := s.queries.SessionExisted(ctx, tenant, session)
	if err == nil && !existed {
		err = problem.NoSuchSession()
	}
	return err
}

// auditQuery returns the SQL conditions of a page of the audit, and the digest of the filter.
func (s *Store) auditQuery(ctx context.Context, tenant string, f AuditFilter, token string) (q *statementBuilder, digest string, err error) {
	q = &statementBuilder{}
	q.addCondition("x.tenant = %s", tenant)
	if f.Session != "" {
		if err := checkID("session", events.KindSession, f.Session); err != nil {
			return nil, "", err
		}
		q.addCondition("x.subject = %s", f.Session)
	}
	since, err := parseTime("since", f.Since)
	if err != nil {
		return nil, "", err
	}
	if !since.IsZero() {
		q.addCondition("x.at >= %s", since)
	}
	if f.Actor != "" {
		if err := checkFilterText("actor", f.Actor, events.MaxUserBytes); err != nil {
			return nil, "", err
		}
		ids, err := s.keyIDsByName(ctx, tenant, f.Actor)
		if err != nil {
			return nil, "", err
		}
		q.addCondition("(x.actor = ANY (%s) OR x.end_user = %s AND x.end_user <> '' OR x.key = ANY (%s) AND x.key <> x.actor)", ids, f.Actor, ids)
	}
	digest = auditFilterDigest(tenant, f)
	cursor, err := decodeAuditToken(digest, token)
	if err != nil {
		return nil, "", err
	}
	if cursor != nil {
		q.addCondition("(x.at, x.shard, x.seq) < (%s, %s, %s)", time.UnixMicro(cursor.Micros).UTC(), cursor.Shard, cursor.Seq)
	}
	return q, digest, nil
}

// keyIDsByName returns the ids of a tenant's keys with the given name, and the name itself, because it may be an id.
func (s *Store) keyIDsByName(ctx context.Context, tenant, name string) ([]string, error) {
	ids, err := s.queries.KeysNamed(ctx, tenant, name)
	return append(ids, name), err
}

// scanAuditEntry returns the entry of the audit in a row, and the position after that entry.
func scanAuditEntry(r pgx.Rows) (*spoolv1.AuditEntry, auditCursor, error) {
	e := &spoolv1.AuditEntry{Actor: &spoolv1.AuditActor{}}
	var at time.Time
	var p auditCursor
	var subject, about, execution, types, key, user, service, address, name string
	err := r.Scan(&at, &p.Shard, &p.Seq, &e.Aspect, &subject, &about, &execution, &types, &e.Actor.Kind, &e.Actor.Id, &key, &user, &service, &address, &name)
	if err != nil {
		return nil, p, err
	}
	p.Micros = at.UnixMicro()
	e.Time, e.Position = wirejson.TimestampOf(at), eventlog.Position{Shard: int(p.Shard), Seq: uint64(p.Seq)}.String()
	e.Types, e.About, e.ExecutionId = strings.Split(types, ","), nilIfEmpty(about), nilIfEmpty(execution)
	if e.Aspect == string(events.Life) {
		e.SessionId = &subject
	}
	e.Actor.KeyId, e.Actor.KeyName, e.Actor.User, e.Actor.Service, e.Actor.Address = nilIfEmpty(key), nilIfEmpty(name), nilIfEmpty(user), nilIfEmpty(service), nilIfEmpty(address)
	return e, p, nil
}

// auditFilterDigest returns a digest of the tenant and the filter, by which a page token of another list is recognized.
func auditFilterDigest(tenant string, f AuditFilter) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q", []string{tenant, f.Session, f.Actor, f.Since}))
	return hex.EncodeToString(sum[:8])
}

// encodeToken returns the token of the page of the audit that follows the position p. digest is that of the filter.
func (p auditCursor) encodeToken(digest string) string {
	p.Filter = digest
	b, err := json.Marshal(p)
	if err != nil { // numbers always encode
		panic(err)
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

// decodeAuditToken decodes a token of encodeToken. It returns nil for the first page, and an error if the token has
// another digest.
func decodeAuditToken(digest, token string) (*auditCursor, error) {
	if token == "" {
		return nil, nil
	}
	var p auditCursor
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err == nil {
		err = json.Unmarshal(b, &p)
	}
	switch {
	case err != nil || p.Filter == "" || p.Seq < 0 || p.Shard < 0:
		return nil, problem.Invalid("pageToken", "%+q is not the nextPageToken of a page of this list", truncate.Text(token, 64))
	case p.Filter != digest:
		return nil, problem.Invalid("pageToken", "the token belongs to a page with another filter; start again without it")
	}
	return &p, nil
}
