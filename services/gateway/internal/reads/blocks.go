package reads

import (
	"context"
	"encoding/json"

	"github.com/jackc/pgx/v5"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads/queries"
)

// Blocks returns a session's blocks in display order, the open ones of them, which may have text in flight, and the seq up
// to which they are folded. A conversation other than "" selects only its blocks. take is called with the bytes of each block
// before the next one is read; its error ends the read. take may be nil.
func (s *Store) Blocks(ctx context.Context, tenant, session, conversation string, take func(bytes int64) error) (list []*spoolv1.Block, open []OpenText, _ uint32, _ error) {
	var tip int64
	err := s.awaitRead(ctx, s.sessionSearch(tenant, session), func() error {
		list, open = nil, nil
		found := false
		err := s.queryRows(ctx, func(r pgx.Rows) error {
			var stored, start *string
			if err := r.Scan(&tip, &stored, &start); err != nil {
				return err
			}
			found = true
			if stored == nil {
				return nil
			}
			var b events.Block
			if err := json.Unmarshal([]byte(*stored), &b); err != nil {
				return problem.New(problem.Internal, "", "a block in the read models is not valid").WithCause(err)
			}
			if take != nil {
				if err := take(int64(len(*stored))); err != nil {
					return err
				}
			}
			if start != nil {
				o, err := newOpenText(b.ID, b.ExecutionID, b.ConversationID, *start)
				if err != nil {
					return err
				}
				open = append(open, o)
			}
			list = append(list, BlockMessage(b))
			return nil
		}, `
		SELECT s.tip, b.block, e.event FROM sessions s
		  LEFT JOIN blocks b ON b.tenant = s.tenant AND b.session = s.id AND ($3 = '' OR b.conversation = $3)
		  LEFT JOIN events e ON b.status = 'pending' AND e.tenant = s.tenant AND e.session = s.id AND e.seq = b.first_seq
		 WHERE s.tenant = $1 AND s.id = $2 ORDER BY b.execution_ord, b.first_seq`, tenant, session, conversation)
		if err == nil && !found {
			return s.missingSessionError(ctx, tenant, session)
		}
		return err
	})
	return list, open, uint32(tip), err
}

// BlockMessage converts a block to an API message.
func BlockMessage(b events.Block) *spoolv1.Block {
	out := &spoolv1.Block{
		Id: b.ID, Kind: string(b.Kind), Status: string(b.Status), Timestamp: wirejson.TimestampOf(b.Time),
		ExecutionId: nilIfEmpty(b.ExecutionID), ConversationId: nilIfEmpty(b.ConversationID),
		Content: nilIfEmpty(b.Content), Model: nilIfEmpty(b.Model), Summary: nilIfEmpty(b.Summary),
		ToolName: nilIfEmpty(b.ToolName), ToolUseId: nilIfEmpty(b.ToolUseID), Input: wirejson.JSONFromText(string(b.Input)),
		DisplayName: nilIfEmpty(b.DisplayName), Description: nilIfEmpty(b.Description), Output: nilIfEmpty(b.Output),
		SubagentId: nilIfEmpty(b.SubagentID), Name: nilIfEmpty(b.Name), Subtype: nilIfEmpty(b.Subtype), Code: nilIfEmpty(b.Code), Message: nilIfEmpty(b.Message), Anchor: nilIfEmpty(b.Anchor),
	}
	if b.IsError {
		out.IsError = &b.IsError
	}
	if b.DurationMs != 0 {
		out.DurationMs = &b.DurationMs
	}
	for _, p := range b.Parts {
		out.Parts = append(out.Parts, &spoolv1.Part{Type: p.Type, Text: nilIfEmpty(p.Text), MediaType: nilIfEmpty(p.MediaType), Data: nilIfEmpty(p.Data)})
	}
	for _, t := range b.Todos {
		out.Todos = append(out.Todos, &spoolv1.TodoItem{Content: t.Content, Status: t.Status})
	}
	out.Plan, out.Step = planMessage(b.Plan), stepMessage(b.Step)
	if k := b.Skill; k != nil {
		out.Skill = &spoolv1.LoadedSkill{Name: k.Name, Version: nilIfEmpty(k.Version), Path: nilIfEmpty(k.Path)}
	}
	return out
}

// planMessage converts a plan to an API message. It returns nil for nil.
func planMessage(p *events.Plan) *spoolv1.Plan {
	if p == nil {
		return nil
	}
	out := &spoolv1.Plan{Title: nilIfEmpty(p.Title), Explanation: nilIfEmpty(p.Explanation)}
	for _, i := range p.Items {
		out.Items = append(out.Items, &spoolv1.PlanItem{Id: nilIfEmpty(i.ItemID), Content: i.Content, Status: string(i.Status), Priority: nilIfEmpty(i.Priority)})
	}
	return out
}

// stepMessage converts a step to an API message. It returns nil for nil.
func stepMessage(s *events.Step) *spoolv1.Step {
	if s == nil {
		return nil
	}
	return &spoolv1.Step{
		Id: s.StepID, Title: s.Title, Status: string(s.Status), DependsOn: s.DependsOn,
		ConversationId: nilIfEmpty(s.SubConversationID), ExecutionId: nilIfEmpty(s.SubExecutionID),
		Result: nilIfEmpty(s.Result), ErrorCode: nilIfEmpty(s.ErrorCode), ErrorMessage: nilIfEmpty(s.ErrorMessage),
		StartedAt: timestampMessage(s.StartedAt), EndedAt: timestampMessage(s.EndedAt),
	}
}

// Conversations returns a session's conversations: main, then those of the sub-agents in order.
func (s *Store) Conversations(ctx context.Context, tenant, session string) ([]*spoolv1.Conversation, error) {
	one, err := s.Session(ctx, tenant, session)
	if err != nil {
		return nil, err
	}
	main := &spoolv1.Conversation{ConversationId: events.MainConversation, Status: "completed", StartedAt: one.CreatedAt}
	if one.ActiveExecutionId != nil {
		main.Status, main.ExecutionId = "running", one.ActiveExecutionId
	}
	list := []*spoolv1.Conversation{main}
	rows, err := s.queries.Conversations(ctx, tenant, session)
	for _, r := range rows {
		list = append(list, conversationMessage(r))
	}
	return list, err
}

// conversationMessage converts a row with the conversation of a sub-agent to an API message.
func conversationMessage(r queries.ConversationsRow) *spoolv1.Conversation {
	return &spoolv1.Conversation{
		ConversationId: r.ID, ParentConversationId: nilIfEmpty(r.Parent), ExecutionId: nilIfEmpty(r.Execution), SubagentId: nilIfEmpty(r.Subagent),
		ToolUseId: nilIfEmpty(r.ToolUseID), Name: nilIfEmpty(r.Name), Status: r.Status,
		StartedAt: wirejson.TimestampOf(r.StartedAt), EndedAt: timestampMessage(r.EndedAt), DurationMs: uint32(r.DurationMs),
	}
}
