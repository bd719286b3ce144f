package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/landlock"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// selfApproval is an attempt of a local agent to approve a call that a user has to decide, with curl and cat alone. It
// sends the decision without a key, and then with every key that it finds in the data folder and in the memory of the
// stack's process. $1 is the approval request, $2 the URL of the stack, $3 the data folder and $4 the process.
const selfApproval = `decide() { curl -s -o /dev/null -w "$1 %{http_code}\n" -X POST -H "Authorization: Bearer $2" -H 'Content-Type: application/json' -d '{"decision":"approve"}' "$url/api/approvals/$id/decide"; }
id=$1 url=$2 data=$3 pid=$4
curl -s -o /dev/null -w "list-without-key %{http_code}\n" "$url/api/approvals"
curl -s -o /dev/null -w "approve-without-key %{http_code}\n" -X POST -H 'Content-Type: application/json' -d '{"decision":"approve"}' "$url/api/approvals/$id/decide"
for f in local.key spool.json log.keys secrets.key heads.key postgres/password; do
  if cat "$data/$f" >found 2>/dev/null; then echo "read $f"; else echo "refused $f"; fi
  for k in $(grep -o 'spool_sk_[0-9A-Za-z]*' found); do decide "with-$f" "$k"; done
done
for f in environ maps root/etc/hostname; do
  if cat "/proc/$pid/$f" >found 2>/dev/null; then echo "read $f"; else echo "refused $f"; fi
done
for p in / /health /readyz /metrics /api/openapi.json; do curl -s "$url$p"; done | grep -c 'spool_s[a-z]_[0-9A-Za-z]\{32\}' | sed 's/$/ keys served/'
if ls "$HOME" >/dev/null && echo ok >"$TMPDIR/own" && cat "$TMPDIR/own" >/dev/null && cat /etc/hostname >/dev/null; then echo "rest reachable"; fi
`

// attempt lets an agent that no policy restricts run selfApproval, and returns what its commands print.
func (w *upWaiting) attempt(id string) string {
	w.t.Helper()
	file := filepath.Join(w.t.TempDir(), "free.yaml")
	definition := "kind: agent\nslug: free\nspec:\n  architecture: spool\n  model: known-model\n  modelProvider: openai\n  instructions: You run commands.\n"
	requireNoErr(w.t, os.WriteFile(file, []byte(definition), 0o600))
	if code, printed := w.u.RunCLI(nil, "agents", "apply", "-f", file); code != 0 {
		w.t.Fatalf("spool agents apply ended with %d:\n%s", code, printed)
	}
	program := filepath.Join(w.t.TempDir(), "attempt.sh")
	requireNoErr(w.t, os.WriteFile(program, []byte(selfApproval), 0o600))
	stack := w.u.Connection()
	code, out := w.u.RunCLI(nil, "run", "--agent", "free", strings.Join([]string{"run bash", program, id, stack.URL, w.u.DataDir(), stack.PID}, " "))
	if code != 0 {
		w.t.Fatalf("spool run ended with %d:\n%s", code, out)
	}
	return out
}

// requireNoErr ends the test if err is not nil.
func requireNoErr(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestApprovals_LocalAgentCannotApproveItself tests that an agent of a local sandbox cannot decide an approval request
// with curl, and cannot read the key of the stack with cat, and that the request stays open until the user decides.
func TestApprovals_LocalAgentCannotApproveItself(t *testing.T) {
	t.Parallel()
	if !landlock.Supported() {
		t.Skip("this kernel has no Landlock; TestApprovals_DoctorSaysThatALocalAgentCanApproveItself tests what is left without it")
	}
	w := newUpWaiting(t)
	w.u.RunWhileUp(w.settings, func() {
		if _, printed := w.u.RunCLI(nil, "doctor", "--security"); !strings.Contains(printed, "cannot open "+w.u.DataDir()) {
			t.Errorf("doctor prints\n%s", printed)
		}
		id := w.begin()
		out := w.attempt(id)
		wanted := []string{
			"list-without-key 401", "approve-without-key 401", "refused local.key", "refused spool.json", "refused log.keys", "refused secrets.key", "refused heads.key", "refused postgres/password",
			"refused root/etc/hostname", "0 keys served", "rest reachable",
		}
		if os.Geteuid() != 0 { // the kernel lets CAP_PERFMON read the environment of every process
			wanted = append(wanted, "refused environ", "refused maps")
		}
		for _, want := range wanted {
			if !strings.Contains(out, want) {
				t.Errorf("the agent did not print %q:\n%s", want, out)
			}
		}
		if s := w.requests(); s[id] != "pending" {
			t.Errorf("the request is %s after the agent's attempt, want pending:\n%s", s[id], out)
		}
		w.approve(id)
	})
}

// TestApprovals_DoctorSaysThatALocalAgentCanApproveItself tests that doctor reports what a local agent can do where
// Landlock is not in force, and that the report is true.
func TestApprovals_DoctorSaysThatALocalAgentCanApproveItself(t *testing.T) {
	t.Parallel()
	w := newUpWaiting(t)
	w.settings = append(w.settings, "SPOOL_LOCAL_LANDLOCK=off")
	w.u.RunWhileUp(w.settings, func() {
		if _, printed := w.u.RunCLI([]string{"SPOOL_LOCAL_LANDLOCK=off"}, "doctor", "--security"); !strings.Contains(printed, "a local agent can approve its own calls") {
			t.Errorf("doctor prints\n%s", printed)
		}
		id := w.begin()
		out := w.attempt(id)
		if !strings.Contains(out, "approve-without-key 401") || !strings.Contains(out, "with-local.key 202") {
			t.Errorf("the agent printed\n%s", out)
		}
		harness.Eventually(t, "the request is approved", func() bool { return w.requests()[id] == "approved" })
	})
}
