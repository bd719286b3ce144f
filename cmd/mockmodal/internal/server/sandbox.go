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

// sandbox is one of Modal's sandboxes, running or ended. The registry's mutex
// guards name and tags, its own the rest that changes.
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
	box        *box
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

// outcome returns the sandbox's result, or nil while it runs.
func (s *sandbox) outcome() *pb.GenericResult {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.result
}

// metadata returns what the handle of a sandbox knows of it.
func (s *sandbox) metadata() *pb.SandboxHandleMetadata {
	return pb.SandboxHandleMetadata_builder{AppId: s.app.id, Result: s.outcome()}.Build()
}

// launch runs the sandbox's container and its entrypoint.
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

// watch ends the sandbox when its entrypoint exits or its container does.
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

// end ends a sandbox with a result, unless it has one. It returns when the
// container is gone.
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

// workdir returns the folder in which a process starts.
func (s *sandbox) workdir(asked string) string {
	for _, dir := range []string{asked, s.definition.GetWorkdir(), s.box.dir} {
		if dir != "" {
			return dir
		}
	}
	return "/"
}

// runningBox returns the sandbox's container. An ended sandbox has none.
func (s *sandbox) runningBox() (*box, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.result != nil || s.box == nil {
		return nil, status.Errorf(codes.NotFound, "Task %s has already finished", s.task)
	}
	return s.box, nil
}

// workerError returns the error of calls that go to a worker that is gone.
// Output of a sandbox that ended otherwise can still be read.
func (s *sandbox) workerError() error {
	if result := s.outcome(); result == preemptedResult || result == lostResult {
		return status.Error(codes.Unavailable, result.GetException())
	}
	return nil
}

// allowedNetworks returns the networks that a policy allows, and false if it
// allows all.
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

// applyNetwork puts a policy into force.
func (s *Server) applyNetwork(ctx context.Context, sb *sandbox, access *pb.NetworkAccess) error {
	rules, restricted, err := s.allowedNetworks(ctx, access)
	if err != nil || !restricted {
		return err
	}
	return s.engine.allow(ctx, sb.box, rules)
}
