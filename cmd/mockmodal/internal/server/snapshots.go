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

// defaultImageLife is the time for which a snapshot is kept when its request names no
// time.
const defaultImageLife = 30 * 24 * time.Hour

// snapshot is a snapshot of a sandbox under the id that the client has chosen. once guards image and err.
type snapshot struct {
	once  sync.Once
	image *image
	err   error
}

// snapshot returns the id of the image of a sandbox's snapshot. It calls take to create the image, unless an earlier
// call with the same snapshot id has succeeded.
func (s *Server) snapshot(sb *sandbox, id string, take func(context.Context, *sandboxContainer) (*image, error)) (string, error) {
	if err := requireFields("snapshot_id", id); err != nil {
		return "", err
	}
	sb.mu.Lock()
	found := sb.snapshots[id]
	if found == nil {
		found = &snapshot{}
		sb.snapshots[id] = found
	}
	sb.mu.Unlock()
	found.once.Do(func() {
		b, err := sb.runningBox()
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
	if err := sb.workerError(); err != nil {
		return "", err
	}
	if _, ok := status.FromError(found.err); ok {
		return "", found.err
	}
	return "", status.Errorf(codes.Internal, "Snapshot failed: %v", found.err)
}

// registerSnapshot gives a snapshot's image an id and keeps it for the time life, or for ever if life is negative.
func (s *Server) registerSnapshot(made *image, life time.Duration) *image {
	made.id, made.built = newID("im"), make(chan struct{})
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

// imageLife returns the time for which a snapshot is kept, from the field ttl_seconds of a request. It is negative if
// the snapshot is kept for ever.
func imageLife(isSet bool, seconds int64) (time.Duration, error) {
	switch {
	case !isSet:
		return defaultImageLife, nil
	case seconds == -1:
		return -1, nil
	case seconds < 1:
		return 0, status.Errorf(codes.InvalidArgument, "ttl_seconds must be positive or -1, got %d", seconds)
	}
	return time.Duration(seconds) * time.Second, nil
}

// TaskSnapshotFilesystem creates an image of a sandbox's file system.
func (r *router) TaskSnapshotFilesystem(ctx context.Context, request *pb.TaskSnapshotFilesystemRequest) (*pb.TaskSnapshotFilesystemResponse, error) {
	if err := refuseOtherFields(request, "task_id,snapshot_id,ttl_seconds"); err != nil {
		return nil, err
	}
	sb, err := r.task(ctx, request.GetTaskId())
	if err != nil {
		return nil, err
	}
	life, err := imageLife(request.HasTtlSeconds(), request.GetTtlSeconds())
	if err != nil {
		return nil, err
	}
	id, err := r.snapshot(sb, request.GetSnapshotId(), func(ctx context.Context, b *sandboxContainer) (*image, error) {
		committed, err := r.engine.commit(ctx, b.id)
		if err != nil {
			return nil, err
		}
		return r.registerSnapshot(&image{docker: committed, isSnapshot: true}, life), nil
	})
	if err != nil {
		return nil, err
	}
	return pb.TaskSnapshotFilesystemResponse_builder{ImageId: id}.Build(), nil
}

// TaskSnapshotDirectory creates an image of a folder's content.
func (r *router) TaskSnapshotDirectory(ctx context.Context, request *pb.TaskSnapshotDirectoryRequest) (*pb.TaskSnapshotDirectoryResponse, error) {
	if err := refuseOtherFields(request, "task_id,snapshot_id,ttl_seconds,path"); err != nil {
		return nil, err
	}
	sb, err := r.task(ctx, request.GetTaskId())
	if err != nil {
		return nil, err
	}
	path, err := absolute(request.GetPath())
	if err != nil {
		return nil, err
	}
	life, err := imageLife(request.HasTtlSeconds(), request.GetTtlSeconds())
	if err != nil {
		return nil, err
	}
	id, err := r.snapshot(sb, request.GetSnapshotId(), func(ctx context.Context, b *sandboxContainer) (*image, error) {
		archive := filepath.Join(r.cfg.Data, "images", newSuffix(16)+".tar")
		if err := b.pack(ctx, path, archive); err != nil {
			_ = os.Remove(archive) // it may not exist
			return nil, status.Errorf(codes.FailedPrecondition, "Snapshot of %s failed: %v", path, err)
		}
		return r.registerSnapshot(&image{archive: archive}, life), nil
	})
	if err != nil {
		return nil, err
	}
	return pb.TaskSnapshotDirectoryResponse_builder{ImageId: id}.Build(), nil
}

// absolute returns a clean path, or an error with code InvalidArgument if it is not absolute.
func absolute(path []byte) (string, error) {
	if !strings.HasPrefix(string(path), "/") {
		return "", status.Errorf(codes.InvalidArgument, "path must be absolute, got: %q", path)
	}
	return filepath.Clean(string(path)), nil
}

// pack writes the content of a container's folder to a tar file on this machine.
func (b *sandboxContainer) pack(ctx context.Context, folder, archive string) error {
	conn, err := b.dial(ctx, guest.Request{Pack: folder})
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // all was read
	file, err := os.OpenFile(archive, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, &guest.DataReader{R: bufio.NewReaderSize(conn, 64<<10)})
	return errors.Join(err, file.Close())
}

// unpack writes the content of a tar file to a container's folder.
func (b *sandboxContainer) unpack(ctx context.Context, archive, folder string) error {
	file, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer file.Close() //nolint:errcheck // read only
	conn, err := b.dial(ctx, guest.Request{Unpack: folder})
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // the answer was read
	if _, err := io.Copy(guest.DataWriter{W: conn}, file); err != nil {
		return err
	}
	if err := guest.WriteFrame(conn, guest.Data, nil); err != nil {
		return err
	}
	_, err = (&guest.DataReader{R: conn}).Read(make([]byte, 1))
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// TaskMountDirectory mounts a snapshot of a directory, or an empty directory, over a path in a sandbox. Changes below
// the path do not change the snapshot.
func (r *router) TaskMountDirectory(ctx context.Context, request *pb.TaskMountDirectoryRequest) (*emptypb.Empty, error) {
	if err := refuseOtherFields(request, "task_id,path,image_id"); err != nil {
		return nil, err
	}
	b, path, err := r.mountPoint(ctx, request.GetTaskId(), request.GetPath())
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
	folder := filepath.Join("mounts", newSuffix(8))
	if err := os.MkdirAll(filepath.Join(b.folder, folder), 0o755); err != nil {
		return nil, status.Errorf(codes.Internal, "Mount failed: %v", err)
	}
	inside := filepath.Join(guest.Folder, folder)
	if archive != "" {
		err = b.unpack(ctx, archive, inside)
	}
	if err == nil {
		err = b.mount(inside, path)
	}
	if err != nil {
		return nil, status.Errorf(codes.Internal, "Mount failed: %v", err)
	}
	return &emptypb.Empty{}, nil
}

// TaskUnmountDirectory undoes the last mount over a path.
func (r *router) TaskUnmountDirectory(ctx context.Context, request *pb.TaskUnmountDirectoryRequest) (*emptypb.Empty, error) {
	if err := refuseOtherFields(request, "task_id,path"); err != nil {
		return nil, err
	}
	b, path, err := r.mountPoint(ctx, request.GetTaskId(), request.GetPath())
	if err != nil {
		return nil, err
	}
	if err := b.unmount(path); err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "Unmount failed: %v", err)
	}
	return &emptypb.Empty{}, nil
}

// mountPoint returns the running container of a task, and the clean absolute path in it.
func (r *router) mountPoint(ctx context.Context, task string, path []byte) (*sandboxContainer, string, error) {
	sb, err := r.task(ctx, task)
	if err != nil {
		return nil, "", err
	}
	clean, err := absolute(path)
	if err != nil {
		return nil, "", err
	}
	b, err := sb.runningBox()
	return b, clean, err
}

// TaskSetNetworkAccess replaces the allowlist of a running sandbox.
func (r *router) TaskSetNetworkAccess(ctx context.Context, request *pb.TaskSetNetworkAccessRequest) (*pb.TaskSetNetworkAccessResponse, error) {
	sb, err := r.task(ctx, request.GetTaskId())
	if err != nil {
		return nil, err
	}
	access := request.GetNetworkAccess()
	if access.GetNetworkAccessType() != pb.NetworkAccess_ALLOWLIST {
		return nil, status.Errorf(codes.InvalidArgument, "network_access must be an allowlist, got %s", access.GetNetworkAccessType())
	}
	if _, err := sb.runningBox(); err != nil {
		return nil, err
	}
	sb.mu.Lock()
	isBlocked := sb.network.GetNetworkAccessType() == pb.NetworkAccess_BLOCKED
	sb.mu.Unlock()
	if isBlocked {
		return nil, status.Error(codes.FailedPrecondition, "the network of a Sandbox that was created without network cannot be changed")
	}
	if err := r.applyNetwork(ctx, sb, access); err != nil {
		return nil, err
	}
	sb.mu.Lock()
	sb.network = access
	sb.mu.Unlock()
	return &pb.TaskSetNetworkAccessResponse{}, nil
}

// wantsExitSnapshot reports whether the client has requested that the sandbox's file system be kept when the sandbox
// ends.
func (s *sandbox) wantsExitSnapshot() bool {
	return s.definition.GetExperimentalOptionsV2()["enable_exit_snapshot"] == "true"
}

// exitSnapshot sets sb.exitImage to an image of the file system of a sandbox that ends, if the client has requested
// one. It sets sb.exitError if the worker is gone, or if the sandbox has never run, for which b is nil.
func (s *Server) exitSnapshot(sb *sandbox, b *sandboxContainer) {
	defer close(sb.saved)
	if !sb.wantsExitSnapshot() {
		return
	}
	var made *image
	err := sb.workerError()
	if b == nil {
		err = errors.New("the sandbox did not run")
	}
	if err == nil {
		var committed string
		if committed, err = s.engine.commit(context.Background(), b.id); err == nil {
			made = s.registerSnapshot(&image{docker: committed, isSnapshot: true}, defaultImageLife)
		}
	}
	sb.mu.Lock()
	defer sb.mu.Unlock()
	sb.exitImage, sb.exitError = made, err
}

// SandboxGetExitSnapshot returns the image of an ended sandbox's file system.
func (c *controlPlane) SandboxGetExitSnapshot(ctx context.Context, r *pb.SandboxGetExitSnapshotRequest) (*pb.SandboxGetExitSnapshotResponse, error) {
	return c.getExitSnapshot(ctx, r, false)
}

// SandboxGetExitSnapshotV2 is SandboxGetExitSnapshot for the second backend.
func (c *controlPlane) SandboxGetExitSnapshotV2(ctx context.Context, r *pb.SandboxGetExitSnapshotRequest) (*pb.SandboxGetExitSnapshotResponse, error) {
	return c.getExitSnapshot(ctx, r, true)
}

// getExitSnapshot implements SandboxGetExitSnapshot of both backends.
func (c *controlPlane) getExitSnapshot(ctx context.Context, r *pb.SandboxGetExitSnapshotRequest, v2 bool) (*pb.SandboxGetExitSnapshotResponse, error) {
	sb, err := c.lockedFindSandbox(r.GetSandboxId(), v2)
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
	case <-time.After(seconds(r.GetTimeout())):
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
