package api

import (
	"context"
	"fmt"
	"slices"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events/history"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// maxDiffBlocks is the largest number of blocks in a SessionDiff.
const maxDiffBlocks = 200

// DiffSession returns the differences between the states of a session after two of its events: blocks, statuses, usage and files.
func (s *Server) DiffSession(ctx context.Context, r *spoolv1.DiffSessionRequest) (*spoolv1.SessionDiff, error) {
	tenant, err := s.checkSession(ctx, r.GetSessionId(), r.GetMinPosition())
	if err != nil {
		return nil, err
	}
	if r.GetFrom() > r.GetTo() && r.GetTo() > 0 {
		return nil, problem.Invalid("to", "to must not be before from")
	}
	var from, to reads.SessionState
	if from, err = s.Reads.StateAfter(ctx, tenant, r.GetSessionId(), "from", &r.From); err != nil {
		return nil, err
	}
	if to, err = s.Reads.StateAfter(ctx, tenant, r.GetSessionId(), "to", &r.To); err != nil {
		return nil, err
	}
	out := &spoolv1.SessionDiff{
		From: from.Seq, To: to.Seq,
		Reported: usageDifference(reads.UsageTotalMessage(from.ReportedUsage()), reads.UsageTotalMessage(to.ReportedUsage())),
		Metered:  usageDifference(reads.MeteredUsageMessage(from.Metered), reads.MeteredUsageMessage(to.Metered)),
	}
	if err := s.diffBlocks(ctx, out, from, to); err != nil {
		return nil, err
	}
	if out.Statuses, err = s.diffStatuses(ctx, from, to); err != nil {
		return nil, err
	}
	out.Files, err = s.diffFiles(ctx, from, to)
	return out, err
}

// usageDifference returns the usage from one sum of usage to a later one.
func usageDifference(from, to *spoolv1.UsageTotal) *spoolv1.UsageTotal {
	return &spoolv1.UsageTotal{
		InputTokens: to.InputTokens - from.InputTokens, OutputTokens: to.OutputTokens - from.OutputTokens,
		CacheReadTokens: to.CacheReadTokens - from.CacheReadTokens, CacheWriteTokens: to.CacheWriteTokens - from.CacheWriteTokens,
		CostUsd: to.CostUsd - from.CostUsd, Requests: to.Requests - from.Requests, Failed: to.Failed - from.Failed,
	}
}

// diffBlocks sets the blocks that were added, completed or changed between two states.
func (s *Server) diffBlocks(ctx context.Context, out *spoolv1.SessionDiff, from, to reads.SessionState) error {
	list, total, err := s.Reads.BlocksSince(ctx, from, to, maxDiffBlocks)
	if err != nil {
		return err
	}
	out.BlockCount = total
	for _, b := range list {
		change := "added"
		if slices.ContainsFunc(from.Blocks, func(was history.Block) bool { return was.Block.ID == b.Id }) {
			change = "completed"
			if slices.ContainsFunc(to.Blocks, func(is history.Block) bool { return is.Block.ID == b.Id }) {
				change = "changed"
			}
		}
		out.Blocks = append(out.Blocks, &spoolv1.BlockChange{Change: change, Block: b})
	}
	return nil
}

// diffStatuses returns the changes of status between two states of a session: of the session, its executions,
// sub-agents, approval requests and sandbox.
func (s *Server) diffStatuses(ctx context.Context, from, to reads.SessionState) (list []*spoolv1.StatusChange, err error) {
	add := func(kind, id, was, is string) {
		if was != is {
			list = append(list, &spoolv1.StatusChange{Kind: kind, Id: id, From: was, To: is})
		}
	}
	add("session", to.ID, from.State.Session.Status, to.State.Session.Status)
	executions, err := s.Reads.ExecutionsAt(ctx, to, from, maxStateExecutions)
	if err != nil {
		return nil, err
	}
	for _, x := range executions {
		was := ""
		if i := slices.IndexFunc(from.Executions, func(e history.Execution) bool { return e.ID == x.ExecutionId }); i >= 0 {
			was = from.Executions[i].Phase
		}
		add("execution", x.ExecutionId, was, x.Phase)
	}
	conversations, err := s.Reads.ConversationsAt(ctx, to, from, maxStateConversations)
	if err != nil {
		return nil, err
	}
	for _, c := range conversations[1:] { // main has no status of its own
		was := ""
		if slices.ContainsFunc(from.Conversations, func(x history.Conversation) bool { return x.ID == c.ConversationId }) {
			was = "running"
		}
		add("conversation", c.ConversationId, was, c.Status)
	}
	approvals, err := s.Reads.ApprovalsAt(ctx, to, from, maxStateApprovals)
	if err != nil {
		return nil, err
	}
	for _, a := range approvals {
		was := ""
		if i := slices.IndexFunc(from.Approvals, func(x history.OpenApproval) bool { return x.ID == a.ApprovalId }); i >= 0 {
			was = "pending"
			if from.Approvals[i].Decision != "" {
				was = "decided"
			}
		}
		add("approval", a.ApprovalId, was, a.Status)
	}
	if is := to.Sandbox; is != nil {
		was := ""
		if from.Sandbox != nil && from.Sandbox.ID == is.ID {
			was = from.Sandbox.Status
		}
		add("sandbox", is.ID, was, is.Status)
	}
	return list, nil
}

// comparedSnapshots returns a sentence that names the snapshots whose files were compared.
func comparedSnapshots(from, to reads.SessionState) string {
	if from.Workspace == nil {
		return fmt.Sprintf("All files of the snapshot of %s are new: none had been taken at event %d.", snapshotEventPhrase(to), from.Seq)
	}
	return fmt.Sprintf("The snapshots of %s and of %s were compared.", snapshotEventPhrase(from), snapshotEventPhrase(to))
}
