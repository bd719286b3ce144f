package client

import (
	"context"
	"iter"
	"net/url"
)

// AuditEntry is who did what by one commit.
type AuditEntry struct {
	Time        string     `json:"time"`
	Position    string     `json:"position"`
	Actor       AuditActor `json:"actor"`
	Types       []string   `json:"types"`
	Aspect      string     `json:"aspect"`
	SessionID   string     `json:"sessionId"`
	ExecutionID string     `json:"executionId"`
	About       string     `json:"about"`
}

// AuditActor is who did it.
type AuditActor struct {
	Kind    string `json:"kind"`
	ID      string `json:"id"`
	KeyID   string `json:"keyId"`
	KeyName string `json:"keyName"`
	User    string `json:"user"`
	Address string `json:"address"`
	Service string `json:"service"`
}

// AuditFilter narrows the audit; the zero AuditFilter is everything.
type AuditFilter struct{ Session, Actor, Since string }

// Audit yields who did what, the newest first.
func (c *Client) Audit(ctx context.Context, f AuditFilter) iter.Seq2[Doc[AuditEntry], error] {
	q := url.Values{}
	for name, value := range map[string]string{"session": f.Session, "actor": f.Actor, "since": f.Since} {
		if value != "" {
			q.Set(name, value)
		}
	}
	return pages[AuditEntry](ctx, c, "entries", q, "api", "audit")
}
