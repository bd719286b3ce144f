// Package readmodeltest provides tests with databases that have the roles of an installation.
package readmodeltest

import (
	"net/url"
	"testing"

	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
)

// URLs are the URLs of one database for each of the roles.
type URLs struct{ Superuser, Projector, Gateway string }

// Database returns a new database with the roles and without read models. It is dropped when the test ends.
func Database(t testing.TB) URLs {
	t.Helper()
	return WithRoles(t, pgtest.NewDatabase(t))
}

// WithRoles creates the roles in a database of a server that trusts its socket. The URL must be that of a superuser.
func WithRoles(t testing.TB, superuser string) URLs {
	t.Helper()
	if err := readmodel.CreateRoles(t.Context(), superuser, readmodel.Passwords{}); err != nil {
		t.Fatal(err)
	}
	return URLs{Superuser: superuser, Projector: As(t, superuser, readmodel.ProjectorRole), Gateway: As(t, superuser, readmodel.GatewayRole)}
}

// As returns the URL of a database for another role, without a password.
func As(t testing.TB, database, role string) string {
	t.Helper()
	u, err := url.Parse(database)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.User(role)
	return u.String()
}
