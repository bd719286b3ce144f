package reads

import (
	"context"
	"encoding/json"
	"math"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// Limits of a page of the newest blocks.
const (
	maxNewestBytes     = 512 << 10 // JSON of the blocks as they are sent; the first block of a page may exceed it
	maxNewestReadBytes = 4 << 20   // blocks as they are stored, including the one that exceeds the limit
	maxFieldBytes      = 8 << 10   // a field of a block
)

// BlockPage is a page of a session's blocks, in reverse display order.
type BlockPage struct {
	Blocks []*spoolv1.Block
	Open   []OpenText // the open blocks of the page
	Tip    uint32     // seq of the last event that is folded into the blocks

	tokens []BlockToken // positions of the blocks
	more   bool         // whether the session has blocks after the page
}

// AfterLastBlock returns the BlockToken after the last block of a session.
func AfterLastBlock() BlockToken {
	return BlockToken{Seq: math.MaxUint32, Ord: math.MaxInt32, FirstSeq: math.MaxInt64}
}

// NewestBlocks returns the blocks before a position in the list of blocks that a session has after the event
// before.Seq, at most limit, in reverse display order. A conversation other than "" selects only its blocks.
func (s *Store) NewestBlocks(ctx context.Context, tenant, session, conversation string, before BlockToken, limit uint32) (BlockPage, error) {
	var p BlockPage
	of := "$3 = ''"
	if conversation != "" {
		of = "b.conversation = $3"
	}
	err := s.awaitRead(ctx, s.sessionSearch(tenant, session), func() error {
		p = BlockPage{}
		found := false
		err := s.queryRows(ctx, func(r pgx.Rows) error {
			var tip int64
			var ord, first *int64
			var stored, start *string
			if err := r.Scan(&tip, &ord, &first, &stored, &start); err != nil {
				return err
			}
			found = true
			if p.Tip = uint32(tip); ord == nil {
				return nil
			}
			if stored == nil || len(p.Blocks) == int(limit) {
				p.more = true
				return nil
			}
			b, err := p.add(*stored, start)
			p.tokens = append(p.tokens, BlockToken{Seq: min(before.Seq, p.Tip), Ord: *ord, FirstSeq: *first})
			p.Blocks = append(p.Blocks, b)
			return err
		}, `
		SELECT s.tip, p.execution_ord, p.first_seq, CASE WHEN p.before <= $8::bigint THEN p.block END, e.event FROM sessions s
		  LEFT JOIN LATERAL (SELECT l.*, sum(octet_length(l.block)) OVER (ORDER BY l.execution_ord DESC, l.first_seq DESC) - octet_length(l.block) AS before FROM (
		    SELECT b.block, b.status, b.execution_ord::bigint, b.first_seq FROM blocks b
		     WHERE b.tenant = s.tenant AND b.session = s.id AND `+of+` AND (b.execution_ord, b.first_seq) < ($4::bigint, $5::bigint) AND b.first_seq <= $6
		     ORDER BY b.execution_ord DESC, b.first_seq DESC LIMIT $7) l) p ON true
		  LEFT JOIN events e ON p.status = 'pending' AND e.tenant = s.tenant AND e.session = s.id AND e.seq = p.first_seq
		 WHERE s.tenant = $1 AND s.id = $2 ORDER BY p.execution_ord DESC, p.first_seq DESC`,
			tenant, session, conversation, before.Ord, before.FirstSeq, int64(before.Seq), int64(limit)+1, maxNewestReadBytes)
		switch {
		case err != nil:
			return err
		case !found:
			return s.missingSessionError(ctx, tenant, session)
		case before.Seq > p.Tip && before != AfterLastBlock():
			return s.MissingUnlessFolding(ctx, session, problem.Invalid("before", "the session has no event %d", before.Seq))
		case len(p.Blocks) == 0 && conversation != "" && conversation != events.MainConversation:
			return s.checkConversation(ctx, tenant, session, conversation)
		}
		return nil
	})
	return p, err
}

// add decodes a stored block of the page. start is the event with which an open block began; nil for other blocks.
func (p *BlockPage) add(stored string, start *string) (*spoolv1.Block, error) {
	var b events.Block
	if err := json.Unmarshal([]byte(stored), &b); err != nil {
		return nil, errUnreadableEvent(err)
	}
	if start != nil {
		o, err := newOpenText(b.ID, b.ExecutionID, b.ConversationID, *start)
		if err != nil {
			return nil, err
		}
		p.Open = append(p.Open, o)
	}
	return BlockMessage(b), nil
}

// checkConversation returns an error unless a sub-agent's conversation exists.
func (s *Store) checkConversation(ctx context.Context, tenant, session, conversation string) error {
	list, err := s.queries.Conversations(ctx, tenant, session)
	if err != nil {
		return err
	}
	for _, c := range list {
		if c.ID == conversation {
			return nil
		}
	}
	return s.MissingUnlessFolding(ctx, session, problem.Invalid("conversationId", "the session has no conversation %s", truncate.Quote(conversation, 64)))
}

// Limit truncates long fields of the blocks and ends the page after its limit of bytes. It returns the truncated
// fields and the position of the next page, or nil at the end.
func (p *BlockPage) Limit() (truncated []*spoolv1.TruncatedField, next *BlockToken) {
	size := 0
	for i, b := range p.Blocks {
		cut := truncateBlock(b)
		size += len(wirejson.Marshal(b))
		if i > 0 && size > maxNewestBytes {
			p.Blocks, p.more = p.Blocks[:i], true
			break
		}
		truncated = append(truncated, cut...)
	}
	if n := len(p.Blocks); p.more && n > 0 {
		next = &p.tokens[n-1]
	}
	return truncated, next
}

// truncateBlock truncates the fields of a block that are longer than maxFieldBytes, and returns them. The content of a
// pending block stays whole, because clients append text in flight to it.
func truncateBlock(b *spoolv1.Block) (list []*spoolv1.TruncatedField) {
	add := func(field string, bytes int) {
		list = append(list, &spoolv1.TruncatedField{BlockId: b.Id, Field: field, Bytes: uint32(bytes)})
	}
	for _, f := range []struct {
		name string
		text *string
	}{{"content", b.Content}, {"summary", b.Summary}, {"output", b.Output}, {"description", b.Description}, {"message", b.Message}} {
		if f.text == nil || len(*f.text) <= maxFieldBytes || f.name == "content" && b.Status == string(events.StatusPending) {
			continue
		}
		add(f.name, len(*f.text))
		*f.text = truncate.Prefix(*f.text, maxFieldBytes)
	}
	if n := len(b.Input.GetText()); n > maxFieldBytes {
		add("input", n)
		b.Input = nil
	}
	parts, todos := 0, 0
	for _, p := range b.Parts {
		parts += len(p.GetText()) + len(p.GetData())
	}
	for _, t := range b.Todos {
		todos += len(t.Content)
	}
	if parts > maxFieldBytes {
		add("parts", parts)
		b.Parts = nil
	}
	if todos > maxFieldBytes {
		add("todos", todos)
		b.Todos = nil
	}
	if n := proto.Size(b.Plan); n > maxFieldBytes {
		add("plan", n)
		b.Plan = nil
	}
	if n := proto.Size(b.Step); n > maxFieldBytes {
		add("step", n)
		b.Step = nil
	}
	if n := proto.Size(b.Skill); n > maxFieldBytes {
		add("skill", n)
		b.Skill = nil
	}
	return list
}

// Block returns a block, its text if it is open, and the seq up to which it is folded.
func (s *Store) Block(ctx context.Context, tenant, session, id string) (p BlockPage, _ error) {
	err := s.awaitRead(ctx, s.sessionSearch(tenant, session), func() error {
		p = BlockPage{}
		found := false
		err := s.queryRows(ctx, func(r pgx.Rows) error {
			var tip int64
			var stored, start *string
			if err := r.Scan(&tip, &stored, &start); err != nil {
				return err
			}
			found, p.Tip = true, uint32(tip)
			if stored == nil {
				return nil
			}
			b, err := p.add(*stored, start)
			p.Blocks = append(p.Blocks, b)
			return err
		}, `
		SELECT s.tip, b.block, e.event FROM sessions s
		  LEFT JOIN blocks b ON b.tenant = s.tenant AND b.session = s.id AND b.id = $3
		  LEFT JOIN events e ON b.status = 'pending' AND e.tenant = s.tenant AND e.session = s.id AND e.seq = b.first_seq
		 WHERE s.tenant = $1 AND s.id = $2`, tenant, session, id)
		switch {
		case err != nil:
			return err
		case !found:
			return s.missingSessionError(ctx, tenant, session)
		case len(p.Blocks) == 0:
			return s.MissingUnlessFolding(ctx, session, problem.New(problem.NotFound, "blockId", "the session has no such block"))
		}
		return nil
	})
	return p, err
}
