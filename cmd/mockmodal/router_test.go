package main_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	modal "github.com/modal-labs/modal-client/go"
	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// rawTask is a command router's own client, for one task.
type rawTask struct {
	pb.TaskCommandRouterClient
	id  string
	ctx context.Context
	t   *testing.T
}

// task returns the command router's client for a sandbox.
func (r *raw) task(t *testing.T, sb *modal.Sandbox) *rawTask {
	t.Helper()
	found, err := r.control.SandboxGetTaskIdV2(r.ctx, pb.SandboxGetTaskIdRequest_builder{SandboxId: sb.SandboxID}.Build())
	if err != nil {
		t.Fatal(err)
	}
	access, err := r.control.SandboxGetCommandRouterAccess(r.ctx, pb.SandboxGetCommandRouterAccessRequest_builder{SandboxId: &sb.SandboxID}.Build())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(access.GetUrl(), "https://") {
		t.Errorf("the router's URL is %s", access.GetUrl())
	}
	return &rawTask{pb.NewTaskCommandRouterClient(r.conn), found.GetTaskId(), metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+access.GetJwt()), t}
}

func (r *rawTask) start(exec string, command ...string) error {
	_, err := r.TaskExecStart(r.ctx, pb.TaskExecStartRequest_builder{
		TaskId: r.id, ExecId: exec, CommandArgs: command,
		StdoutConfig: pb.TaskExecStdoutConfig_TASK_EXEC_STDOUT_CONFIG_PIPE, StderrConfig: pb.TaskExecStderrConfig_TASK_EXEC_STDERR_CONFIG_PIPE,
	}.Build())
	return err
}

func (r *rawTask) write(exec string, offset uint64, data string, eof bool) error {
	_, err := r.TaskExecStdinWrite(r.ctx, pb.TaskExecStdinWriteRequest_builder{TaskId: r.id, ExecId: exec, Offset: offset, Data: []byte(data), Eof: eof}.Build())
	return err
}

// output reads all of an exec's output from an offset on.
func (r *rawTask) output(exec string, offset uint64) string {
	r.t.Helper()
	stream, err := r.TaskExecStdioRead(r.ctx, pb.TaskExecStdioReadRequest_builder{TaskId: r.id, ExecId: exec, Offset: offset}.Build())
	if err != nil {
		r.t.Fatal(err)
	}
	var all strings.Builder
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all.String()
		}
		if err != nil {
			r.t.Fatal(err)
		}
		all.Write(message.GetData())
	}
}

func (r *rawTask) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func TestRouter_RepeatedCallsChangeNothing(t *testing.T) {
	b := newBed(t)
	sb := b.create(nil)
	task := newRaw(t, b).task(t, sb)
	script := []string{"sh", "-c", "echo started >> /tmp/starts; cat"}
	task.must(task.start("one", script...))
	task.must(task.start("one", script...))
	task.must(task.write("one", 0, "hello ", false))
	task.must(task.write("one", 0, "hello ", false))
	task.must(task.write("one", 3, "lo world", false)) // overlaps what was accepted
	if err := task.write("one", 15, "x", false); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a gap in the input: %v", err)
	}
	task.must(task.write("one", 11, "\n", true))
	task.must(task.write("one", 11, "\n", true))
	if got := task.output("one", 0); got != "hello world\n" {
		t.Errorf("printed %q", got)
	}
	if got := task.output("one", 6); got != "world\n" {
		t.Errorf("from offset 6 it printed %q", got)
	}
	b.expect(sb, "cat /tmp/starts", "started")
	if err := task.write("one", 12, "late", false); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("input after its end: %v", err)
	}
	b.noViolations()
}

func TestRouter_StdinStreamResumes(t *testing.T) {
	b := newBed(t)
	task := newRaw(t, b).task(t, b.create(nil))
	task.must(task.start("one", "cat"))
	open := func(offset uint64) interface {
		Send(*pb.TaskExecStdinWriteStreamRequest) error
		CloseAndRecv() (*pb.TaskExecStdinWriteStreamResponse, error)
	} {
		t.Helper()
		stream, err := task.TaskExecStdinWriteStream(task.ctx)
		task.must(err)
		start := pb.TaskExecStdinWriteStreamStart_builder{TaskId: task.id, ExecId: "one", Offset: offset}.Build()
		task.must(stream.Send(pb.TaskExecStdinWriteStreamRequest_builder{Start: start}.Build()))
		return stream
	}
	accepted := func() (uint64, bool) {
		t.Helper()
		state, err := task.TaskExecStdinStatus(task.ctx, pb.TaskExecStdinStatusRequest_builder{TaskId: task.id, ExecId: "one"}.Build())
		task.must(err)
		return state.GetNumBytesWritten(), state.GetClosed()
	}
	first := open(0)
	task.must(first.Send(pb.TaskExecStdinWriteStreamRequest_builder{Data: []byte("abc")}.Build()))
	_, err := first.CloseAndRecv() // without the end
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("a stream without its end: %v", err)
	}
	if n, closed := accepted(); n != 3 || closed {
		t.Fatalf("accepted %d, closed %t", n, closed)
	}
	second := open(3)
	task.must(second.Send(pb.TaskExecStdinWriteStreamRequest_builder{Data: []byte("def")}.Build()))
	task.must(second.Send(pb.TaskExecStdinWriteStreamRequest_builder{End: &pb.TaskExecStdinWriteStreamEnd{}}.Build()))
	_, err = second.CloseAndRecv()
	task.must(err)
	if got := task.output("one", 0); got != "abcdef" {
		t.Errorf("printed %q", got)
	}
	if n, closed := accepted(); n != 6 || !closed {
		t.Errorf("accepted %d, closed %t", n, closed)
	}
}

func TestRouter_InputOfABusyProcessBlocks(t *testing.T) {
	b := newBed(t)
	task := newRaw(t, b).task(t, b.create(nil))
	task.must(task.start("one", "sh", "-c", "until test -e /tmp/go; do sleep 0.01; done; wc -c"))
	big := strings.Repeat("x", 4<<20)
	written := make(chan error, 1)
	go func() { written <- task.write("one", 0, big, true) }()
	task.must(task.start("two", "touch", "/tmp/go")) // other calls do not wait for it
	task.must(<-written)
	if got := strings.TrimSpace(task.output("one", 0)); got != "4194304" {
		t.Errorf("it read %s bytes", got)
	}
}

func TestRouter_TokenIsForOneTask(t *testing.T) {
	b := newBed(t)
	r := newRaw(t, b)
	mine, other := r.task(t, b.create(nil)), r.task(t, b.create(nil))
	mine.id = other.id
	if err := mine.start("one", "true"); status.Code(err) != codes.PermissionDenied {
		t.Errorf("the token of another task: %v", err)
	}
	other.ctx = metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer a.b.c")
	if err := other.start("one", "true"); status.Code(err) != codes.Unauthenticated {
		t.Errorf("a forged token: %v", err)
	}
}

func TestRouter_ExecTimeoutKillsTheProcess(t *testing.T) {
	b := newBed(t)
	task := newRaw(t, b).task(t, b.create(nil))
	timeout := uint32(1)
	_, err := task.TaskExecStart(task.ctx, pb.TaskExecStartRequest_builder{
		TaskId: task.id, ExecId: "one", CommandArgs: []string{"sh", "-c", "sleep 600; true"}, TimeoutSecs: &timeout,
	}.Build())
	task.must(err)
	end, err := task.TaskExecWait(task.ctx, pb.TaskExecWaitRequest_builder{TaskId: task.id, ExecId: "one"}.Build())
	if err != nil || end.GetSignal() != 9 {
		t.Errorf("ended with %v, %v", end, err)
	}
}

func TestRouter_RefusesWhatIsIncomplete(t *testing.T) {
	b := newBed(t)
	task := newRaw(t, b).task(t, b.create(nil))
	for name, err := range map[string]error{
		"no exec id":     task.start("", "true"),
		"no command":     task.start("one"),
		"exec of no one": task.write("nobody", 0, "x", false),
		"missing directory": func() error {
			_, err := task.TaskUnmountDirectory(task.ctx, pb.TaskUnmountDirectoryRequest_builder{TaskId: task.id, Path: []byte("relative")}.Build())
			return err
		}(),
	} {
		if code := status.Code(err); code != codes.InvalidArgument && code != codes.NotFound {
			t.Errorf("%s: %v", name, err)
		}
	}
	task.must(task.start("missing", "no-such-command"))
	end, err := task.TaskExecWait(task.ctx, pb.TaskExecWaitRequest_builder{TaskId: task.id, ExecId: "missing"}.Build())
	if err != nil || end.GetCode() != 127 {
		t.Errorf("a command that does not exist ended with %v, %v", end, err)
	}
}
