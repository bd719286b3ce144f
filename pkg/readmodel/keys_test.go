package readmodel_test

import (
	"testing"

	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/readmodel/readmodeltest"
)

// TestAcceptedKey_LooksAtAllMakers tests that a key is accepted until it, or a key that it descends from, is revoked,
// expired or missing, according to the clock of Postgres.
func TestAcceptedKey_LooksAtAllMakers(t *testing.T) {
	t.Parallel()
	db := readmodeltest.NewDatabase(t)
	if err := readmodel.Migrate(t.Context(), db.Projector); err != nil {
		t.Fatal(err)
	}
	runStatement(t, db.Projector, `INSERT INTO keys (tenant, id, grp, name, prefix, sha256, created_at, revoked_at, expires_at, created_by) VALUES
		('t', 'top',      0, '', '', 'top',      now(), NULL,  NULL,                       ''),
		('t', 'middle',   1, '', '', 'middle',   now(), NULL,  now() + interval '1 hour',  'top'),
		('t', 'bottom',   2, '', '', 'bottom',   now(), NULL,  now() + interval '1 hour',  'middle'),
		('t', 'revoked',  0, '', '', 'revoked',  now(), now(), NULL,                       ''),
		('t', 'child',    1, '', '', 'child',    now(), NULL,  NULL,                       'revoked'),
		('t', 'grand',    1, '', '', 'grand',    now(), NULL,  NULL,                       'child'),
		('t', 'expired',  1, '', '', 'expired',  now(), NULL,  now() - interval '1 s',     ''),
		('t', 'orphan',   1, '', '', 'orphan',   now(), NULL,  NULL,                       'expired'),
		('t', 'lost',     1, '', '', 'lost',     now(), NULL,  NULL,                       'missing'),
		('t', 'self',     1, '', '', 'self',     now(), NULL,  NULL,                       'self'),
		('u', 'foreign',  1, '', '', 'foreign',  now(), NULL,  NULL,                       'top')`, "")
	conn, err := readmodel.Connect(t.Context(), db.Gateway, readmodel.Schema)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	for key, want := range map[string]string{
		"top": "", "middle": "", "bottom": "", "revoked": "revoked", "child": "revoked", "grand": "revoked", "expired": "expired", "orphan": "expired",
		"lost": "revoked", "self": "revoked", "nobody": "revoked",
	} {
		var got string
		var accepted bool
		if err := conn.QueryRow(t.Context(), "SELECT key_refusal('t', $1), EXISTS (SELECT FROM accepted_key($1))", key).Scan(&got, &accepted); err != nil {
			t.Fatal(err)
		}
		if got != want || accepted != (want == "") {
			t.Errorf("%s: refusal %q, accepted %v; want %q", key, got, accepted, want)
		}
	}
	var got string
	if err := conn.QueryRow(t.Context(), "SELECT key_refusal('u', 'foreign')").Scan(&got); err != nil || got != "revoked" {
		t.Errorf("a maker of another tenant: %q, %v", got, err)
	}
}
