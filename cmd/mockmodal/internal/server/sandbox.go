package server

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/spoolhq/spool/cmd/mockmodal/internal/guest"
)

// modalSandbox is one of Modal's sandboxes, running or ended. Server.mu guards the fields name and tags, and mu guards
// the fields below it.
type modalSandbox struct {
	id, task   string
	v2         bool
	app        *modalApp
	name       string
	tags       map[string]string
	definition *pb.Sandbox
	env        []string // environment of every process in the sandbox
	image      *modalImage
	created    float64 // time of creation in Unix seconds; unique among the sandboxes of a server
	folder     string  // folder with the outputs of the sandbox's processes

	ready chan struct{} // closed when the container runs, or the sandbox has ended
	ended chan struct{} // closed when result is set
	saved chan struct{} // closed when exitImage or exitError is set

	mu         sync.Mutex
	box        *sandboxContainer
	entrypoint *sandboxProcess
	execs      map[string]*routerExec // by exec id
	network    *pb.NetworkAccess
	snapshots  map[string]*sandboxSnapshot // by snapshot id
	result     *pb.GenericResult
	exitImage  *modalImage // image of the file system, if the client has requested it for the end of the sandbox
	exitError  error
	finished   time.Time
	timer      *time.Timer
}

// Results of sandboxes that something else than their entrypoint ends.
var (
	terminatedResult = pb.GenericResult_builder{Status: pb.GenericResult_GENERIC_STATUS_TERMINATED, Exitcode: 137}.Build()
	timeoutResult    = pb.GenericResult_builder{Status: pb.GenericResult_GENERIC_STATUS_TIMEOUT, Exitcode: 124, Exception: "Sandbox exceeded its timeout"}.Build()
	preemptedResult  = pb.GenericResult_builder{
		Status: pb.GenericResult_GENERIC_STATUS_INTERNAL_FAILURE, Exitcode: 137,
		Exception: "Sandbox was preempted: the worker that it ran on was shut down",
	}.Build()
	outOfMemoryResult = pb.GenericResult_builder{
		Status: pb.GenericResult_GENERIC_STATUS_FAILURE, Exitcode: 137, Exception: "Sandbox ran out of memory",
	}.Build()
	containerLostResult = pb.GenericResult_builder{
		Status: pb.GenericResult_GENERIC_STATUS_INTERNAL_FAILURE, Exitcode: 137, Exception: "Sandbox's container ended",
	}.Build()
)

// stateName returns the state of the sandbox for the control API: starting, running or ended.
func (s *modalSandbox) stateName() string {
	switch {
	case isClosed(s.ended):
		return "ended"
	case isClosed(s.ready):
		return "running"
	}
	return "starting"
}

// isClosed reports whether a channel is closed.
func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// isRunning reports whether the sandbox has not ended.
func (s *modalSandbox) isRunning() bool { return s.stateName() != "ended" }

// outcome returns the result with which the sandbox ended, or nil while it runs.
func (s *modalSandbox) outcome() *pb.GenericResult {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.result
}

// sdkHandleMetadata returns the data that Modal's SDK stores in its handle of the sandbox.
func (s *modalSandbox) sdkHandleMetadata() *pb.SandboxHandleMetadata {
	return pb.SandboxHandleMetadata_builder{AppId: s.app.id, Result: s.outcome()}.Build()
}

// launchSandbox starts the container of a sandbox, and the sandbox's entrypoint.
func (s *Server) launchSandbox(ctx context.Context, sb *modalSandbox) error {
	resources := sb.definition.GetResources()
	b, err := s.engine.runContainer(ctx, containerSpec{
		sandbox: sb.id, image: sb.image.docker,
		network: sb.network.GetNetworkAccessType() != pb.NetworkAccess_BLOCKED,
		nanoCPU: int64(resources.GetMilliCpuMax()) * 1e6, memory: int64(resources.GetMemoryMbMax()) << 20,
	})
	if err != nil {
		return err
	}
	sb.mu.Lock()
	isEnded := sb.result != nil // it was terminated meanwhile
	if !isEnded {
		sb.box = b
	}
	sb.mu.Unlock()
	if isEnded {
		return s.engine.discardContainer(context.Background(), b)
	}
	if err := s.applyNetworkPolicy(ctx, sb, sb.network); err != nil {
		return errors.Join(err, s.engine.discardContainer(context.Background(), b))
	}
	if err := os.MkdirAll(sb.folder, 0o700); err != nil {
		return errors.Join(err, s.engine.discardContainer(context.Background(), b))
	}
	if args := sb.definition.GetEntrypointArgs(); len(args) > 0 {
		p, err := startProcess(ctx, b, guest.ExecSpec{Args: args, Env: sb.env, Dir: sb.workingDir("")}, filepath.Join(sb.folder, "entrypoint"))
		if err != nil {
			return errors.Join(err, s.engine.discardContainer(context.Background(), b))
		}
		sb.mu.Lock()
		sb.entrypoint = p
		sb.mu.Unlock()
	}
	sb.mu.Lock()
	sb.timer = time.AfterFunc(time.Duration(sb.definition.GetTimeoutSecs())*time.Second, func() { s.endSandbox(sb, timeoutResult) })
	sb.mu.Unlock()
	close(sb.ready)
	go s.watchSandbox(sb)
	return nil
}

// lastOutputTimeout is the time for which the server waits for the last output of an entrypoint that has exited.
const lastOutputTimeout = time.Second

// watchSandbox waits until the entrypoint of the sandbox exits or its container ends, and then ends the sandbox.
func (s *Server) watchSandbox(sb *modalSandbox) {
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		var one [1]byte
		_, _ = sb.box.lease.Read(one[:]) // blocks as long as the guest runs
	}()
	var exited <-chan struct{}
	if sb.entrypoint != nil {
		exited = sb.entrypoint.done
	}
	select {
	case <-sb.ended:
	case <-gone:
		if s.engine.ranOutOfMemory(context.Background(), sb.box.id) {
			s.endSandbox(sb, outOfMemoryResult)
		} else {
			s.endSandbox(sb, containerLostResult)
		}
	case <-exited:
		// What the entrypoint wrote last may still be on the way. A process that it left behind may keep its streams
		// open.
		select {
		case <-sb.entrypoint.ended:
		case <-sb.ended:
		case <-gone:
		case <-time.After(lastOutputTimeout):
		}
		exit := sb.entrypoint.exit
		code := exit.Code
		if exit.Signal != 0 {
			code = 128 + exit.Signal
		}
		result := pb.GenericResult_builder{Status: pb.GenericResult_GENERIC_STATUS_SUCCESS, Exitcode: int32(code)}
		if code != 0 {
			result.Status = pb.GenericResult_GENERIC_STATUS_FAILURE
		}
		s.endSandbox(sb, result.Build())
	}
}

// endSandbox ends a sandbox with a result, and returns when the container has been removed. It does nothing if the
// sandbox already has a result.
func (s *Server) endSandbox(sb *modalSandbox, result *pb.GenericResult) {
	sb.mu.Lock()
	if sb.result != nil {
		sb.mu.Unlock()
		return
	}
	sb.result, sb.finished = result, time.Now()
	if sb.timer != nil {
		sb.timer.Stop()
	}
	b := sb.box
	sb.mu.Unlock()
	close(sb.ended)
	s.takeExitSnapshot(sb, b)
	if b == nil {
		return
	}
	if err := s.engine.discardContainer(context.Background(), b); err != nil {
		s.logger.Error("remove the container of an ended sandbox", "sandbox", sb.id, "error", err)
	}
}

// workingDir returns the working directory of a new process: requested if it is not empty, and otherwise that of the
// sandbox's definition, that of the image, or /.
func (s *modalSandbox) workingDir(requested string) string {
	for _, dir := range []string{requested, s.definition.GetWorkdir(), s.box.dir} {
		if dir != "" {
			return dir
		}
	}
	return "/"
}

// runningContainer returns the sandbox's container, or an error with code NotFound if the sandbox has ended.
func (s *modalSandbox) runningContainer() (*sandboxContainer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.result != nil || s.box == nil {
		return nil, status.Errorf(codes.NotFound, "Task %s has already finished", s.task)
	}
	return s.box, nil
}

// workerGoneError returns an error with code Unavailable if the worker of the sandbox is gone, since the output of its
// processes then cannot be read. It returns nil if the sandbox runs or has ended in another way.
func (s *modalSandbox) workerGoneError() error {
	if result := s.outcome(); result == preemptedResult || result == containerLostResult {
		return status.Error(codes.Unavailable, result.GetException())
	}
	return nil
}

// egressRules returns the rules for a container that implement the allowlist of a network policy. The bool is false if
// the policy has no allowlist.
func (s *Server) egressRules(ctx context.Context, access *pb.NetworkAccess) ([]egressRule, bool, error) {
	if access.GetNetworkAccessType() != pb.NetworkAccess_ALLOWLIST {
		return nil, false, nil
	}
	rules := []egressRule{}
	for _, cidr := range access.GetAllowedCidrs() {
		network, err := netip.ParsePrefix(cidr)
		if err != nil {
			return nil, false, status.Errorf(codes.InvalidArgument, "Invalid CIDR in the outbound allowlist: %s", cidr)
		}
		rules = append(rules, egressRule{network: network})
	}
	for _, name := range access.GetAllowedDomains() {
		addresses, err := s.engine.resolveAllowedName(ctx, name)
		if err != nil {
			return nil, false, status.Errorf(codes.InvalidArgument, "Invalid domain in the outbound allowlist: %v", err)
		}
		for _, address := range addresses {
			rules = append(rules, egressRule{network: netip.PrefixFrom(address, address.BitLen()), port: 443})
		}
	}
	return rules, true, nil
}

// applyNetworkPolicy restricts the connections of a running sandbox to what a network policy allows.
func (s *Server) applyNetworkPolicy(ctx context.Context, sb *modalSandbox, access *pb.NetworkAccess) error {
	rules, restricted, err := s.egressRules(ctx, access)
	if err != nil || !restricted {
		return err
	}
	return s.engine.restrictEgress(ctx, sb.box, rules)
}
