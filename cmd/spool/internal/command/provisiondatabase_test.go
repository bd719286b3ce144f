package command

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel/readmodeltest"
)

func TestProvisionDatabase_CreatesRoles(t *testing.T) {
	t.Parallel()
	url := pgtest.StartServer(t, pgserver.Config{Fast: true}).URL()
	passwords := []string{"--projector-password", "of'the\\projector", "--gateway-password", "of the gateway"}
	made := "provisioned database spool: roles spool_projector and spool_gateway\n"
	for _, c := range []struct {
		name string
		args []string
		code int
		out  string
		err  string
	}{
		{"without passwords", []string{"--admin-url", url}, ExitUsage, "", "--projector-password"},
		{"empty password", append([]string{"--admin-url", url, "--projector-password", "p"}, "--gateway-password", ""), ExitUsage, "", "gateway-password: the password is empty"},
		{"no URL", append([]string{"--admin-url", "://"}, passwords...), ExitUsage, "", "admin-url: not the URL"},
		{"new", append([]string{"--admin-url", url}, passwords...), ExitDone, made, ""},
		{"again", append([]string{"--admin-url", url}, passwords...), ExitDone, made, ""},
		{"as JSON", append([]string{"--json", "--admin-url", url}, passwords...), ExitDone, `{"database":"spool","roles":["spool_projector","spool_gateway"]}` + "\n", ""},
		{"as another role", append([]string{"--admin-url", readmodeltest.URLForRole(t, url, "spool_projector")}, passwords...), ExitFailed, "", "the role is not a superuser: use a superuser"},
		{"nobody answers", append([]string{"--admin-url", "postgres://127.0.0.1:1/x?connect_timeout=2"}, passwords...), ExitFailed, "", "create the roles: "},
	} {
		got := spool(t, testIO(t), append([]string{"provision-database"}, c.args...)...)
		if got.code != c.code || got.out != c.out || !strings.Contains(got.err, c.err) || c.err == "" && got.err != "" {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
	// Postgres stores a verifier of each role's password.
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	var with int
	if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_authid WHERE rolname IN ('spool_projector', 'spool_gateway') AND rolpassword LIKE 'SCRAM-SHA-256$%'").Scan(&with); err != nil || with != 2 {
		t.Errorf("%d roles have a password, %v", with, err)
	}
}
