package command

import (
	"context"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

type keysCommand struct {
	Create keysCreateCommand `cmd:"" help:"Create an API key and show it, only this once."`
	Ls     keysLsCommand     `cmd:"" help:"List keys, including revoked ones."`
	Local  keysLocalCommand  `cmd:"" help:"Print the local key of the stack that runs on the data folder."`
	Revoke keysRevokeCommand `cmd:"" help:"Revoke keys and the keys that they created."`
}

type keysCreateCommand struct {
	serverFlags
	Name   string `arg:"" help:"Name of the key."`
	Tenant string `placeholder:"T" help:"Tenant of the key; by default the caller's."`

	Role    string   `placeholder:"R" help:"Permissions of the key: use (sessions and their files), operate (also the catalogue, deletion and dead letters) or admin (also keys); by default the role of the caller's key."`
	Agents  []string `placeholder:"A" help:"Slugs of the only agents that the key may use, separated by commas; the built-in agent has the slug default. By default the agents of the caller's key."`
	Expires string   `placeholder:"E" help:"Expiry of the key: a duration such as 720h, or a time in RFC 3339; by default the expiry of the caller's key."`
}

// Run creates an API key. It prints only the key on standard output.
func (c *keysCreateCommand) Run(a *app) error {
	if err := checkTenant(c.Tenant); err != nil {
		return err
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		request := &spoolv1.CreateKeyRequest{Name: c.Name, Tenant: c.Tenant, Role: c.Role, Agents: c.Agents, Expires: c.Expires}
		doc, err := client.Call(ctx, cl.Keys.CreateKey, request)
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		terminal.Fprintf(a.Err, "%s of tenant %s; it is shown only now:\n", doc.Value.KeyId, doc.Value.Tenant)
		_, err = terminal.Fprintln(a.Out, doc.Value.Key)
		return err
	})
}

type keysLocalCommand struct {
	Data string `env:"SPOOL_DATA_DIR" placeholder:"DIR" help:"Data folder of the stack; by default spool in the user's data folder."`
}

// Run prints the local key of a running stack.
func (c *keysLocalCommand) Run(a *app) error {
	running, err := runningStackOn(a, c.Data)
	if err == nil {
		_, err = terminal.Fprintln(a.Out, running.LocalKey)
	}
	return err
}

// runningStackOn returns how to reach the stack on a data folder, or an error if no stack with a local key runs there.
// dataFlag is the value of the flag with the data folder.
func runningStackOn(a *app, dataFlag string) (StackConnection, error) {
	dir, err := dataDirOrDefault(a, dataFlag)
	if err != nil {
		return StackConnection{}, err
	}
	running, ok, err := a.Local.Find(dir)
	switch {
	case err != nil:
		return running, err
	case !ok:
		return running, fmt.Errorf("no stack runs on %s: start it with `spool up`, or name its folder with --data", dir)
	case running.LocalKey == "":
		return running, fmt.Errorf("the stack on %s is of an earlier version and has no local key: start it again", dir)
	}
	return running, nil
}

type keysLsCommand struct{ tenantFlags }

// checkTenant returns a usage error if tenant is neither empty nor a valid tenant.
func checkTenant(tenant string) error {
	if tenant == "" {
		return nil
	}
	if err := events.CheckTenant("tenant", tenant); err != nil {
		return &exitError{ExitUsage, err}
	}
	return nil
}

// Run lists keys.
func (c *keysLsCommand) Run(a *app) error {
	if err := checkTenant(c.Tenant); err != nil {
		return err
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		keys := client.List[*spoolv1.Key](ctx, cl.Keys.ListKeys, &spoolv1.ListKeysRequest{Tenant: c.Tenant})
		return printList(a, c.JSON, 0, keys, []any{"KEY", "NAME", "PREFIX", "ROLE", "AGENTS", "CREATED", "EXPIRES", "REVOKED", "MADE BY"}, func(k *spoolv1.Key) []any {
			return []any{k.KeyId, k.Name, k.Prefix, k.Role, strings.Join(k.Agents, ","), formatTime(k.CreatedAt), formatTime(k.ExpiresAt), formatTime(k.RevokedAt), k.GetCreatedBy()}
		})
	})
}

type keysRevokeCommand struct {
	tenantFlags
	Keys []string `arg:"" name:"key" help:"Ids of the keys."`
}

// Run revokes API keys, and the keys that were created with them.
func (c *keysRevokeCommand) Run(a *app) error {
	if err := checkTenant(c.Tenant); err != nil {
		return err
	}
	return c.forEachID(a, events.KindKey, "key", c.Keys, "revoked", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.Keys.RevokeKey, &spoolv1.RevokeKeyRequest{KeyId: id, Tenant: c.Tenant})
	})
}
