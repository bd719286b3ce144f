package workspace_test

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
)

// TestOpen_ReadsEveryVersion tests that snapshots of every version stay readable: the objects in testdata/golden were
// written when the version was new, and must not be written again.
func TestOpen_ReadsEveryVersion(t *testing.T) {
	t.Parallel()
	want := map[string]string{"workspace/a": "content of a", "workspace/dir/b": "", "workspace/dir/\xff": "raw", "state/log": "record"}
	for _, version := range []string{"version1", "version2"} {
		store, id := &workspacetest.MemoryStore{}, ""
		dir := filepath.Join("testdata", "golden", version)
		objects, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range objects {
			content, err := os.ReadFile(filepath.Join(dir, o.Name()))
			if err != nil {
				t.Fatal(err)
			}
			store.SetObject(workspace.ManifestName(tenant, session, o.Name()), content)
			if strings.HasPrefix(o.Name(), "m-") {
				id = o.Name()
			}
		}
		box := &workspacetest.FakeSandbox{}
		if _, err := workspace.Restore(t.Context(), box, store, tenant, session, id); err != nil || !maps.Equal(box.Tree, want) {
			t.Errorf("%s: restored %q: %v", version, box.Tree, err)
		}
		packs, err := workspace.PackNames(t.Context(), store, tenant, session, id)
		if err != nil || len(packs) != len(objects)-1 {
			t.Errorf("%s: packs %q: %v", version, packs, err)
		}
		// The next snapshot stores nothing of it again.
		r, err := workspace.Snapshot(t.Context(), (&editor{tree: want}).box(), store, workspace.Options{Tenant: tenant, Session: session, Previous: id})
		if err != nil || r.NewBytes != 0 || r.Lost != nil {
			t.Errorf("%s: the next snapshot: %+v %v", version, r, err)
		}
	}
}
