package builtin

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin/tool"
	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
)

// newSession returns a session in a turn with the permission policy of the query.
func newSession(t testing.TB, q runner.Query) (*session, *agenttest.Stdin, *agenttest.Journal, *agent.Turn) {
	t.Helper()
	policy, err := permission.New(q.Permissions, q.ExecutionPermissions)
	if err != nil {
		t.Fatal(err)
	}
	var stdin agenttest.Stdin
	var journal agenttest.Journal
	turn := agent.NewTurn(t.Context(), agent.TurnConfig{Journal: &journal, ExecutionID: "exe_1", Now: agenttest.FixedTime, Policy: policy})
	s := Adapter{}.OpenSession(agent.Launch{}, &stdin).(*session)
	if err := s.BeginTurn(q, turn); err != nil {
		t.Fatal(err)
	}
	return s, &stdin, &journal, turn
}

// replies returns the replies to permission requests that a session sent.
func replies(t testing.TB, stdin *agenttest.Stdin) (list []permissionReply) {
	t.Helper()
	for _, raw := range stdin.SentValues() {
		var o processOrder
		if err := json.Unmarshal(raw, &o); err != nil {
			t.Fatal(err)
		}
		if o.Op == "permission" {
			list = append(list, *o.Permission)
		}
	}
	return list
}

func TestPermit_WithoutPolicy_UsesTheRulesOfTheWorkspace(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		request  permissionRequest
		decision events.PermissionDecided
	}{
		"a file":        {permissionRequest{Tool: "read_file", HasPaths: true}, events.PermissionDecided{Decision: "allow", Rule: "workspace.inside"}},
		"a program":     {permissionRequest{Tool: "run_code"}, events.PermissionDecided{Decision: "allow", Rule: "workspace.sandboxed"}},
		"a server":      {permissionRequest{Tool: "mcp__a__b"}, events.PermissionDecided{Decision: "allow", Rule: "mcp.server"}},
		"a file beyond": {permissionRequest{Tool: "read_file", HasPaths: true, Outside: "../x"}, events.PermissionDecided{Decision: "deny", Rule: "workspace.outside", Reason: "../x is outside the workspace"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, stdin, journal, turn := newSession(t, runner.Query{ExecutionPermissions: events.ExecutionPermissions{Unattended: true}})
			tc.request.ID, tc.request.ToolUseID = "p1.1", "call_1"
			if err := s.decidePermission(tc.request, turn); err != nil {
				t.Fatal(err)
			}
			tc.decision.ToolName, tc.decision.ToolUseID = tc.request.Tool, "call_1"
			lines := journal.Lines()
			var got events.PermissionDecided
			if err := json.Unmarshal(lines[0].Data, &got); err != nil || len(lines) != 1 || !reflect.DeepEqual(got, tc.decision) {
				t.Errorf("journal %+v, %v", lines, err)
			}
			want := permissionReply{ID: "p1.1", Allowed: tc.decision.Decision == "allow", Message: tc.decision.Reason}
			if r := replies(t, stdin); len(r) != 1 || r[0].ID != want.ID || r[0].Allowed != want.Allowed || r[0].Message != want.Message || r[0].Waiting {
				t.Errorf("replies %+v, want %+v", r, want)
			}
		})
	}
}

func TestPermit_WaitsForAPerson(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		end  func(*agent.Turn, runner.ApprovalDecision)
		want permissionReply
	}{
		"approved": {func(t *agent.Turn, v runner.ApprovalDecision) {
			v.Decision, v.Arguments = events.DecisionApprove, json.RawMessage(`{"path":"b"}`)
			t.ApplyVerdict(v)
		}, permissionReply{ID: "p1.1", Allowed: true, Arguments: json.RawMessage(`{"path":"b"}`)}},
		"rejected": {func(t *agent.Turn, v runner.ApprovalDecision) {
			v.Decision, v.Comment = events.DecisionReject, "no"
			t.ApplyVerdict(v)
		}, permissionReply{ID: "p1.1", Message: "The user rejected this call: no"}},
		"timed out": {func(t *agent.Turn, v runner.ApprovalDecision) {
			v.Timeout = true
			t.ApplyVerdict(v)
		}, permissionReply{ID: "p1.1", Message: "Nobody decided about this call in time, so that it was denied. Go on without it."}},
		"retracted":   {func(t *agent.Turn, _ runner.ApprovalDecision) { t.RetractRequests("turn_ended") }, permissionReply{ID: "p1.1", Message: "The turn ended before anybody decided."}},
		"end of turn": {func(t *agent.Turn, _ runner.ApprovalDecision) { t.End(runner.TurnEnd{Outcome: runner.OutcomeKilled}) }, permissionReply{ID: "p1.1", Message: "The turn ended before anybody decided."}},
		"not encodable": {func(t *agent.Turn, v runner.ApprovalDecision) {
			v.Decision, v.Arguments = events.DecisionApprove, json.RawMessage(`{`)
			t.ApplyVerdict(v)
		}, permissionReply{ID: "p1.1", Message: "the decision cannot be sent to the agent: "}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, stdin, journal, turn := newSession(t, runner.Query{Permissions: events.Permissions{Default: events.PermissionAsk}})
			line := `{"op":"permission","permission":{"id":"p1.1","tool":"write_file","kind":"edit","paths":["a"],"title":"two\nlines","arguments":{"path":"a"}}}`
			if err := s.HandleLine([]byte(line), turn); err != nil {
				t.Fatal(err)
			}
			if r := replies(t, stdin); len(r) != 1 || !r[0].Waiting || r[0].Allowed || r[0].ID != "p1.1" {
				t.Fatalf("replies %+v", r)
			}
			var requested events.ApprovalRequested
			if err := json.Unmarshal(journal.Lines()[0].Data, &requested); err != nil || requested.Title != "two lines" || string(requested.Input) != `{"path":"a"}` {
				t.Errorf("request %+v, %v", requested, err)
			}
			var v runner.ApprovalDecision
			v.ApprovalID = runner.ApprovalID("exe_1", journal.Name(), requested.ApprovalID)
			tc.end(turn, v)
			r := replies(t, stdin)
			if len(r) != 2 || r[1].Waiting || r[1].Allowed != tc.want.Allowed || !strings.HasPrefix(r[1].Message, tc.want.Message) || !bytes.Equal(r[1].Arguments, tc.want.Arguments) {
				t.Errorf("replies %+v, want %+v", r, tc.want)
			}
		})
	}
}

// The process may not report a decision itself.
func TestLine_RefusesDecisionsOfTheProcess(t *testing.T) {
	t.Parallel()
	s, _, journal, turn := newSession(t, runner.Query{})
	for _, line := range []string{`{"op":"permission"}`, `{"op":"event","type":"permission_decided","data":{"toolName":"x","decision":"allow"}}`} {
		if err := s.HandleLine([]byte(line), turn); err == nil {
			t.Errorf("%s is accepted", line)
		}
	}
	if lines := journal.Lines(); len(lines) != 0 {
		t.Errorf("journal %+v", lines)
	}
}

func TestPermits_NextReturnsRepliesInOrderUntilTheContextEnds(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(t.Context())
	p := newPermissionQueue(newReportWriter(&bytes.Buffer{}), 3)
	if one, two := p.sendRequest(permissionRequest{}), p.sendRequest(permissionRequest{}); one != "p3.1" || two != "p3.2" {
		t.Errorf("ids %q, %q", one, two)
	}
	p.addReply(permissionReply{ID: "a"})
	p.addReply(permissionReply{ID: "b"})
	for _, want := range []string{"a", "b"} {
		if r, ok := p.nextReply(ctx); !ok || r.ID != want {
			t.Errorf("reply %+v, %v, want %s", r, ok, want)
		}
	}
	p.addReply(permissionReply{ID: "c", Allowed: true})
	cancel(errors.New("ended"))
	if r, ok := p.nextReply(ctx); ok {
		t.Errorf("reply %+v after the end", r)
	}
}

func TestPolicyPaths_FollowLinks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, err := range []error{
		os.Mkdir(filepath.Join(dir, "secret"), 0o700), os.WriteFile(filepath.Join(dir, "secret", "key"), nil, 0o600),
		os.Symlink("secret", filepath.Join(dir, "folder")), os.Symlink("secret/key", filepath.Join(dir, "file")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	w, err := workspace.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close() //nolint:errcheck // nothing was written
	for path, want := range map[string][]string{
		"secret/key": {"secret/key"}, "/mnt/workspace/secret/key": {"secret/key"}, filepath.Join(dir, "secret/../secret/key"): {"secret/key"},
		"folder/key": {"secret/key"}, "folder/new/file": {"secret/new/file"}, "file": {"file", "secret/key"}, "folder": {"folder", "secret"},
		"": {"."}, ".": {"."}, "new": {"new"}, "new/file": {"new/file"},
	} {
		if got := policyPaths(w, path); !slices.Equal(got, want) {
			t.Errorf("%q has the paths %q, want %q", path, got, want)
		}
	}
}

// BenchmarkPermission measures the cost of the permission of one call over the pipes of a process: the request, the decision
// of the policy, its line in the journal, and the reply.
func BenchmarkPermission(b *testing.B) {
	for name, q := range map[string]runner.Query{
		"no policy": {},
		"policy":    {Permissions: events.Permissions{Preset: events.PresetWorkspace}},
	} {
		b.Run(name, func(b *testing.B) {
			orders, in, err := os.Pipe()
			if err != nil {
				b.Fatal(err)
			}
			reports, out, err := os.Pipe()
			if err != nil {
				b.Fatal(err)
			}
			s := &session{in: fileStdin{json.NewEncoder(in)}, plain: isWithoutPolicy(q)}
			_, _, _, on := newSession(b, q)
			var wg sync.WaitGroup
			wg.Go(func() { // the supervisor
				for lines := bufio.NewScanner(reports); lines.Scan(); {
					if err := s.HandleLine(lines.Bytes(), on); err != nil {
						b.Error(err)
					}
				}
			})
			p := newPermissionQueue(newReportWriter(out), 1)
			replies := make(chan processOrder)
			wg.Go(func() { // the process's stdin
				if err := readOrders(b.Context(), orders, replies); err != nil {
					b.Error(err)
				}
				close(replies)
			})
			wg.Go(func() {
				for o := range replies {
					p.addReply(*o.Permission)
				}
			})
			w, err := workspace.Open(b.TempDir())
			if err != nil {
				b.Fatal(err)
			}
			files := tool.FileTools(w)
			process := &turn{Loop: &Loop{Workspace: w}, query: q}
			arguments := json.RawMessage(`{"path":"a.txt"}`)
			for b.Loop() {
				id := p.sendRequest(process.permissionRequest(files[0], arguments, []string{"a.txt"}))
				if r, ok := p.nextReply(b.Context()); !ok || r.ID != id || !r.Allowed {
					b.Fatalf("reply %+v, %v", r, ok)
				}
			}
			for _, c := range []io.Closer{out, in, w} {
				if err := c.Close(); err != nil {
					b.Error(err)
				}
			}
			wg.Wait()
		})
	}
}

// fileStdin is the stdin of a process.
type fileStdin struct{ enc *json.Encoder }

func (f fileStdin) Send(v any) error { return f.enc.Encode(v) }
