package server

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/spoolhq/spool/cmd/mockmodal/internal/guest"
)

// defaultImageTTL is the time for which the server keeps a snapshot if the request does not state a time.
const defaultImageTTL = 30 * 24 * time.Hour

// sandboxSnapshot is a snapshot of a sandbox under a snapshot id that the client has chosen. once guards image and err.
type sandboxSnapshot struct {
	once  sync.Once
	image *modalImage
	err   error
}

// takeSnapshot returns the image id of the sandbox's snapshot with the given snapshot id. It calls take to create the
// image, unless an earlier call with the same snapshot id has succeeded.
func (s *Server) takeSnapshot(sb *modalSandbox, id string, take func(context.Context, *sandboxContainer) (*modalImage, error)) (string, error) {
	if err := requireFields("snapshot_id", id); err != nil {
		return "", err
	}
	sb.mu.Lock()
	found := sb.snapshots[id]
	if found == nil {
		found = &sandboxSnapshot{}
		sb.snapshots[id] = found
	}
	sb.mu.Unlock()
	found.once.Do(func() {
		b, err := sb.runningContainer()
		if err == nil {
			found.image, err = take(context.Background(), b)
		}
		found.err = err
	})
	if found.err == nil {
		return found.image.id, nil
	}
	sb.mu.Lock()
	delete(sb.snapshots, id)
	sb.mu.Unlock()
	if err := sb.workerGoneError(); err != nil {
		return "", err
	}
	if _, ok := status.FromError(found.err); ok {
		return "", found.err
	}
	return "", status.Errorf(codes.Internal, "Snapshot failed: %v", found.err)
}

// registerSnapshot assigns an id to the image of a snapshot, and keeps the image for the time life, or for ever if life
// is negative.
func (s *Server) registerSnapshot(made *modalImage, life time.Duration) *modalImage {
	made.id, made.built = newV1ID("im"), make(chan struct{})
	close(made.built)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.images[made.id] = made
	if life < 0 {
		return made
	}
	made.expires = time.Now().Add(life)
	time.AfterFunc(life, func() {
		s.mu.Lock()
		_, isKept := s.images[made.id]
		s.unregisterImage(made)
		s.mu.Unlock()
		if !isKept {
			return
		}
		if err := s.discardImage(context.Background(), made); err != nil {
			s.logger.Error("remove an expired snapshot", "image", made.id, "error", err)
		}
	})
	return made
}

// imageTTL returns the time for which a snapshot is kept, from the field ttl_seconds of a request. A negative time
// means for ever.
func imageTTL(isSet bool, seconds int64) (time.Duration, error) {
	switch {
	case !isSet:
		return defaultImageTTL, nil
	case seconds == -1:
		return -1, nil
	case seconds < 1:
		return 0, status.Errorf(codes.InvalidArgument, "ttl_seconds must be positive or -1, got %d", seconds)
	}
	return time.Duration(seconds) * time.Second, nil
}

// TaskSnapshotFilesystem creates an image from the file system of a sandbox.
func (r *commandRouter) TaskSnapshotFilesystem(ctx context.Context, request *pb.TaskSnapshotFilesystemRequest) (*pb.TaskSnapshotFilesystemResponse, error) {
	if err := refuseOtherFields(request, "task_id,snapshot_id,ttl_seconds"); err != nil {
		return nil, err
	}
	sb, err := r.findTask(ctx, request.GetTaskId())
	if err != nil {
		return nil, err
	}
	life, err := imageTTL(request.HasTtlSeconds(), request.GetTtlSeconds())
	if err != nil {
		return nil, err
	}
	id, err := r.takeSnapshot(sb, request.GetSnapshotId(), func(ctx context.Context, b *sandboxContainer) (*modalImage, error) {
		committed, err := r.engine.commitContainer(ctx, b.id)
		if err != nil {
			return nil, err
		}
		return r.registerSnapshot(&modalImage{docker: committed, isSnapshot: true}, life), nil
	})
	if err != nil {
		return nil, err
	}
	return pb.TaskSnapshotFilesystemResponse_builder{ImageId: id}.Build(), nil
}

// TaskSnapshotDirectory creates an image from the content of a folder in a sandbox.
func (r *commandRouter) TaskSnapshotDirectory(ctx context.Context, request *pb.TaskSnapshotDirectoryRequest) (*pb.TaskSnapshotDirectoryResponse, error) {
	if err := refuseOtherFields(request, "task_id,snapshot_id,ttl_seconds,path"); err != nil {
		return nil, err
	}
	sb, err := r.findTask(ctx, request.GetTaskId())
	if err != nil {
		return nil, err
	}
	path, err := cleanAbsolutePath(request.GetPath())
	if err != nil {
		return nil, err
	}
	life, err := imageTTL(request.HasTtlSeconds(), request.GetTtlSeconds())
	if err != nil {
		return nil, err
	}
	id, err := r.takeSnapshot(sb, request.GetSnapshotId(), func(ctx context.Context, b *sandboxContainer) (*modalImage, error) {
		archive := filepath.Join(r.cfg.Data, "images", randomSuffix(16)+".tar")
		if err := b.packFolder(ctx, path, archive); err != nil {
			_ = os.Remove(archive) // it may not exist
			return nil, status.Errorf(codes.FailedPrecondition, "Snapshot of %s failed: %v", path, err)
		}
		return r.registerSnapshot(&modalImage{archive: archive}, life), nil
	})
	if err != nil {
		return nil, err
	}
	return pb.TaskSnapshotDirectoryResponse_builder{ImageId: id}.Build(), nil
}

// cleanAbsolutePath returns path without ".", ".." and double slashes. It returns an error with code InvalidArgument if
// path is not absolute.
func cleanAbsolutePath(path []byte) (string, error) {
	if !strings.HasPrefix(string(path), "/") {
		return "", status.Errorf(codes.InvalidArgument, "path must be absolute, got: %q", path)
	}
	return filepath.Clean(string(path)), nil
}

// packFolder writes the content of a folder in the container to a tar file on this machine.
func (b *sandboxContainer) packFolder(ctx context.Context, folder, archive string) error {
	conn, err := b.dialGuest(ctx, guest.Request{Pack: folder})
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // all was read
	file, err := os.OpenFile(archive, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, &guest.DataFrameReader{R: bufio.NewReaderSize(conn, 64<<10)})
	return errors.Join(err, file.Close())
}

// unpackFolder extracts a tar file on this machine into a folder in the container.
func (b *sandboxContainer) unpackFolder(ctx context.Context, archive, folder string) error {
	file, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer file.Close() //nolint:errcheck // read only
	conn, err := b.dialGuest(ctx, guest.Request{Unpack: folder})
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // the answer was read
	if _, err := io.Copy(guest.DataFrameWriter{W: conn}, file); err != nil {
		return err
	}
	if err := guest.WriteFrame(conn, guest.FrameData, nil); err != nil {
		return err
	}
	_, err = (&guest.DataFrameReader{R: conn}).Read(make([]byte, 1))
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// TaskMountDirectory mounts a snapshot of a directory, or an empty directory, over a path in a sandbox. Changes below
// the path do not change the snapshot.
func (r *commandRouter) TaskMountDirectory(ctx context.Context, request *pb.TaskMountDirectoryRequest) (*emptypb.Empty, error) {
	if err := refuseOtherFields(request, "task_id,path,image_id"); err != nil {
		return nil, err
	}
	b, path, err := r.resolveMountPoint(ctx, request.GetTaskId(), request.GetPath())
	if err != nil {
		return nil, err
	}
	archive := ""
	if id := request.GetImageId(); id != "" {
		r.mu.Lock()
		found, err := r.findImage(id)
		r.mu.Unlock()
		if err != nil {
			return nil, err
		}
		if archive = found.archive; archive == "" {
			return nil, status.Error(codes.Unimplemented, "mockmodal does not implement mounts of images other than snapshots of directories")
		}
	}
	folder := filepath.Join("mounts", randomSuffix(8))
	if err := os.MkdirAll(filepath.Join(b.folder, folder), 0o755); err != nil {
		return nil, status.Errorf(codes.Internal, "Mount failed: %v", err)
	}
	inside := filepath.Join(guest.MountPath, folder)
	if archive != "" {
		err = b.unpackFolder(ctx, archive, inside)
	}
	if err == nil {
		err = b.bindMount(inside, path)
	}
	if err != nil {
		return nil, status.Errorf(codes.Internal, "Mount failed: %v", err)
	}
	return &emptypb.Empty{}, nil
}

// TaskUnmountDirectory removes the topmost mount over a path in a sandbox.
func (r *commandRouter) TaskUnmountDirectory(ctx context.Context, request *pb.TaskUnmountDirectoryRequest) (*emptypb.Empty, error) {
	if err := refuseOtherFields(request, "task_id,path"); err != nil {
		return nil, err
	}
	b, path, err := r.resolveMountPoint(ctx, request.GetTaskId(), request.GetPath())
	if err != nil {
		return nil, err
	}
	if err := b.unmount(path); err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "Unmount failed: %v", err)
	}
	return &emptypb.Empty{}, nil
}

// resolveMountPoint returns the running container of a task, and the cleaned path, which must be absolute.
func (r *commandRouter) resolveMountPoint(ctx context.Context, task string, path []byte) (*sandboxContainer, string, error) {
	sb, err := r.findTask(ctx, task)
	if err != nil {
		return nil, "", err
	}
	clean, err := cleanAbsolutePath(path)
	if err != nil {
		return nil, "", err
	}
	b, err := sb.runningContainer()
	return b, clean, err
}

// TaskSetNetworkAccess replaces the network policy of a running sandbox.
func (r *commandRouter) TaskSetNetworkAccess(ctx context.Context, request *pb.TaskSetNetworkAccessRequest) (*pb.TaskSetNetworkAccessResponse, error) {
	sb, err := r.findTask(ctx, request.GetTaskId())
	if err != nil {
		return nil, err
	}
	access := request.GetNetworkAccess()
	if access.GetNetworkAccessType() != pb.NetworkAccess_ALLOWLIST {
		return nil, status.Errorf(codes.InvalidArgument, "network_access must be an allowlist, got %s", access.GetNetworkAccessType())
	}
	if _, err := sb.runningContainer(); err != nil {
		return nil, err
	}
	sb.mu.Lock()
	isBlocked := sb.network.GetNetworkAccessType() == pb.NetworkAccess_BLOCKED
	sb.mu.Unlock()
	if isBlocked {
		return nil, status.Error(codes.FailedPrecondition, "the network of a Sandbox that was created without network cannot be changed")
	}
	if err := r.applyNetworkPolicy(ctx, sb, access); err != nil {
		return nil, err
	}
	sb.mu.Lock()
	sb.network = access
	sb.mu.Unlock()
	return &pb.TaskSetNetworkAccessResponse{}, nil
}

// wantsExitSnapshot reports whether the client has requested an image of the sandbox's file system at the end of the
// sandbox.
func (s *modalSandbox) wantsExitSnapshot() bool {
	return s.definition.GetExperimentalOptionsV2()["enable_exit_snapshot"] == "true"
}

// takeExitSnapshot sets sb.exitImage to an image of the file system of a sandbox that ends, if the client has requested
// one. It sets sb.exitError if the worker is gone, or if the sandbox has never run, in which case b is nil.
func (s *Server) takeExitSnapshot(sb *modalSandbox, b *sandboxContainer) {
	defer close(sb.saved)
	if !sb.wantsExitSnapshot() {
		return
	}
	var made *modalImage
	err := sb.workerGoneError()
	if b == nil {
		err = errors.New("the sandbox did not run")
	}
	if err == nil {
		var committed string
		if committed, err = s.engine.commitContainer(context.Background(), b.id); err == nil {
			made = s.registerSnapshot(&modalImage{docker: committed, isSnapshot: true}, defaultImageTTL)
		}
	}
	sb.mu.Lock()
	defer sb.mu.Unlock()
	sb.exitImage, sb.exitError = made, err
}

// SandboxGetExitSnapshot returns the image of the file system that a sandbox had at its end.
func (c *controlPlane) SandboxGetExitSnapshot(ctx context.Context, r *pb.SandboxGetExitSnapshotRequest) (*pb.SandboxGetExitSnapshotResponse, error) {
	return c.getExitSnapshot(ctx, r, false)
}

// SandboxGetExitSnapshotV2 is SandboxGetExitSnapshot for Modal's second backend.
func (c *controlPlane) SandboxGetExitSnapshotV2(ctx context.Context, r *pb.SandboxGetExitSnapshotRequest) (*pb.SandboxGetExitSnapshotResponse, error) {
	return c.getExitSnapshot(ctx, r, true)
}

// getExitSnapshot implements SandboxGetExitSnapshot for both of Modal's backends.
func (c *controlPlane) getExitSnapshot(ctx context.Context, r *pb.SandboxGetExitSnapshotRequest, v2 bool) (*pb.SandboxGetExitSnapshotResponse, error) {
	sb, err := c.lockAndFindSandbox(r.GetSandboxId(), v2)
	if err != nil {
		return nil, err
	}
	if !sb.wantsExitSnapshot() {
		return nil, status.Error(codes.InvalidArgument, "Exit snapshot is not enabled for this sandbox")
	}
	response := pb.SandboxGetExitSnapshotResponse_builder{}
	select {
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	case <-time.After(secondsToDuration(r.GetTimeout())):
		response.Pending = &pb.SandboxGetExitSnapshotResponse_Pending{}
		return response.Build(), nil
	case <-sb.saved:
	}
	sb.mu.Lock()
	defer sb.mu.Unlock()
	if sb.exitError != nil {
		response.Error = pb.SandboxGetExitSnapshotResponse_Error_builder{
			ErrorCode: pb.SandboxGetExitSnapshotResponse_ERROR_CODE_FILESYSTEM_INCONSISTENT, Message: sb.exitError.Error(),
		}.Build()
	} else {
		response.Success = pb.SandboxGetExitSnapshotResponse_Success_builder{ImageId: sb.exitImage.id}.Build()
	}
	return response.Build(), nil
}
