package pgserver_test

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
)

// repository serves one release like a Maven repository. testdata/release.txz holds scripts that run the binaries of
// the machine.
func repository(t *testing.T, downloads *atomic.Int32) string {
	t.Helper()
	release, err := os.ReadFile("testdata/release.txz")
	if err != nil {
		t.Fatal(err)
	}
	var jar bytes.Buffer
	z := zip.NewWriter(&jar)
	w, err := z.Create("postgres-linux-x86_64.txz")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(release); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(jar.Bytes())
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := jar.Bytes()
		if strings.HasSuffix(r.URL.Path, ".sha256") {
			body = []byte(hex.EncodeToString(sum[:]))
		} else {
			downloads.Add(1)
		}
		if _, err := w.Write(body); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(srv.Close)
	return srv.URL
}

func TestStart_FetchesABinaryOnce(t *testing.T) {
	t.Parallel()
	pgtest.NewDatabase(t) // skips or fails the test if the machine has no Postgres for the scripts to run
	// The folder is not t.TempDir, because another user must be able to execute the binaries when root runs the
	// tests.
	fetchDir, err := os.MkdirTemp("", "spool-fetch-") //nolint:usetesting // another user must reach the folder
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(fetchDir) })
	if err := os.Chmod(fetchDir, 0o755); err != nil {
		t.Fatal(err)
	}
	var downloads atomic.Int32
	cfg := pgserver.Config{DataDir: t.TempDir(), Fast: true, FetchURL: repository(t, &downloads)}
	cfg = cfg.OnBareMachine(filepath.Join(fetchDir, "postgres"))
	for range 2 {
		srv := pgtest.StartServer(t, cfg)
		if err := exec(t, srv.URL(), "SELECT 1"); err != nil {
			t.Fatal(err)
		}
		if err := srv.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	if n := downloads.Load(); n != 1 {
		t.Errorf("downloaded %d times", n)
	}
}
