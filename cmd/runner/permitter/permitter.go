// Package permitter decides calls of tools as a turn of the runner does, without an agent and its process. The benchmark
// "approvals" measures what a permission policy costs.
package permitter

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// Permitter decides tool calls by a permission policy in the way in which a turn does. It is not safe for concurrent
// use.
type Permitter struct {
	turn    *agent.Turn
	journal *journal.Journal
}

// New returns a Permitter with the policy p; the zero value is the policy of an agent without permissions. The policy
// must not let a person decide.
func New(ctx context.Context, p events.Permissions) (*Permitter, error) {
	policy, err := permission.New(p, events.ExecutionPermissions{})
	if err != nil {
		return nil, err
	}
	j, err := journal.New(time.Now(), rand.Reader, 0)
	if err != nil {
		return nil, err
	}
	return &Permitter{agent.NewTurn(ctx, agent.TurnConfig{Journal: j, Policy: policy}), j}, nil
}

// IsAllowed reports whether the policy allows a call. It records the decision in a journal and then removes the record,
// as the runner does when the executor has stored it.
func (p *Permitter) IsAllowed(c permission.Call) (allowed bool) {
	p.turn.RequestPermission(events.MainConversation, agent.PermissionRequest{Key: "key", ToolUseID: "call", Call: c}, func(a agent.PermissionAnswer) {
		allowed = a.IsAllowed()
	})
	_, last := p.journal.LineRange()
	p.journal.TrimUpTo(last)
	return allowed
}
