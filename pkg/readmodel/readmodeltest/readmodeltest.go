// Package readmodeltest provides tests with databases that have the roles of an installation.
package readmodeltest

import (
	"net/url"
	"testing"

	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel"
)

// RoleURLs holds the URLs of one database for each of its roles.
type RoleURLs struct{ Superuser, Projector, Gateway string }

// NewDatabase creates a database that has the roles of the read models and no tables yet. It is dropped when the test
// ends.
func NewDatabase(t testing.TB) RoleURLs {
	t.Helper()
	return CreateRoles(t, pgtest.NewDatabase(t))
}

// CreateRoles creates the roles of the read models in a database of a server that trusts its socket. The URL must be
// that of a superuser.
func CreateRoles(t testing.TB, superuser string) RoleURLs {
	t.Helper()
	if err := readmodel.CreateRoles(t.Context(), superuser, readmodel.Passwords{}); err != nil {
		t.Fatal(err)
	}
	return RoleURLs{Superuser: superuser, Projector: URLForRole(t, superuser, readmodel.ProjectorRole), Gateway: URLForRole(t, superuser, readmodel.GatewayRole)}
}

// URLForRole returns the URL of a database for another role, without a password.
func URLForRole(t testing.TB, database, role string) string {
	t.Helper()
	u, err := url.Parse(database)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.User(role)
	return u.String()
}
