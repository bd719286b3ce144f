package web

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// installModules installs what scenarios import, once for all tests of the process.
var installModules = sync.OnceValues(func() ([]byte, error) {
	return exec.Command("../../scripts/clients", "install").CombinedOutput()
})

// needBrowser skips the test where Node or Chromium is not installed. It returns the path of Chromium.
func needBrowser(t *testing.T) (chromium string) {
	t.Helper()
	for _, program := range []string{"node", "npm", "chromium"} {
		path, err := exec.LookPath(program)
		if err != nil {
			t.Skipf("%s is not on the PATH: run scripts/install", program)
		}
		chromium = path
	}
	if out, err := installModules(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return chromium
}

// runScenario runs testdata/NAME.mjs with a browser, and fails the test if the scenario fails. page is the URL of the
// page: of `spool open`, with a code, or of a gateway that needs no key. variables are further environment variables of
// the scenario.
func runScenario(t *testing.T, name, page string, variables ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "node", filepath.Join("testdata", name+".mjs"))
	cmd.Env = append(append(os.Environ(), "SPOOL_PAGE="+page, "SPOOL_CHROMIUM="+needBrowser(t)), variables...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("scenario %s: %v\n%s", name, err, out)
	}
}
