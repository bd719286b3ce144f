package main_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	modal "github.com/modal-labs/modal-client/go"
	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

func TestToken_WrongOneIsUnauthenticated(t *testing.T) {
	i := serve(t, "--token", "ak-1:as-1")
	_, err := i.clientWith(t, "ak-1", "as-2").Apps.FromName(t.Context(), "spool", nil)
	if status.Code(unwrapped(err)) != codes.Unauthenticated {
		t.Errorf("a wrong token: %v", err)
	}
	_, err = i.clientWith(t, "ak-1", "as-1").Apps.FromName(t.Context(), "spool", nil)
	var missing modal.NotFoundError
	if !errors.As(err, &missing) {
		t.Errorf("the right token: %v", err)
	}
}

// unwrapped returns the innermost error, which the SDK's have their status in.
func unwrapped(err error) error {
	for errors.Unwrap(err) != nil {
		err = errors.Unwrap(err)
	}
	return err
}

func TestImage_MissingOneFailsTheBuild(t *testing.T) {
	b := newBed(t)
	_, err := b.client.Sandboxes.Create(b.ctx, b.app, b.client.Images.FromRegistry("registry.test/no/such:1", nil), nil)
	var remote modal.RemoteError
	if !errors.As(err, &remote) || !strings.Contains(err.Error(), "manifest unknown") {
		t.Errorf("a missing image: %v", err)
	}
}

func TestFault_FailsSoManyCalls(t *testing.T) {
	b := newBed(t)
	image := b.client.Images.FromRegistry(testImage, nil)
	b.post(t, "/faults", object{"method": "SandboxCreateV2", "code": "RESOURCE_EXHAUSTED", "message": "quota exceeded", "count": 1})
	_, err := b.client.Sandboxes.Create(b.ctx, b.app, image, nil)
	if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "quota exceeded") {
		t.Errorf("the fault: %v", err)
	}
	before := b.calls(t)["SandboxCreateV2"]
	b.post(t, "/faults", object{"method": "SandboxCreateV2", "code": "UNAVAILABLE", "message": "try again", "count": 2})
	b.create(nil)
	if made := b.calls(t)["SandboxCreateV2"] - before; made != 3 {
		t.Errorf("the SDK made %d calls, want 3", made)
	}
}

func TestFault_AfterTheCallLosesTheAnswerAlone(t *testing.T) {
	b := newBed(t)
	b.post(t, "/faults", object{"method": "SandboxCreateV2", "code": "UNAVAILABLE", "message": "gone", "count": 1, "after": true})
	params := &modal.SandboxCreateParams{BlockNetwork: true, Name: "sbx_lost"}
	_, err := b.client.Sandboxes.Create(b.ctx, b.app, b.client.Images.FromRegistry(testImage, nil), params)
	var exists modal.AlreadyExistsError
	if !errors.As(err, &exists) {
		t.Fatalf("the repeated call: %v", err)
	}
	found, err := b.client.Sandboxes.FromName(b.ctx, "spool", "sbx_lost", nil)
	if err != nil {
		t.Fatal(err)
	}
	b.expect(found, "echo here", "here")
}

func TestOutage_EndsAndClientsRecover(t *testing.T) {
	b := newBed(t)
	sb := b.create(nil)
	p, err := sb.Exec(b.ctx, []string{"cat"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	echo := func(text string) {
		t.Helper()
		if _, err := io.WriteString(p.Stdin, text); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(text))
		if _, err := io.ReadFull(p.Stdout, got); err != nil || string(got) != text {
			t.Fatalf("%q came back, %v", got, err)
		}
	}
	echo("before")
	b.post(t, "/outage", object{"on": true})
	if conn, err := net.Dial("tcp", strings.TrimPrefix(b.URL, "http://")); err == nil {
		_ = conn.Close()
		t.Error("a connection was accepted in an outage")
	}
	if _, err := b.client.Apps.FromName(b.ctx, "spool", nil); status.Code(err) != codes.Unavailable {
		t.Errorf("a call in an outage: %v", err)
	}
	b.post(t, "/outage", object{"on": false})
	echo("after")
	b.expect(sb, "echo again", "again")
	b.noViolations()
}

func TestLatency_DelaysEveryMessageAndKeepsOrder(t *testing.T) {
	b := newBed(t)
	sb := b.create(nil)
	if _, err := sb.Poll(b.ctx, nil); err != nil {
		t.Fatal(err)
	}
	b.post(t, "/latency", object{"oneWayMs": 60})
	began := time.Now()
	if _, err := sb.Poll(b.ctx, nil); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took < 120*time.Millisecond {
		t.Errorf("a round trip took %s, less than twice the latency", took)
	}
	b.expect(sb, "seq 1 20000 | md5sum | cut -c1-8; seq 1 3", "e071f707\n1\n2\n3")
}

func TestViolation_UnknownFieldIsRefused(t *testing.T) {
	b := newBed(t)
	raw := newRaw(t, b)
	request := pb.SandboxListRequest_builder{AppId: b.app.AppID, Tags: []*pb.SandboxTag{pb.SandboxTag_builder{TagName: "a"}.Build()}}.Build()
	if _, err := raw.control.SandboxListV2(raw.ctx, request); err != nil {
		t.Fatalf("the request without the field: %v", err)
	}
	unknown := protowire.AppendVarint(protowire.AppendTag(nil, 9999, protowire.VarintType), 1)
	request.GetTags()[0].ProtoReflect().SetUnknown(unknown)
	if _, err := raw.control.SandboxListV2(raw.ctx, request); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a field that is not in the protocol: %v", err)
	}
	list := b.violations(t)
	if len(list) != 1 || list[0]["method"] != "SandboxListV2" || list[0]["what"] != "unknown field in modal.client.SandboxTag" {
		t.Errorf("violations: %v", list)
	}
}

func TestViolation_CallThatIsNotImplemented(t *testing.T) {
	b := newBed(t)
	raw := newRaw(t, b)
	if _, err := raw.control.VolumeList(raw.ctx, &pb.VolumeListRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("a call that is not implemented: %v", err)
	}
	if err := raw.conn.Invoke(raw.ctx, "/modal.client.ModalClient/SandboxMakeCoffee", &pb.VolumeListRequest{}, &pb.VolumeListResponse{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("a call that is not Modal's: %v", err)
	}
	if _, err := b.client.Sandboxes.Create(b.ctx, b.app, b.client.Images.FromRegistry(testImage, nil), &modal.SandboxCreateParams{PTY: true}); status.Code(err) != codes.Unimplemented {
		t.Errorf("a field that is not implemented: %v", err)
	}
	var methods []any
	for _, v := range b.violations(t) {
		methods = append(methods, v["method"])
	}
	if len(methods) != 3 || methods[0] != "VolumeList" || methods[1] != "SandboxMakeCoffee" || methods[2] != "SandboxCreateV2" {
		t.Errorf("violations of %v", methods)
	}
}

// raw has the services' own clients, with valid headers.
type raw struct {
	conn    *grpc.ClientConn
	control pb.ModalClientClient
	ctx     context.Context
}

func newRaw(t *testing.T, b *bed) *raw {
	t.Helper()
	conn, err := grpc.NewClient(strings.TrimPrefix(b.URL, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	r := &raw{conn: conn, control: pb.NewModalClientClient(conn)}
	r.ctx = metadata.AppendToOutgoingContext(b.ctx, "x-modal-token-id", "ak-test", "x-modal-token-secret", "as-test", "x-modal-client-type", "11", "x-modal-client-version", "1.0.0")
	token, err := r.control.AuthTokenGet(r.ctx, &pb.AuthTokenGetRequest{})
	if err != nil {
		t.Fatal(err)
	}
	r.ctx = metadata.AppendToOutgoingContext(r.ctx, "x-modal-auth-token", token.GetToken())
	return r
}

// leftOf returns what a server made on the engine and has not removed.
func leftOf(t *testing.T, data string) []string {
	t.Helper()
	filter := "label=dev.spool.mockmodal=" + data
	var all []string
	for _, command := range [][]string{
		{"ps", "--all", "--quiet", "--filter", filter}, {"network", "ls", "--quiet", "--filter", filter}, {"images", "--all", "--quiet", "--filter", filter},
	} {
		out, err := exec.Command("docker", command...).Output()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, strings.Fields(string(out))...)
	}
	return all
}

func TestServe_LeavesNothingBehind(t *testing.T) {
	data := t.TempDir()
	for _, end := range []string{"SIGTERM", "SIGKILL"} {
		i := serveIn(t, data)
		b := &bed{instance: i, client: i.client(t), ctx: t.Context(), t: t}
		app, err := b.client.Apps.FromName(b.ctx, "spool", &modal.AppFromNameParams{CreateIfMissing: true})
		if err != nil {
			t.Fatal(err)
		}
		b.app = app
		sb := b.create(nil)
		if _, err := sb.SnapshotFilesystem(b.ctx, nil); err != nil {
			t.Fatal(err)
		}
		if left := leftOf(t, data); len(left) != 3 {
			t.Fatalf("want a container, a network and an image, got %v", left)
		}
		if end == "SIGTERM" {
			i.stop()
		} else {
			_ = i.command.Process.Kill()
			_ = i.command.Wait()
			serve(t).stop() // with another data folder
		}
		if left := leftOf(t, data); len(left) > 0 {
			t.Errorf("after %s these are left: %v", end, left)
		}
	}
}

func TestServe_LeavesRunningServersAlone(t *testing.T) {
	b := newBed(t)
	sb := b.create(nil)
	serve(t).stop()
	b.expect(sb, "echo here", "here")
	second := exec.Command(program, "serve", "--data", b.data)
	if out, err := second.CombinedOutput(); err == nil || !strings.Contains(string(out), "another server uses the data folder") {
		t.Errorf("a second server with the data folder: %v, %s", err, out)
	}
	b.expect(sb, "echo here", "here")
}

func TestServe_EndsWithItsParent(t *testing.T) {
	data := t.TempDir()
	parent := exec.Command("sh", "-c", `"$0" serve --until-parent-ends --data "$1" & wait`, program, data)
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if left := leftOf(t, data); len(left) != 1 {
		t.Fatalf("want a network, got %v", left)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, out); err != nil { // ends when mockmodal has
		t.Fatal(err)
	}
	_ = parent.Wait() // it was killed
	if left := leftOf(t, data); len(left) > 0 {
		t.Errorf("these are left: %v", left)
	}
}
