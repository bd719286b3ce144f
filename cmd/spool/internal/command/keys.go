package command

import (
	"context"
	"fmt"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/pkg/events"
)

type keysCommand struct {
	Create keysCreate `cmd:"" help:"Make an API key and show it, this once."`
	Ls     keysLs     `cmd:"" help:"List keys, revoked ones too."`
	Revoke keysRevoke `cmd:"" help:"Revoke keys: they are refused from then on."`
}

type keysCreate struct {
	server
	Name   string `arg:"" help:"What to recognise it by."`
	Tenant string `placeholder:"T" help:"Whose key it is; without it, the caller's tenant."`
}

// Run makes a key. Only the key goes to the standard output.
func (c *keysCreate) Run(a *app) error {
	if c.Tenant != "" {
		if err := events.CheckTenant("tenant", c.Tenant); err != nil {
			return &exitError{ExitUsage, err}
		}
	}
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	doc, err := cl.CreateKey(ctx, c.Name, c.Tenant)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(doc)
	}
	fmt.Fprintf(a.Err, "%s of tenant %s; it is shown only now:\n", doc.Value.ID, doc.Value.Tenant)
	_, err = fmt.Fprintln(a.Out, doc.Value.Key)
	return err
}

type keysLs struct{ server }

// Run lists keys.
func (c *keysLs) Run(a *app) error {
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	keys, err := cl.Keys(ctx)
	if err != nil {
		return err
	}
	items := func(yield func(client.Doc[client.Key], error) bool) {
		for _, k := range keys {
			if !yield(k, nil) {
				return
			}
		}
	}
	return list(a, c.JSON, 0, items, []any{"KEY", "NAME", "PREFIX", "CREATED", "REVOKED"}, func(k client.Key) []any {
		return []any{k.ID, k.Name, k.Prefix, when(k.CreatedAt), whenP(k.RevokedAt)}
	})
}

type keysRevoke struct {
	server
	Keys []string `arg:"" name:"key" help:"Ids."`
}

// Run revokes keys.
func (c *keysRevoke) Run(a *app) error {
	return c.each(a, events.KindKey, "key", c.Keys, "revoked", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return cl.RevokeKey(ctx, id)
	})
}
