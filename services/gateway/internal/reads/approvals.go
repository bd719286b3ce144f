package reads

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Statuses of approval requests. approvalOpen selects those that are pending or decided.
const (
	approvalOpen    = "open"
	approvalPending = "pending"
	approvalDecided = "decided"
)

// approvalStatuses are the values that the filter of approval requests allows as status.
var approvalStatuses = []string{
	approvalOpen, approvalPending, approvalDecided, events.OutcomeApproved, events.OutcomeRejected, events.OutcomeSkipped, events.OutcomeAnswered, "retracted",
}

// ApprovalFilter selects approval requests of a tenant; the zero value selects all.
type ApprovalFilter struct {
	Session, Execution string // ids
	Status             string
	Agents             []string // slugs of the only agents that the caller may see; empty means all
}

// approvalColumns are the columns that scanApproval reads, after request and decision.
const approvalColumns = `session, id, execution, conversation, kind, tool_name, tool_use_id, title, status, cause, verdict, actor,
	requested_seq, requested_at, decided_seq, decided_at, ended_seq, ended_at`

// scanApproval returns the approval request of a row that has the columns request, decision and approvalColumns.
func scanApproval(r pgx.Rows) (*spoolv1.Approval, error) {
	var request, tool, use, cause, verdict string
	var decision, actor *string
	var requested, decided, ended int64
	var requestedAt time.Time
	var decidedAt, endedAt *time.Time
	a := &spoolv1.Approval{}
	err := r.Scan(&request, &decision, &a.SessionId, &a.ApprovalId, &a.ExecutionId, &a.ConversationId, &a.Kind, &tool, &use, &a.Title, &a.Status, &cause, &verdict, &actor,
		&requested, &requestedAt, &decided, &decidedAt, &ended, &endedAt)
	if err != nil {
		return nil, err
	}
	a.ToolName, a.ToolUseId, a.Cause, a.Decision = nilIfEmpty(tool), nilIfEmpty(use), nilIfEmpty(cause), nilIfEmpty(verdict)
	a.RequestedSeq, a.RequestedAt = uint32(requested), wirejson.TimestampOf(requestedAt)
	a.DecidedSeq, a.DecidedAt, a.EndedSeq, a.EndedAt = nilIfZero(decided), timestampMessage(decidedAt), nilIfZero(ended), timestampMessage(endedAt)
	if request != "" {
		a.Request = wirejson.JSONFromText(request)
	}
	if decision != nil {
		a.Decided = wirejson.JSONFromText(*decision)
	}
	if actor == nil {
		return a, nil
	}
	var by events.Actor
	if err := json.Unmarshal([]byte(*actor), &by); err != nil {
		return nil, errUnreadableEvent(err)
	}
	a.DecidedBy = &spoolv1.AuditActor{Kind: by.Kind, Id: by.ID, KeyId: nilIfEmpty(by.Key), User: nilIfEmpty(by.User)}
	return a, nil
}

// nilIfZero returns a pointer to n as a uint32, or nil if n is 0.
func nilIfZero(n int64) *uint32 {
	if n == 0 {
		return nil
	}
	u := uint32(n)
	return &u
}

// Approvals returns a page of a tenant's approval requests, newest first, and the token of the next page, or "" after the last one.
func (s *Store) Approvals(ctx context.Context, tenant string, f ApprovalFilter, token string, size uint32) (list []*spoolv1.Approval, next string, err error) {
	if size, err = ParsePageSize(size); err != nil {
		return nil, "", err
	}
	q, joins, err := approvalQuery(tenant, f, token)
	if err != nil {
		return nil, "", err
	}
	// While the read models are being folded from the log's beginning, a result could lack requests; checkpoints then
	// returns an error.
	if _, err := s.readCheckpoints(ctx); err != nil {
		return nil, "", err
	}
	// request is empty in rows after the one that exceeds the number of bytes.
	sql := `SELECT CASE WHEN before <= ` + q.addArgument(maxPageBytes) + ` THEN request ELSE '' END, CASE WHEN before <= ` + q.addArgument(maxPageBytes) + ` THEN decision END, ` + approvalColumns + `
		FROM (SELECT p.*, sum(octet_length(p.request) + coalesce(octet_length(p.decision), 0)) OVER w - octet_length(p.request) - coalesce(octet_length(p.decision), 0) AS before
			FROM (SELECT x.* FROM approvals x` + joins + ` WHERE ` + strings.Join(q.where, " AND ") + ` ORDER BY x.requested_at DESC, x.id DESC LIMIT ` + q.addArgument(size+1) + `) p
			WINDOW w AS (ORDER BY p.requested_at DESC, p.id DESC)) page
		ORDER BY requested_at DESC, id DESC`
	more := false
	err = s.queryRows(ctx, func(r pgx.Rows) error {
		a, err := scanApproval(r)
		if more = more || len(list) == int(size) || err == nil && a.Request == nil; !more {
			list = append(list, a)
		}
		return err
	}, sql, q.args...)
	if err != nil || !more {
		return list, "", err
	}
	last := list[len(list)-1]
	return list, encodeApprovalToken(tenant, f, pagePosition{last.RequestedAt.AsTime(), last.ApprovalId}), nil
}

// approvalQuery returns the SQL conditions of a page of approval requests, and the joins that these conditions need.
func approvalQuery(tenant string, f ApprovalFilter, token string) (q *statementBuilder, joins string, err error) {
	q = &statementBuilder{}
	q.addCondition("x.tenant = %s", tenant)
	if f.Session != "" {
		q.addCondition("x.session = %s", f.Session)
	}
	if f.Execution != "" {
		q.addCondition("x.execution = %s", f.Execution)
	}
	switch {
	case f.Status == approvalOpen:
		q.addCondition("x.ended_seq = 0") // the condition of the partial index
	case slices.Contains(approvalStatuses, f.Status):
		q.addCondition("x.status = %s", f.Status)
		if f.Status == approvalPending || f.Status == approvalDecided {
			q.addCondition("x.ended_seq = 0")
		}
	case f.Status != "":
		return nil, "", problem.Invalid("status", "%+q is not a status: there are %s", truncate.Text(f.Status, 64), strings.Join(approvalStatuses, ", "))
	}
	if len(f.Agents) > 0 {
		joins = " JOIN sessions s ON s.tenant = x.tenant AND s.id = x.session"
		q.addCondition("s.agent = ANY (%s)", f.Agents)
	}
	after, err := decodeApprovalToken(tenant, f, token)
	if after != nil {
		q.addCondition("(x.requested_at, x.id) < (%s, %s)", after.at, after.id)
	}
	return q, joins, err
}

// approvalFilterDigest returns a digest of the tenant and the filter, by which a page token of another list is recognized.
func approvalFilterDigest(tenant string, f ApprovalFilter) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q", []string{"approvals", tenant, f.Session, f.Execution, f.Status}, f.Agents))
	return hex.EncodeToString(sum[:8])
}

// encodeApprovalToken returns the token of the page of approval requests that follows the position p.
func encodeApprovalToken(tenant string, f ApprovalFilter, p pagePosition) string {
	b, err := json.Marshal(pageToken{approvalFilterDigest(tenant, f), p.at.UnixMicro(), p.id})
	if err != nil { // strings always encode
		panic(err)
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

// decodeApprovalToken decodes a token of encodeApprovalToken. It returns nil for the first page, and an error for the
// token of a list with another filter.
func decodeApprovalToken(tenant string, f ApprovalFilter, token string) (*pagePosition, error) {
	if token == "" {
		return nil, nil
	}
	var t pageToken
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err == nil {
		err = json.Unmarshal(b, &t)
	}
	switch {
	case err != nil || CheckApprovalID(t.ID) != nil || t.Filter == "":
		return nil, problem.Invalid("pageToken", "%+q is not the nextPageToken of a page of this list", truncate.Text(token, 64))
	case t.Filter != approvalFilterDigest(tenant, f):
		return nil, problem.Invalid("pageToken", "the token belongs to a page with another filter; start again without it")
	}
	return &pagePosition{time.UnixMicro(t.Micros).UTC(), t.ID}, nil
}

// Approval returns the approval request with an id if it belongs to one of the agents; no agents mean all. It first
// waits until the read models have reached minPosition, a position of the request's session, or "". It returns
// APPROVAL_NOT_FOUND if there is no such request.
func (s *Store) Approval(ctx context.Context, tenant, id, minPosition string, agents []string) (*spoolv1.Approval, error) {
	if err := CheckApprovalID(id); err != nil {
		return nil, err
	}
	a, err := s.readApproval(ctx, tenant, id, agents)
	if err != nil || minPosition == "" {
		return a, err
	}
	if err := s.AwaitMinPosition(ctx, a.SessionId, minPosition); err != nil {
		return nil, err
	}
	return s.readApproval(ctx, tenant, id, agents)
}

// readApproval implements Approval, without the wait for minPosition.
func (s *Store) readApproval(ctx context.Context, tenant, id string, agents []string) (out *spoolv1.Approval, err error) {
	if agents == nil {
		agents = []string{}
	}
	err = s.queryRows(ctx, func(r pgx.Rows) (err error) {
		out, err = scanApproval(r)
		return err
	}, `SELECT request, decision, `+approvalColumns+` FROM approvals x WHERE tenant = $1 AND id = $2
		AND ($3::text[] = '{}' OR EXISTS (SELECT FROM sessions s WHERE s.tenant = x.tenant AND s.id = x.session AND s.agent = ANY ($3))) LIMIT 1`, tenant, id, agents)
	if err != nil || out != nil {
		return out, err
	}
	if _, err := s.readCheckpoints(ctx); err != nil { // the read models are being folded: the request may exist
		return nil, err
	}
	return nil, problem.New(problem.ApprovalNotFound, "", "there is no such approval request")
}

// ApprovalsAt returns approval requests of a session in their state after the event of p, in order. It leaves out
// requests that had ended at since, an earlier event of the session; a zero since leaves out none. If there are more
// than limit, ApprovalsAt returns the open ones and the latest others. The requests have neither their content nor
// the data of the decision.
func (s *Store) ApprovalsAt(ctx context.Context, p, since SessionState, limit uint32) (list []*spoolv1.Approval, err error) {
	err = s.queryRows(ctx, func(r pgx.Rows) error {
		a, err := scanApproval(r)
		if err == nil {
			list = append(list, setApprovalState(a, p.Seq))
		}
		return err
	}, `SELECT '', NULL, `+approvalColumns+` FROM (SELECT * FROM approvals WHERE tenant = $1 AND session = $2 AND requested_seq <= $3 AND (ended_seq = 0 OR ended_seq > $4)
			ORDER BY (ended_seq = 0 OR ended_seq > $3) DESC, requested_seq DESC LIMIT $5) page ORDER BY requested_seq`,
		p.Tenant, p.ID, int64(p.Seq), int64(since.Seq), int64(limit))
	return list, err
}

// setApprovalState sets the fields of the approval request a to its state after the event with the given seq, and
// returns a.
func setApprovalState(a *spoolv1.Approval, seq uint32) *spoolv1.Approval {
	if a.EndedSeq != nil && *a.EndedSeq > seq {
		a.EndedSeq, a.EndedAt, a.Cause, a.Status = nil, nil, nil, approvalDecided
	}
	if a.DecidedSeq != nil && *a.DecidedSeq > seq {
		a.DecidedSeq, a.DecidedAt, a.Decision, a.DecidedBy = nil, nil, nil, nil
	}
	if a.EndedSeq == nil && a.DecidedSeq == nil {
		a.Status = approvalPending
	}
	return a
}
