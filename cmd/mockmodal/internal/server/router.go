package server

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/spoolhq/spool/cmd/mockmodal/internal/guest"
)

// commandRouter implements the gRPC service of Modal's command router, which runs commands in sandboxes. The token of a
// call allows access to one task only.
type commandRouter struct {
	pb.UnimplementedTaskCommandRouterServer
	*Server
}

// routerExec is a process that a client has started in a sandbox under an exec id. once guards process and err.
type routerExec struct {
	once    sync.Once
	process *sandboxProcess
	err     error
}

// findTask returns the sandbox in which the task with the given id runs. It returns an error if the token of the call
// was issued for another task.
func (r *commandRouter) findTask(ctx context.Context, id string) (*modalSandbox, error) {
	if err := requireFields("task_id", id); err != nil {
		return nil, err
	}
	allowed, err := r.authorizedTask(ctx)
	if err != nil {
		return nil, err
	}
	if allowed != id {
		return nil, status.Errorf(codes.PermissionDenied, "the token is for another task than %s", id)
	}
	sb, err := r.findSandboxByTask(id)
	if err != nil {
		return nil, err
	}
	return sb, sb.workerGoneError()
}

// findProcess returns the process that a client has started under an exec id in the sandbox of a task. It also finds
// processes of a sandbox that has ended, because their output can still be read.
func (r *commandRouter) findProcess(ctx context.Context, task, exec string) (*modalSandbox, *sandboxProcess, error) {
	sb, err := r.findTask(ctx, task)
	if err != nil {
		return nil, nil, err
	}
	if err := requireFields("exec_id", exec); err != nil {
		return nil, nil, err
	}
	sb.mu.Lock()
	found := sb.execs[exec]
	sb.mu.Unlock()
	if found == nil {
		return nil, nil, status.Errorf(codes.NotFound, "Exec %s not found", exec)
	}
	found.once.Do(func() {}) // blocks while the exec starts
	return sb, found.process, found.err
}

// TaskExecStart starts a process in a sandbox. A repeated call with the same exec id has no effect.
func (r *commandRouter) TaskExecStart(ctx context.Context, request *pb.TaskExecStartRequest) (*pb.TaskExecStartResponse, error) {
	sb, err := r.findTask(ctx, request.GetTaskId())
	if err != nil {
		return nil, err
	}
	spec, err := r.newExecSpec(sb, request)
	if err != nil {
		return nil, err
	}
	sb.mu.Lock()
	e := sb.execs[request.GetExecId()]
	if e == nil {
		e = &routerExec{}
		sb.execs[request.GetExecId()] = e
	}
	prefix := filepath.Join(sb.folder, strconv.Itoa(len(sb.execs)))
	sb.mu.Unlock()
	e.once.Do(func() { r.startExec(context.WithoutCancel(ctx), sb, e, spec, prefix, request) })
	if e.err != nil {
		return nil, e.err
	}
	return &pb.TaskExecStartResponse{}, nil
}

// newExecSpec validates a request to start a process, and converts it to a request to the guest.
func (r *commandRouter) newExecSpec(sb *modalSandbox, request *pb.TaskExecStartRequest) (guest.ExecSpec, error) {
	if err := requireFields("exec_id", request.GetExecId()); err != nil {
		return guest.ExecSpec{}, err
	}
	if err := refuseOtherFields(request, "task_id,exec_id,command_args,stdout_config,stderr_config,timeout_secs,workdir,secret_ids,env,secret_sources,runtime_debug"); err != nil {
		return guest.ExecSpec{}, err
	}
	if len(request.GetCommandArgs()) == 0 || request.GetCommandArgs()[0] == "" {
		return guest.ExecSpec{}, status.Error(codes.InvalidArgument, "command_args is required")
	}
	if dir := request.GetWorkdir(); dir != "" && !strings.HasPrefix(dir, "/") {
		return guest.ExecSpec{}, status.Errorf(codes.InvalidArgument, "workdir must be an absolute path, got: %s", dir)
	}
	r.mu.Lock()
	env, err := r.secretVariables(request.GetSecretIds(), request.GetSecretSources())
	r.mu.Unlock()
	if err != nil {
		return guest.ExecSpec{}, err
	}
	for name, value := range request.GetEnv() {
		env = append(env, name+"="+value)
	}
	if _, err := sb.runningContainer(); err != nil {
		return guest.ExecSpec{}, err
	}
	return guest.ExecSpec{
		Args: request.GetCommandArgs(), Env: append(append([]string{}, sb.env...), env...), Dir: sb.workingDir(request.GetWorkdir()),
		DiscardStdout:  request.GetStdoutConfig() == pb.TaskExecStdoutConfig_TASK_EXEC_STDOUT_CONFIG_DEVNULL,
		DiscardStderr:  request.GetStderrConfig() == pb.TaskExecStderrConfig_TASK_EXEC_STDERR_CONFIG_DEVNULL,
		StderrToStdout: request.GetStderrConfig() == pb.TaskExecStderrConfig_TASK_EXEC_STDERR_CONFIG_STDOUT,
	}, nil
}

// startExec starts the process of e, and sets e.process, or e.err if the start fails.
func (r *commandRouter) startExec(ctx context.Context, sb *modalSandbox, e *routerExec, spec guest.ExecSpec, prefix string, request *pb.TaskExecStartRequest) {
	b, err := sb.runningContainer()
	if err == nil {
		err = os.MkdirAll(sb.folder, 0o700)
	}
	if err == nil {
		e.process, err = startProcess(ctx, b, spec, prefix)
	}
	if err != nil {
		if e.err = sb.workerGoneError(); e.err == nil {
			if _, ok := status.FromError(err); !ok {
				err = status.Errorf(codes.Internal, "Failed to start exec command: %v", err)
			}
			e.err = err
		}
		return
	}
	if timeout := request.GetTimeoutSecs(); timeout > 0 {
		go e.process.killAfter(time.Duration(timeout) * time.Second)
	}
}

// TaskExecStdinWrite writes input of a process that begins at an offset.
func (r *commandRouter) TaskExecStdinWrite(ctx context.Context, request *pb.TaskExecStdinWriteRequest) (*pb.TaskExecStdinWriteResponse, error) {
	_, p, err := r.findProcess(ctx, request.GetTaskId(), request.GetExecId())
	if err != nil {
		return nil, err
	}
	if err := p.stdin.write(ctx, request.GetOffset(), request.GetData(), request.GetEof()); err != nil {
		return nil, err
	}
	return &pb.TaskExecStdinWriteResponse{}, nil
}

// TaskExecStdinStatus returns how many bytes of input were accepted. It cancels a stream that still writes input.
func (r *commandRouter) TaskExecStdinStatus(ctx context.Context, request *pb.TaskExecStdinStatusRequest) (*pb.TaskExecStdinStatusResponse, error) {
	_, p, err := r.findProcess(ctx, request.GetTaskId(), request.GetExecId())
	if err != nil {
		return nil, err
	}
	p.stdin.replaceWriter(nil)
	accepted, closed := p.stdin.inputStatus()
	return pb.TaskExecStdinStatusResponse_builder{NumBytesWritten: accepted, Closed: closed}.Build(), nil
}

// TaskExecStdinWriteStream writes input of a process from a stream. The first message has the offset, and the last one
// ends the input.
func (r *commandRouter) TaskExecStdinWriteStream(stream grpc.ClientStreamingServer[pb.TaskExecStdinWriteStreamRequest, pb.TaskExecStdinWriteStreamResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	if start == nil {
		return status.Error(codes.InvalidArgument, "first message must be start")
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	_, p, err := r.findProcess(ctx, start.GetTaskId(), start.GetExecId())
	if err != nil {
		return err
	}
	p.stdin.replaceWriter(cancel)
	for offset := start.GetOffset(); ; {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return status.Error(codes.InvalidArgument, "the stream ended without end")
		}
		if err != nil {
			return err
		}
		switch message.WhichPayload() {
		case pb.TaskExecStdinWriteStreamRequest_Data_case:
			if err := p.stdin.write(ctx, offset, message.GetData(), false); err != nil {
				return err
			}
			offset += uint64(len(message.GetData()))
		case pb.TaskExecStdinWriteStreamRequest_End_case:
			if err := p.stdin.write(ctx, offset, nil, true); err != nil {
				return err
			}
			return stream.SendAndClose(&pb.TaskExecStdinWriteStreamResponse{})
		default:
			return status.Error(codes.InvalidArgument, "unexpected payload")
		}
	}
}

// TaskExecStdioRead sends the output of a process from an offset on.
func (r *commandRouter) TaskExecStdioRead(request *pb.TaskExecStdioReadRequest, stream grpc.ServerStreamingServer[pb.TaskExecStdioReadResponse]) error {
	sb, p, err := r.findProcess(stream.Context(), request.GetTaskId(), request.GetExecId())
	if err != nil {
		return err
	}
	log := p.stdout
	if request.GetFileDescriptor() == pb.TaskExecStdioFileDescriptor_TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR {
		log = p.stderr
	}
	err = log.read(stream.Context(), request.GetOffset(), func(_ uint64, data []byte) error {
		return stream.Send(pb.TaskExecStdioReadResponse_builder{Data: data}.Build())
	})
	if err != nil {
		return err
	}
	return sb.workerGoneError()
}

// TaskExecWait blocks until a process that was started with TaskExecStart has ended.
func (r *commandRouter) TaskExecWait(ctx context.Context, request *pb.TaskExecWaitRequest) (*pb.TaskExecWaitResponse, error) {
	sb, p, err := r.findProcess(ctx, request.GetTaskId(), request.GetExecId())
	if err != nil {
		return nil, err
	}
	select {
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	case <-p.done:
	}
	if err := sb.workerGoneError(); err != nil {
		return nil, err
	}
	response := &pb.TaskExecWaitResponse{}
	if p.exit.Signal != 0 {
		response.SetSignal(int32(p.exit.Signal))
	} else {
		response.SetCode(int32(p.exit.Code))
	}
	return response, nil
}

// TaskExecPoll returns how a process that was started with TaskExecStart has ended, or an empty response while it runs.
func (r *commandRouter) TaskExecPoll(ctx context.Context, request *pb.TaskExecPollRequest) (*pb.TaskExecPollResponse, error) {
	_, p, err := r.findProcess(ctx, request.GetTaskId(), request.GetExecId())
	if err != nil {
		return nil, err
	}
	response := &pb.TaskExecPollResponse{}
	select {
	case <-p.done:
		if p.exit.Signal != 0 {
			response.SetSignal(int32(p.exit.Signal))
		} else {
			response.SetCode(int32(p.exit.Code))
		}
	default:
	}
	return response, nil
}

// findEntrypoint returns the first process of a task's sandbox. Only sandboxes of Modal's second backend have one.
func (r *commandRouter) findEntrypoint(ctx context.Context, task string) (*modalSandbox, *sandboxProcess, error) {
	sb, err := r.findTask(ctx, task)
	if err != nil {
		return nil, nil, err
	}
	sb.mu.Lock()
	defer sb.mu.Unlock()
	if !sb.v2 || sb.entrypoint == nil {
		return nil, nil, status.Errorf(codes.NotFound, "Task %s has no entrypoint with streams", task)
	}
	return sb, sb.entrypoint, nil
}

// SandboxStdinWriteV2 writes input of the entrypoint that begins at an offset.
func (r *commandRouter) SandboxStdinWriteV2(ctx context.Context, request *pb.SandboxStdinWriteV2Request) (*pb.SandboxStdinWriteV2Response, error) {
	_, p, err := r.findEntrypoint(ctx, request.GetTaskId())
	if err != nil {
		return nil, err
	}
	if err := p.stdin.write(ctx, request.GetOffset(), request.GetData(), request.GetEof()); err != nil {
		return nil, err
	}
	return &pb.SandboxStdinWriteV2Response{}, nil
}

// SandboxStdioReadV2 sends the entrypoint's output from an offset on.
func (r *commandRouter) SandboxStdioReadV2(request *pb.SandboxStdioReadV2Request, stream grpc.ServerStreamingServer[pb.SandboxStdioReadV2Response]) error {
	sb, p, err := r.findEntrypoint(stream.Context(), request.GetTaskId())
	if err != nil {
		return err
	}
	log := p.stdout
	if request.GetFileDescriptor() == pb.SandboxStdioFileDescriptor_SANDBOX_STDIO_FILE_DESCRIPTOR_STDERR {
		log = p.stderr
	}
	err = log.read(stream.Context(), request.GetOffset(), func(offset uint64, data []byte) error {
		return stream.Send(pb.SandboxStdioReadV2Response_builder{Data: data, StartingOffset: offset}.Build())
	})
	if err != nil {
		return err
	}
	return sb.workerGoneError()
}
