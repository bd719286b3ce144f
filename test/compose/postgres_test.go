package compose

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestPostgres_ServicesAreNoSuperusers attacks Postgres with the credentials of the services, in a new installation
// and in one whose volume was created when a superuser owned the read models. `deploy/env` and `up` upgrade the
// latter.
func TestPostgres_ServicesAreNoSuperusers(t *testing.T) { //nolint:paralleltest // the test uses the whole machine
	p := newProject(t)
	up := append(p.compose("up", "--detach", "--no-build", "--wait"), "session", "gateway")
	p.run(5*time.Minute, up...)
	key := p.key(p.url(1))
	p.attackPostgres()

	// The database is changed to the form that releases without roles created.
	p.run(time.Minute, p.compose("stop", "gateway", "projector")...)
	for _, sql := range []string{
		downTo(t, 7),
		"REASSIGN OWNED BY spool_projector TO spool; DROP OWNED BY spool_projector, spool_gateway; DROP ROLE spool_projector, spool_gateway",
	} {
		p.run(time.Minute, p.compose("exec", "--no-TTY", "postgres", "psql", "--username=spool", "--set=ON_ERROR_STOP=1", "--command", sql)...)
	}
	envFile := filepath.Join(p.dir, "deploy", ".env")
	written, err := os.ReadFile(envFile)
	if err != nil {
		t.Fatal(err)
	}
	older := regexp.MustCompile(`(?m)^SPOOL_POSTGRES_PASSWORD_\w+=.*\n`).ReplaceAll(written, nil)
	if err := os.WriteFile(envFile, older, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := p.try(time.Minute, up...); err == nil || !strings.Contains(err.Error(), "run deploy/env") {
		t.Errorf("without the new passwords: %v", err)
	}
	p.run(time.Minute, "deploy/env", "--mock")
	p.run(5*time.Minute, up...)
	if err := (server{p.url(1), key}).call(t.Context(), "GET", "/api/sessions", nil, http.StatusOK, nil); err != nil {
		t.Errorf("the key of the older installation: %v", err)
	}
	p.attackPostgres()
	// Only the superuser can run programs: the statement itself is valid.
	p.run(time.Minute, p.compose("exec", "--no-TTY", "postgres", "psql", "--username=spool", "--set=ON_ERROR_STOP=1", "--command", "COPY (SELECT 1) TO PROGRAM 'cat >/dev/null'")...)
}

// downTo returns the SQL that reverts a database to a version of the read models.
func downTo(t *testing.T, version int) string {
	t.Helper()
	names, err := filepath.Glob(root + "/pkg/readmodel/migrations/*.sql")
	if err != nil || len(names) <= version {
		t.Fatalf("migrations %v, %v", names, err)
	}
	sql := "SET search_path TO spool;\n"
	for _, name := range slices.Backward(names[version:]) {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		_, down, found := strings.Cut(string(text), "-- +goose Down\n")
		if !found {
			t.Fatalf("%s has no section Down", name)
		}
		sql += down
	}
	return sql + fmt.Sprintf("DELETE FROM goose_db_version WHERE version_id > %d", version)
}

// attackPostgres runs statements with the database URL of each service that has one.
func (p *project) attackPostgres() {
	p.t.Helper()
	var f file
	if err := json.Unmarshal([]byte(p.run(time.Minute, p.compose("config", "--format", "json")...)), &f); err != nil {
		p.t.Fatal(err)
	}
	tried := 0
	for name, s := range f.Services {
		url := s.Environment["SPOOL_DATABASE_URL"]
		if url == nil {
			continue
		}
		tried++
		query := func(sql string) error {
			_, err := p.try(time.Minute, p.compose("exec", "--no-TTY", "postgres", "psql", *url, "--set=ON_ERROR_STOP=1", "--set=VERBOSITY=sqlstate", "--command", sql)...)
			return err
		}
		attacks := []string{"COPY (SELECT 1) TO PROGRAM 'cat >/dev/null'", "COPY spool.poison FROM PROGRAM 'true'", "SELECT pg_read_file('PG_VERSION')", "SELECT * FROM pg_shadow", "CREATE ROLE intruder"}
		if name == "gateway" {
			attacks = append(attacks, "SELECT sha256 FROM spool.keys", "DELETE FROM spool.sessions", "CREATE TABLE spool.t (x text)")
		}
		for _, sql := range attacks {
			if err := query(sql); err == nil || !strings.Contains(err.Error(), "42501") {
				p.t.Errorf("%s: %s: %v", name, sql, err)
			}
		}
		if err := query("SELECT count(*) FROM spool.sessions"); err != nil {
			p.t.Errorf("%s: %v", name, err)
		}
	}
	if tried != 4 {
		p.t.Errorf("%d services have a database URL, want gateway, projector, janitor and provision", tried)
	}
}
