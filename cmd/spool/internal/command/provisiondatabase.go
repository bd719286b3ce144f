package command

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/readmodel"
)

type provisionDatabaseCommand struct {
	AdminURL          string `name:"admin-url" required:"" env:"SPOOL_DATABASE_ADMIN_URL" placeholder:"URL" help:"Database of the read models, with a superuser of a Postgres that only Spool uses. No service needs this URL."`
	ProjectorPassword string `required:"" env:"SPOOL_POSTGRES_PASSWORD_PROJECTOR" help:"Password of role spool_projector, which the projector and the janitor use."`
	GatewayPassword   string `required:"" env:"SPOOL_POSTGRES_PASSWORD_GATEWAY" help:"Password of role spool_gateway, which gateways use."`
	JSON              bool   `help:"Print one JSON object."`
}

// Run creates or updates the Postgres roles of the services.
func (c *provisionDatabaseCommand) Run(a *app) error {
	cfg, err := pgx.ParseConfig(c.AdminURL)
	if err != nil {
		return usageError("admin-url: not the URL of a Postgres database, such as postgres://user@host/name")
	}
	for _, p := range []struct{ flag, value string }{{"projector-password", c.ProjectorPassword}, {"gateway-password", c.GatewayPassword}} {
		if p.value == "" {
			return usageError("%s: the password is empty: set a password for the role", p.flag)
		}
	}
	ctx, cancel := a.interruptibleContext()
	defer cancel()
	err = readmodel.CreateRoles(ctx, c.AdminURL, readmodel.Passwords{Projector: c.ProjectorPassword, Gateway: c.GatewayPassword})
	if errors.Is(err, readmodel.ErrNotSuperuser) {
		return fmt.Errorf("admin-url: %w: use a superuser, or create the roles as described in docs/operations.md", err)
	}
	if err != nil {
		return contextCause(ctx, err)
	}
	if c.JSON {
		return a.printJSON(map[string]any{"database": cfg.Database, "roles": []string{readmodel.ProjectorRole, readmodel.GatewayRole}})
	}
	_, err = terminal.Fprintf(a.Out, "provisioned database %s: roles %s and %s\n", cfg.Database, readmodel.ProjectorRole, readmodel.GatewayRole)
	return err
}
