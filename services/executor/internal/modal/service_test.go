//go:build modalservice

package modal

import (
	"cmp"
	"crypto/rand"
	"os"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/sandbox/sandboxtest"
)

// TestModalItself runs the suite against the real service; see scripts/test-modal.
func TestModalItself(t *testing.T) {
	bin, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	name := "spool-test-" + strings.ToLower(rand.Text()[:12])
	cfg := Config{
		TokenID: os.Getenv("SPOOL_MODAL_TOKEN_ID"), TokenSecret: os.Getenv("SPOOL_MODAL_TOKEN_SECRET"), Environment: os.Getenv("SPOOL_MODAL_ENVIRONMENT"),
		Region: os.Getenv("SPOOL_MODAL_REGION"), Image: cmp.Or(os.Getenv("SPOOL_MODAL_IMAGE"), testImage),
		App: name, Engine: name, Runner: bin["runner"], Timeout: minTimeout, Limits: sandbox.Limits{MemoryBytes: 512 << 20, CPUs: 0.5, DiskBytes: 1 << 30},
	}
	killer := provide(t, cfg)
	sandboxtest.Exercise(t, sandboxtest.TestedProvider{
		Engine: name,
		New:    func(t testing.TB) sandbox.Provider { return provide(t, cfg) },
		KillRunner: func(t testing.TB, id string) {
			h, err := killer.findSandbox(t.Context(), id)
			if err == nil {
				err = killer.endSandbox(t.Context(), h.sdkSandbox())
			}
			if err != nil {
				t.Fatal(err)
			}
		},
		EndsWithRunner: true,
	})
}
