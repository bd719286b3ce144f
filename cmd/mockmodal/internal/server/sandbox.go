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

// sandbox is one of Modal's sandboxes, running or ended. Server.mu guards the fields name and tags, and mu guards the
// fields below it.
type sandbox struct {
	id, task   string
	v2         bool
	app        *app
	name       string
	tags       map[string]string
	definition *pb.Sandbox
	env        []string // of every process in it
	image      *image
	created    float64 // seconds; unique among the sandboxes of a server
	folder     string  // of its outputs

	ready chan struct{} // closed when the container runs, or the sandbox has ended
	ended chan struct{} // closed when result is set
	saved chan struct{} // closed when exitImage or exitError is set

	mu         sync.Mutex
	box        *sandboxContainer
	entrypoint *process
	execs      map[string]*execution // by exec id
	network    *pb.NetworkAccess
	snapshots  map[string]*snapshot // by snapshot id
	result     *pb.GenericResult
	exitImage  *image // of a sandbox that is to keep its file system
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
	lostResult = pb.GenericResult_builder{
		Status: pb.GenericResult_GENERIC_STATUS_INTERNAL_FAILURE, Exitcode: 137, Exception: "Sandbox's container ended",
	}.Build()
)

// state returns starting, running or ended.
func (s *sandbox) state() string {
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

// isRunning reports whether the sandbox starts or runs.
func (s *sandbox) isRunning() bool { return s.state() != "ended" }

// outcome returns the result with which the sandbox ended, or nil while it runs.
func (s *sandbox) outcome() *pb.GenericResult {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.result
}

// metadata returns the metadata that the SDK stores in its handle of the sandbox.
func (s *sandbox) metadata() *pb.SandboxHandleMetadata {
	return pb.SandboxHandleMetadata_builder{AppId: s.app.id, Result: s.outcome()}.Build()
}

// launch starts the sandbox's container and its entrypoint.
func (s *Server) launch(ctx context.Context, sb *sandbox) error {
	resources := sb.definition.GetResources()
	b, err := s.engine.run(ctx, containerSpec{
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
		return s.engine.discard(context.Background(), b)
	}
	if err := s.applyNetwork(ctx, sb, sb.network); err != nil {
		return errors.Join(err, s.engine.discard(context.Background(), b))
	}
	if err := os.MkdirAll(sb.folder, 0o700); err != nil {
		return errors.Join(err, s.engine.discard(context.Background(), b))
	}
	if args := sb.definition.GetEntrypointArgs(); len(args) > 0 {
		p, err := startProcess(ctx, b, guest.Exec{Args: args, Env: sb.env, Dir: sb.workdir("")}, filepath.Join(sb.folder, "entrypoint"))
		if err != nil {
			return errors.Join(err, s.engine.discard(context.Background(), b))
		}
		sb.mu.Lock()
		sb.entrypoint = p
		sb.mu.Unlock()
	}
	sb.mu.Lock()
	sb.timer = time.AfterFunc(time.Duration(sb.definition.GetTimeoutSecs())*time.Second, func() { s.end(sb, timeoutResult) })
	sb.mu.Unlock()
	close(sb.ready)
	go s.watch(sb)
	return nil
}

// outputWait is the time limit for the last output of a sandbox's entrypoint.
const outputWait = time.Second

// watch ends the sandbox when its entrypoint has exited or its container has ended.
func (s *Server) watch(sb *sandbox) {
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
		if s.engine.outOfMemory(context.Background(), sb.box.id) {
			s.end(sb, outOfMemoryResult)
		} else {
			s.end(sb, lostResult)
		}
	case <-exited:
		// What the entrypoint wrote last may still be on the way. A process that it left behind may keep its streams open.
		select {
		case <-sb.entrypoint.ended:
		case <-sb.ended:
		case <-gone:
		case <-time.After(outputWait):
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
		s.end(sb, result.Build())
	}
}

// end ends a sandbox with a result, and returns when its container was removed. It does nothing if the sandbox has a
// result already.
func (s *Server) end(sb *sandbox, result *pb.GenericResult) {
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
	s.exitSnapshot(sb, b)
	if b == nil {
		return
	}
	if err := s.engine.discard(context.Background(), b); err != nil {
		s.logger.Error("remove the container of an ended sandbox", "sandbox", sb.id, "error", err)
	}
}

// workdir returns the working directory of a new process: asked, or else that of the sandbox's definition, of the
// image, or /.
func (s *sandbox) workdir(asked string) string {
	for _, dir := range []string{asked, s.definition.GetWorkdir(), s.box.dir} {
		if dir != "" {
			return dir
		}
	}
	return "/"
}

// runningBox returns the sandbox's container, or an error with code NotFound if the sandbox has ended.
func (s *sandbox) runningBox() (*sandboxContainer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.result != nil || s.box == nil {
		return nil, status.Errorf(codes.NotFound, "Task %s has already finished", s.task)
	}
	return s.box, nil
}

// workerError returns an error with code Unavailable if the worker of the sandbox is gone, because then the output of
// its processes cannot be read. It returns nil if the sandbox runs or has ended otherwise.
func (s *sandbox) workerError() error {
	if result := s.outcome(); result == preemptedResult || result == lostResult {
		return status.Error(codes.Unavailable, result.GetException())
	}
	return nil
}

// allowedNetworks returns the rules for the networks that a policy allows. The bool is false if the policy has no
// allowlist.
func (s *Server) allowedNetworks(ctx context.Context, access *pb.NetworkAccess) ([]rule, bool, error) {
	if access.GetNetworkAccessType() != pb.NetworkAccess_ALLOWLIST {
		return nil, false, nil
	}
	rules := []rule{}
	for _, cidr := range access.GetAllowedCidrs() {
		network, err := netip.ParsePrefix(cidr)
		if err != nil {
			return nil, false, status.Errorf(codes.InvalidArgument, "Invalid CIDR in the outbound allowlist: %s", cidr)
		}
		rules = append(rules, rule{network: network})
	}
	for _, name := range access.GetAllowedDomains() {
		addresses, err := s.engine.addresses(ctx, name)
		if err != nil {
			return nil, false, status.Errorf(codes.InvalidArgument, "Invalid domain in the outbound allowlist: %v", err)
		}
		for _, address := range addresses {
			rules = append(rules, rule{network: netip.PrefixFrom(address, address.BitLen()), port: 443})
		}
	}
	return rules, true, nil
}

// applyNetwork restricts the connections of a running sandbox to what a network policy allows.
func (s *Server) applyNetwork(ctx context.Context, sb *sandbox, access *pb.NetworkAccess) error {
	rules, restricted, err := s.allowedNetworks(ctx, access)
	if err != nil || !restricted {
		return err
	}
	return s.engine.allow(ctx, sb.box, rules)
}
