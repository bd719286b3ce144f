package api

import (
	"context"
	"fmt"
	"sort"
	"strings"
	"time"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// Limits of the lists in a SessionState, other than blocks.
const (
	maxStateExecutions    = 100
	maxStateConversations = 200
	maxStateApprovals     = 100
	maxStateFileChanges   = 200
)

// stateAfter returns the state of a session after the event with the seq at, or after the last event if at is nil. It
// returns a problem if the caller may not see the session. field is the request field that contains at.
func (s *Server) stateAfter(ctx context.Context, session, minPosition, field string, at *uint32) (reads.SessionState, error) {
	tenant, err := s.checkSession(ctx, session, minPosition)
	if err != nil {
		return reads.SessionState{}, err
	}
	return s.Reads.StateAfter(ctx, tenant, session, field, at)
}

// GetSessionState returns the state of a session after an event.
func (s *Server) GetSessionState(ctx context.Context, r *spoolv1.GetSessionStateRequest) (*spoolv1.SessionState, error) {
	size, err := reads.ParsePageSize(r.GetPageSize())
	if err != nil {
		return nil, err
	}
	at, after := r.At, reads.BeforeFirstBlock()
	if r.GetPageToken() != "" {
		if after, err = reads.ParseBlockToken("pageToken", r.GetPageToken()); err != nil {
			return nil, err
		}
		if at != nil && *at != after.Seq {
			return nil, problem.Invalid("pageToken", "the token belongs to the state at event %d", after.Seq)
		}
		at = &after.Seq
	}
	p, err := s.stateAfter(ctx, r.GetSessionId(), r.GetMinPosition(), "at", at)
	if err != nil {
		return nil, err
	}
	out := &spoolv1.SessionState{
		Seq: p.Seq, Position: p.Position, Time: wirejson.TimestampOf(p.Time), Session: p.SessionMessage(), ExecutionCount: p.Count.Executions,
		BlockCount: p.Count.Blocks, Todos: p.TodoListMessages(), ConversationCount: p.Count.Conversations,
		Reported: reads.UsageTotalMessage(p.ReportedUsage()), Metered: reads.MeteredUsageMessage(p.Metered), Resolved: p.ResolvedVersionsMessage(),
	}
	var next *reads.BlockToken
	if out.Blocks, next, err = s.Reads.BlocksAt(ctx, p, after, size); err != nil {
		return nil, err
	}
	if next != nil {
		out.NextPageToken = next.String()
	}
	if out.IncompleteText, err = s.setTextInFlight(ctx, p, out.Blocks); err != nil {
		return nil, err
	}
	if out.Executions, err = s.Reads.ExecutionsAt(ctx, p, reads.SessionState{}, maxStateExecutions); err != nil {
		return nil, err
	}
	if out.Conversations, err = s.Reads.ConversationsAt(ctx, p, reads.SessionState{}, maxStateConversations); err != nil {
		return nil, err
	}
	if out.Approvals, err = s.Reads.ApprovalsAt(ctx, p, reads.SessionState{}, maxStateApprovals); err != nil {
		return nil, err
	}
	out.Files, err = s.workspaceState(ctx, p)
	return out, err
}

// setTextInFlight sets the text in flight of those blocks that were open in the state p. incomplete lists the blocks
// whose text is no longer completely stored.
func (s *Server) setTextInFlight(ctx context.Context, p reads.SessionState, blocks []*spoolv1.Block) (incomplete []*spoolv1.IncompleteText, err error) {
	var pending []string
	for _, b := range blocks {
		if b.Status == string(events.StatusPending) {
			pending = append(pending, b.Id)
		}
	}
	if len(pending) == 0 {
		return nil, nil
	}
	open, err := s.Reads.OpenTextsOf(ctx, p, pending)
	if err != nil || len(open) == 0 {
		return nil, err
	}
	var before *time.Time
	err = s.Reads.EachEvent(ctx, p.Tenant, p.ID, p.Seq, p.Seq+1, nil, 1, func(w events.WireEvent) error {
		before = &w.Time
		return nil
	})
	if err != nil {
		return nil, err
	}
	list, err := s.Player.FillOpenBlocks(ctx, p.Tenant, p.ID, open, before, blocks, admission.From(ctx).ReserveBytes)
	for _, t := range list {
		if !t.Complete {
			incomplete = append(incomplete, &spoolv1.IncompleteText{BlockId: t.ID, ShownBytes: uint32(len(t.Prefix))}) //nolint:gosec // offsets have 32 bits
		}
	}
	return incomplete, err
}

// workspaceState returns what the log has about the workspace in the state p of a session: the last snapshot, and the
// changes of files after that snapshot.
func (s *Server) workspaceState(ctx context.Context, p reads.SessionState) (*spoolv1.WorkspaceState, error) {
	out := &spoolv1.WorkspaceState{ChangeCount: p.FileChanges}
	var err error
	if out.Changes, err = s.Reads.FileEvents(ctx, p, maxStateFileChanges); err != nil {
		return nil, err
	}
	since := "the session's beginning"
	if n := p.Workspace; n != nil {
		out.Snapshot, out.SnapshotSeq, out.SnapshotAt, out.SnapshotFiles, out.SnapshotBytes = &n.Name, n.Seq, wirejson.TimestampOf(n.Time), n.Files, float64(n.Bytes)
		out.SnapshotSession = snapshotAncestor(p, n)
		if out.SnapshotSession == nil {
			since = "it"
		}
		name, err := snapshotName(p, n.Session, n.Name)
		if err != nil {
			return nil, problem.From(err)
		}
		if out.Available, err = s.Objects.Has(ctx, name); err != nil {
			return nil, snapshotError(err)
		}
		if !out.Available {
			if out.OldestSeq, err = s.oldestSnapshot(ctx, p); err != nil {
				return nil, err
			}
		}
	}
	changes := fmt.Sprintf("%d events of files lie between %s and event %d", p.FileChanges, since, p.Seq)
	if p.FileChanges == 1 {
		changes = fmt.Sprintf("1 event of a file lies between %s and event %d", since, p.Seq)
	}
	if p.Workspace == nil {
		out.Summary = fmt.Sprintf("No snapshot of the workspace had been taken at event %d; %s.", p.Seq, changes)
		return out, nil
	}
	which := "The last snapshot is that of "
	if out.SnapshotSession != nil {
		which = "The files are those that the session began with as a fork, of the snapshot of "
	}
	which += snapshotEventPhrase(p)
	switch {
	case out.Available:
		out.Summary = fmt.Sprintf("%s; %s.", which, changes)
	default:
		out.Summary = fmt.Sprintf("%s, which was removed, %s; %s.", which, oldestSnapshotPhrase(out.OldestSeq), changes)
	}
	return out, nil
}

// snapshotAncestor returns the id of the session that took a snapshot if it is an ancestor of the session of p, or
// nil if it is that session itself.
func snapshotAncestor(p reads.SessionState, n *reads.Snapshot) *string {
	if n.Session == p.ID {
		return nil
	}
	return &n.Session
}

// snapshotEventPhrase returns a phrase that names the event at which the snapshot with the files of a session's state
// was taken.
func snapshotEventPhrase(p reads.SessionState) string {
	if of := snapshotAncestor(p, p.Workspace); of != nil {
		return fmt.Sprintf("event %d of session %s", p.Workspace.Seq, *of)
	}
	return fmt.Sprintf("event %d", p.Workspace.Seq)
}

// oldestSnapshotPhrase returns a phrase about the oldest snapshot that still exists, for the problem SNAPSHOT_GONE.
// oldest is the seq of its event, 0 for none.
func oldestSnapshotPhrase(oldest uint32) string {
	if oldest == 0 {
		return "and none is left"
	}
	return fmt.Sprintf("and the nearest that is left is that of event %d", oldest)
}

// oldestSnapshot returns the seq of the oldest event after p whose snapshot still exists, or 0 if there is none.
// Retention removes the oldest snapshots first, so oldestSnapshot can search the list by bisection.
func (s *Server) oldestSnapshot(ctx context.Context, p reads.SessionState) (uint32, error) {
	list, err := s.Reads.Snapshots(ctx, p)
	if err != nil {
		return 0, err
	}
	i := sort.Search(len(list), func(i int) bool {
		if err != nil {
			return true
		}
		var name string
		if name, err = snapshotName(p, p.ID, list[i].Name); err != nil {
			return true
		}
		var has bool
		has, err = s.Objects.Has(ctx, name)
		return has
	})
	switch {
	case err != nil:
		return 0, snapshotError(err)
	case i == len(list):
		return 0, nil
	}
	return list[i].Seq, nil
}

// snapshotName returns the object name of a snapshot that the session owner took. An event contains the whole name
// or, from earlier builds, only the id.
func snapshotName(p reads.SessionState, owner, snapshot string) (string, error) {
	tenant, session, id, err := p.Tenant, owner, snapshot, error(nil)
	if strings.Contains(snapshot, "/") {
		if tenant, session, id, err = workspace.ParseManifestName(snapshot); err == nil && (tenant != p.Tenant || session != owner) {
			err = fmt.Errorf("snapshot %s does not belong to session %s", snapshot, owner)
		}
	}
	return workspace.ManifestName(tenant, session, id), err
}

// WorkspaceAt opens the snapshot that contains a session's files after the event with the seq at, or the session's
// last snapshot if at is nil. It returns NO_SNAPSHOT if no snapshot had been taken, and SNAPSHOT_GONE if the snapshot
// was removed.
func (s *Server) WorkspaceAt(ctx context.Context, session, minPosition string, at *uint32) (WorkspaceSnapshot, error) {
	if at == nil {
		return s.LastWorkspace(ctx, session, minPosition)
	}
	p, err := s.stateAfter(ctx, session, minPosition, "at", at)
	if err != nil {
		return WorkspaceSnapshot{}, err
	}
	return s.openSnapshot(ctx, p, "at")
}

// openSnapshot opens the snapshot that contains a session's files in the state p. field is the request parameter with
// the seq of the event, for a problem about it.
func (s *Server) openSnapshot(ctx context.Context, p reads.SessionState, field string) (WorkspaceSnapshot, error) {
	if p.Workspace == nil {
		return WorkspaceSnapshot{}, problem.New(problem.NoSnapshot, field, fmt.Sprintf("no snapshot of the workspace had been taken at event %d", p.Seq))
	}
	w := WorkspaceSnapshot{Session: p.Workspace.Session, Tenant: p.Tenant, Snapshot: p.Workspace.Name, At: p.Workspace.Time}
	name, err := snapshotName(p, w.Session, w.Snapshot)
	if err != nil {
		return w, problem.From(err)
	}
	has, err := s.Objects.Has(ctx, name)
	if err != nil {
		return w, snapshotError(err)
	}
	if !has {
		oldest, err := s.oldestSnapshot(ctx, p)
		if err != nil {
			return w, err
		}
		return w, problem.New(problem.SnapshotGone, field, fmt.Sprintf("the files at event %d are those of the snapshot of %s, which was removed, %s", p.Seq, snapshotEventPhrase(p), oldestSnapshotPhrase(oldest)))
	}
	if w.Manifest, err = workspace.Open(ctx, s.Objects, p.Tenant, w.Session, name[strings.LastIndexByte(name, '/')+1:]); err != nil {
		return w, snapshotError(err)
	}
	return w, nil
}
