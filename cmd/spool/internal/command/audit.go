package command

import (
	"cmp"
	"context"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

type auditCommand struct {
	serverFlags
	Session string `placeholder:"S" help:"Only actions on this session, which may be deleted."`
	Actor   string `placeholder:"A" help:"Only actions of this actor: id or name of an API key, an end user as stated in Spool-User, or local."`
	Since   string `placeholder:"T" help:"Only actions from this time on: a time in RFC 3339, or a duration before now, such as 24h."`
	Limit   int    `default:"100" help:"Maximum number of entries; 0 means all."`
}

// Run lists which users and keys did what, newest first.
func (c *auditCommand) Run(a *app) error {
	if c.Limit < 0 {
		return usageError("limit: %d is less than 0", c.Limit)
	}
	since, err := parseSince(c.Since, time.Now())
	if err != nil {
		return err
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		entries := client.List[*spoolv1.AuditEntry](ctx, cl.Audit.ListAudit, &spoolv1.ListAuditRequest{Session: c.Session, Actor: c.Actor, Since: since})
		return printList(a, c.JSON, c.Limit, entries, []any{"TIME", "ACTOR", "USER", "ADDRESS", "DID", "ABOUT", "EXECUTION", "POSITION"}, func(e *spoolv1.AuditEntry) []any {
			return []any{
				formatExactTime(e.Time), cmp.Or(e.Actor.GetKeyName(), e.Actor.GetKeyId(), e.Actor.GetId()), e.Actor.GetUser(), e.Actor.GetAddress(),
				strings.Join(e.Types, ","), cmp.Or(e.GetSessionId(), e.GetAbout(), e.Aspect), e.GetExecutionId(), e.Position,
			}
		})
	})
}

// parseSince converts the flag --since to a time for the API. s is a time in RFC 3339 or a duration before now. An
// empty s returns "".
func parseSince(s string, now time.Time) (string, error) {
	if s == "" {
		return "", nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now.Add(-d).UTC().Format(time.RFC3339Nano), nil
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return "", usageError("since: %+q is neither a time in RFC 3339, such as 2026-01-31T12:00:00Z, nor a duration, such as 24h", s)
	}
	return t.UTC().Format(time.RFC3339Nano), nil
}
