package main_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"testing"
	"time"

	modal "github.com/modal-labs/modal-client/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestSandbox_TagsFilterTheList(t *testing.T) {
	b := newBed(t)
	image := b.client.Images.FromRegistry(testImage, nil)
	mine := map[string]bool{}
	for n := range 12 { // more than one page
		sb := b.createFrom(image, &modal.SandboxCreateParams{BlockNetwork: true, Name: fmt.Sprintf("sbx_%d", n), Tags: map[string]string{"engine": "a", "n": fmt.Sprint(n)}})
		mine[sb.SandboxID] = true
	}
	other := b.createFrom(image, &modal.SandboxCreateParams{BlockNetwork: true, Tags: map[string]string{"engine": "b"}})
	listed := func(tags map[string]string) map[string]bool {
		found := map[string]bool{}
		all, err := b.client.Sandboxes.List(b.ctx, &modal.SandboxListParams{AppID: b.app.AppID, Tags: tags})
		if err != nil {
			t.Fatal(err)
		}
		for sb, err := range all {
			if err != nil {
				t.Fatal(err)
			}
			found[sb.SandboxID] = true
		}
		return found
	}
	if got := listed(map[string]string{"engine": "a"}); fmt.Sprint(got) != fmt.Sprint(mine) {
		t.Errorf("listed %v, want %v", got, mine)
	}
	if err := other.SetTags(b.ctx, map[string]string{"engine": "a", "n": "x"}, nil); err != nil {
		t.Fatal(err)
	}
	tags, err := other.GetTags(b.ctx, nil)
	if err != nil || tags["engine"] != "a" || tags["n"] != "x" || len(tags) != 2 {
		t.Errorf("tags are %v, %v", tags, err)
	}
	if got := listed(map[string]string{"engine": "a", "n": "x"}); len(got) != 1 || !got[other.SandboxID] {
		t.Errorf("listed %v, want only %s", got, other.SandboxID)
	}
	if got := listed(map[string]string{"engine": "b"}); len(got) != 0 {
		t.Errorf("the replaced tags still find %v", got)
	}
	b.noViolations()
}

func TestSandbox_NameIsTakenWhileItRuns(t *testing.T) {
	b := newBed(t)
	params := &modal.SandboxCreateParams{BlockNetwork: true, Name: "sbx_one"}
	first := b.create(params)
	_, err := b.client.Sandboxes.Create(b.ctx, b.app, b.client.Images.FromRegistry(testImage, nil), params)
	var exists modal.AlreadyExistsError
	if !errors.As(err, &exists) {
		t.Fatalf("a second sandbox of the name: %v", err)
	}
	found, err := b.client.Sandboxes.FromName(b.ctx, "spool", "sbx_one", nil)
	if err != nil || found.SandboxID != first.SandboxID {
		t.Fatalf("found %v, %v", found, err)
	}
	b.expect(found, "echo found", "found")
	if code, err := first.Terminate(b.ctx, &modal.SandboxTerminateParams{Wait: true}); err != nil || code != 137 {
		t.Fatalf("terminate: %d, %v", code, err)
	}
	_, err = b.client.Sandboxes.FromName(b.ctx, "spool", "sbx_one", nil)
	var missing modal.NotFoundError
	if !errors.As(err, &missing) {
		t.Errorf("the name of a terminated sandbox: %v", err)
	}
	if second := b.create(params); second.SandboxID == first.SandboxID {
		t.Error("the name was not free")
	}
}

func TestSandbox_EndedOneRefusesExecsAndKeepsOutput(t *testing.T) {
	b := newBed(t)
	sb := b.create(nil)
	p, err := sb.Exec(b.ctx, []string{"sh", "-c", "echo before; exec sleep 600"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(p.Stdout, make([]byte, 7)); err != nil {
		t.Fatal(err)
	}
	if _, err := sb.Terminate(b.ctx, &modal.SandboxTerminateParams{Wait: true}); err != nil {
		t.Fatal(err)
	}
	if code, err := p.Wait(b.ctx, nil); err != nil || code != 137 {
		t.Errorf("the exec ended with %d, %v", code, err)
	}
	_, err = sb.Exec(b.ctx, []string{"true"}, nil)
	if status.Code(err) != codes.NotFound {
		t.Errorf("an exec in an ended sandbox: %v", err)
	}
	if code, err := sb.Poll(b.ctx, nil); err != nil || code == nil || *code != 137 {
		t.Errorf("poll: %v, %v", code, err)
	}
	if containers := containersOf(t, b.data); containers != "" {
		t.Errorf("containers are left: %s", containers)
	}
}

func TestSandbox_TimeoutEndsIt(t *testing.T) {
	b := newBed(t)
	sb := b.create(&modal.SandboxCreateParams{BlockNetwork: true, Timeout: 2 * time.Second})
	if code, err := sb.Wait(b.ctx, nil); err != nil || code != 124 {
		t.Fatalf("a sandbox that timed out ended with %d, %v", code, err)
	}
	b.wantResult(sb, "GENERIC_STATUS_TIMEOUT")
}

func TestSandbox_EntrypointEndsIt(t *testing.T) {
	b := newBed(t)
	sb := b.create(&modal.SandboxCreateParams{BlockNetwork: true, Command: []string{"sh", "-c", "read line; echo got $line; exit 3"}})
	if _, err := io.WriteString(sb.Stdin, "hello\n"); err != nil {
		t.Fatal(err)
	}
	if out, err := io.ReadAll(sb.Stdout); err != nil || string(out) != "got hello\n" {
		t.Errorf("printed %q, %v", out, err)
	}
	if code, err := sb.Wait(b.ctx, nil); err != nil || code != 3 {
		t.Errorf("ended with %d, %v", code, err)
	}
}

func TestSandbox_PreemptedOneIsGoneForItsClients(t *testing.T) {
	b := newBed(t)
	sb := b.create(&modal.SandboxCreateParams{BlockNetwork: true, Name: "sbx_p"})
	p, err := sb.Exec(b.ctx, []string{"sleep", "600"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	b.post(t, "/sandboxes/sbx_p/end", object{"how": "preempted"})
	if code, err := sb.Wait(b.ctx, nil); err != nil || code != 137 {
		t.Errorf("ended with %d, %v", code, err)
	}
	b.wantResult(sb, "GENERIC_STATUS_INTERNAL_FAILURE")
	short, cancel := context.WithTimeout(b.ctx, 2*time.Second)
	defer cancel()
	if code, err := p.Wait(short, nil); err == nil {
		t.Errorf("an exec whose worker is gone ended with %d", code)
	}
}

func TestSandbox_ControlAPIEndsIt(t *testing.T) {
	b := newBed(t)
	for how, want := range map[string]struct {
		code   int
		result string
	}{"timeout": {124, "GENERIC_STATUS_TIMEOUT"}, "oom": {137, "GENERIC_STATUS_FAILURE"}} {
		sb := b.create(nil)
		b.post(t, "/sandboxes/"+sb.SandboxID+"/end", object{"how": how})
		if code, err := sb.Wait(b.ctx, nil); err != nil || code != want.code {
			t.Errorf("after %s it ended with %d, %v", how, code, err)
		}
		b.wantResult(sb, want.result)
	}
}

func TestSandbox_OfTheFirstBackend(t *testing.T) {
	t.Setenv("MODAL_SANDBOX_V2", "0")
	b := newBed(t)
	sb := b.create(&modal.SandboxCreateParams{BlockNetwork: true, Name: "sbx_one", Env: map[string]string{"COLOUR": "blue"}, Tags: map[string]string{"a": "b"}})
	b.expect(sb, "echo $COLOUR", "blue")
	found, err := b.client.Sandboxes.FromName(b.ctx, "spool", "sbx_one", nil)
	if err != nil || found.SandboxID != sb.SandboxID {
		t.Fatalf("found %v, %v", found, err)
	}
	listed, err := b.client.Sandboxes.List(b.ctx, &modal.SandboxListParams{AppID: b.app.AppID, Tags: map[string]string{"a": "b"}})
	if err != nil {
		t.Fatal(err)
	}
	for each, err := range listed {
		if err != nil || each.SandboxID != sb.SandboxID {
			t.Errorf("listed %v, %v", each, err)
		}
	}
	if code, err := sb.Terminate(b.ctx, &modal.SandboxTerminateParams{Wait: true}); err != nil || code != 137 {
		t.Errorf("terminate: %d, %v", code, err)
	}
	if n := b.calls(t)["SandboxCreate"]; n != 1 {
		t.Errorf("the SDK made %d calls of SandboxCreate", n)
	}
	b.noViolations()
}

func TestSandbox_LostContainerEndsIt(t *testing.T) {
	b := newBed(t)
	sb := b.create(nil)
	if out, err := exec.Command("docker", "kill", containersOf(t, b.data)).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if code, err := sb.Wait(b.ctx, nil); err != nil || code != 137 {
		t.Errorf("ended with %d, %v", code, err)
	}
	b.wantResult(sb, "GENERIC_STATUS_INTERNAL_FAILURE")
}

// wantResult fails the test unless the control API shows that a sandbox ended so.
func (b *bed) wantResult(sb *modal.Sandbox, want string) {
	b.t.Helper()
	var list []struct{ ID, State, Result string }
	b.get(b.t, "/sandboxes", &list)
	for _, item := range list {
		if item.ID == sb.SandboxID {
			if item.State != "ended" || item.Result != want {
				b.t.Errorf("the sandbox is %s with %s, want %s", item.State, item.Result, want)
			}
			return
		}
	}
	b.t.Errorf("%s is not listed: %v", sb.SandboxID, list)
}

// containersOf lists the engine's containers of a server.
func containersOf(t *testing.T, data string) string {
	t.Helper()
	out, err := exec.Command("docker", "ps", "--all", "--quiet", "--filter", "label=dev.spool.mockmodal="+data).Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}
