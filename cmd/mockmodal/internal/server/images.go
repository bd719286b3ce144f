package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
)

// modalImage is one of Modal's images: an image from a registry, or a snapshot of a sandbox.
type modalImage struct {
	id         string
	definition string    // digest of the definition from which the image is built; "" for a snapshot
	reference  string    // name of the image in a registry; "" for a snapshot
	docker     string    // id of the image on the Docker engine; "" before it is built, and for a snapshot of a directory
	isSnapshot bool      // the image on the Docker engine is removed with this image
	archive    string    // tar file of a snapshot of a directory
	expires    time.Time // time from which the image is expired; zero means never
	built      chan struct{}
	failure    string // error of the build; "" if it succeeded
}

// isExpired reports whether the time for which the image is kept has passed.
func (i *modalImage) isExpired() bool { return !i.expires.IsZero() && time.Now().After(i.expires) }

// findImage returns the image with an id. The caller must hold s.mu.
func (s *Server) findImage(id string) (*modalImage, error) {
	if err := requireFields("image_id", id); err != nil {
		return nil, err
	}
	if found := s.images[id]; found != nil && !found.isExpired() && found.failure == "" {
		return found, nil
	}
	return nil, status.Errorf(codes.NotFound, "Image '%s' not found", id)
}

// ImageGetOrCreate returns the image with the definition in the request. It does not wait until a new image is built;
// the client waits with ImageJoinStreaming.
func (c *controlPlane) ImageGetOrCreate(_ context.Context, r *pb.ImageGetOrCreateRequest) (*pb.ImageGetOrCreateResponse, error) {
	if err := refuseOtherFields(r, "app_id,image,builder_version,force_build"); err != nil {
		return nil, err
	}
	if err := refuseOtherFields(r.GetImage(), "dockerfile_commands,base_images,image_registry_config,secret_ids,gpu_config"); err != nil {
		return nil, err
	}
	if err := requireFields("builder_version", r.GetBuilderVersion()); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := c.findApp(r.GetAppId()); err != nil {
		return nil, err
	}
	if id := r.GetImage().GetImageRegistryConfig().GetSecretId(); id != "" && c.secrets[id] == nil {
		return nil, status.Errorf(codes.NotFound, "Secret '%s' not found", id)
	}
	found, err := c.findOrBuildImage(r)
	if err != nil {
		return nil, err
	}
	response := pb.ImageGetOrCreateResponse_builder{ImageId: found.id}
	select {
	case <-found.built:
		response.Result = found.buildResult()
	default:
	}
	return response.Build(), nil
}

// findOrBuildImage returns the image with the definition in the request. If there is none, or its last build failed,
// findOrBuildImage starts a build. The caller must hold s.mu.
func (s *Server) findOrBuildImage(r *pb.ImageGetOrCreateRequest) (*modalImage, error) {
	commands := r.GetImage().GetDockerfileCommands()
	if len(commands) == 0 {
		return nil, status.Error(codes.InvalidArgument, "dockerfile_commands is required")
	}
	from, ok := strings.CutPrefix(commands[0], "FROM ")
	if !ok {
		return nil, status.Error(codes.InvalidArgument, "dockerfile_commands must begin with FROM")
	}
	if len(commands) > 1 {
		return nil, status.Error(codes.Unimplemented, "mockmodal does not implement commands of images other than FROM")
	}
	for _, base := range r.GetImage().GetBaseImages() {
		if base.GetDockerTag() == from {
			return s.findImage(base.GetImageId())
		}
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(r.GetImage())
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(append(raw, r.GetBuilderVersion()...))
	definition := hex.EncodeToString(sum[:])
	for _, known := range s.images {
		if known.definition == definition && known.failure == "" && !r.GetForceBuild() {
			return known, nil
		}
	}
	made := &modalImage{id: newV1ID("im"), definition: definition, reference: from, built: make(chan struct{})}
	s.images[made.id] = made
	go s.buildImage(made)
	return made, nil
}

// buildImage sets the Docker image of a new image, or its failure if the engine has no such image, and then closes
// i.built.
func (s *Server) buildImage(i *modalImage) {
	id, err := s.engine.findImageID(context.Background(), i.reference)
	s.mu.Lock()
	defer s.mu.Unlock()
	i.docker = id
	switch {
	case errdefs.IsNotFound(err):
		i.failure = "Failed to pull image '" + i.reference + "': manifest unknown"
	case err != nil:
		i.failure = "Failed to pull image '" + i.reference + "': " + err.Error()
	}
	close(i.built)
}

// buildResult returns the result of the image's build, which must have ended.
func (i *modalImage) buildResult() *pb.GenericResult {
	if i.failure != "" {
		return pb.GenericResult_builder{Status: pb.GenericResult_GENERIC_STATUS_FAILURE, Exception: i.failure}.Build()
	}
	return pb.GenericResult_builder{Status: pb.GenericResult_GENERIC_STATUS_SUCCESS}.Build()
}

// ImageJoinStreaming sends the log and the result of an image's build. If the build does not end within the timeout,
// the stream ends without a result, and the client calls again.
func (c *controlPlane) ImageJoinStreaming(r *pb.ImageJoinStreamingRequest, stream grpc.ServerStreamingServer[pb.ImageJoinStreamingResponse]) error {
	c.mu.Lock()
	found := c.images[r.GetImageId()]
	c.mu.Unlock()
	if found == nil {
		return status.Errorf(codes.NotFound, "Image '%s' not found", r.GetImageId())
	}
	line := pb.TaskLogs_builder{Data: "Step 0: FROM " + found.reference + "\n", FileDescriptor: pb.FileDescriptor_FILE_DESCRIPTOR_STDOUT}.Build()
	log := pb.ImageJoinStreamingResponse_builder{EntryId: "1-0", TaskLogs: []*pb.TaskLogs{line}}.Build()
	if r.GetLastEntryId() == "" {
		if err := stream.Send(log); err != nil {
			return err
		}
	}
	select {
	case <-stream.Context().Done():
		return status.FromContextError(stream.Context().Err()).Err()
	case <-time.After(secondsToDuration(r.GetTimeout())):
		return nil
	case <-found.built:
		return stream.Send(pb.ImageJoinStreamingResponse_builder{EntryId: "2-0", Result: found.buildResult(), Eof: true}.Build())
	}
}

// secondsToDuration converts seconds to a duration.
func secondsToDuration(s float32) time.Duration {
	return time.Duration(float64(s) * float64(time.Second))
}

// ImageFromId reports whether an image exists.
func (c *controlPlane) ImageFromId(_ context.Context, r *pb.ImageFromIdRequest) (*pb.ImageFromIdResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	found, err := c.findImage(r.GetImageId())
	if err != nil {
		return nil, err
	}
	return pb.ImageFromIdResponse_builder{ImageId: found.id}.Build(), nil
}

// publishedImageKey returns the key in s.published for an environment and the name of an image in it. The caller must
// hold s.mu.
func (s *Server) publishedImageKey(envName, tag string) (string, error) {
	parts := imageTagPattern.FindStringSubmatch(tag)
	if parts == nil || strings.HasPrefix(parts[2], "im-") {
		return "", status.Errorf(codes.InvalidArgument, "Invalid Image name: '%s'", tag)
	}
	if parts[1] != "" {
		return "", status.Errorf(codes.Unimplemented, "mockmodal does not implement image names with a namespace: %s", tag)
	}
	env, err := s.findEnvironment(envName)
	if err != nil {
		return "", err
	}
	return env.name + "/" + tag, nil
}

// ImagePublish publishes an image under a name. If another image has the name, that image loses it.
func (c *controlPlane) ImagePublish(_ context.Context, r *pb.ImagePublishRequest) (*pb.ImagePublishResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	found, err := c.findImage(r.GetImageId())
	if err != nil {
		return nil, err
	}
	key, err := c.publishedImageKey(r.GetEnvironmentName(), r.GetTag())
	if err != nil {
		return nil, err
	}
	c.published[key] = found
	return pb.ImagePublishResponse_builder{ImageId: found.id, RevisionId: newV1ID("ir")}.Build(), nil
}

// ImageGetByTag returns the image of a published name.
func (c *controlPlane) ImageGetByTag(_ context.Context, r *pb.ImageGetByTagRequest) (*pb.ImageGetByTagResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key, err := c.publishedImageKey(r.GetEnvironmentName(), r.GetTag())
	if err != nil {
		return nil, err
	}
	named := c.published[key]
	if named == nil {
		return nil, status.Errorf(codes.NotFound, "Image '%s' not found", r.GetTag())
	}
	found, err := c.findImage(named.id)
	if err != nil {
		return nil, err
	}
	return pb.ImageGetByTagResponse_builder{ImageId: found.id}.Build(), nil
}

// ImageDelete deletes an image. Running sandboxes of the image continue to use it.
func (c *controlPlane) ImageDelete(ctx context.Context, r *pb.ImageDeleteRequest) (*emptypb.Empty, error) {
	c.mu.Lock()
	found, err := c.findImage(r.GetImageId())
	if err == nil {
		c.unregisterImage(found)
	}
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, c.discardImage(ctx, found)
}

// unregisterImage removes an image and its published names from the server's records. The caller must hold s.mu.
func (s *Server) unregisterImage(i *modalImage) {
	delete(s.images, i.id)
	for key, named := range s.published {
		if named == i {
			delete(s.published, key)
		}
	}
}

// discardImage removes the content of a snapshot from disk and from the Docker engine. Content that a container still
// uses is removed when the server ends. discardImage does nothing for an image from a registry.
func (s *Server) discardImage(ctx context.Context, i *modalImage) error {
	if i.archive != "" {
		return os.Remove(i.archive)
	}
	if !i.isSnapshot {
		return nil
	}
	if err := s.engine.removeImage(ctx, i.docker); err != nil && !errdefs.IsConflict(err) {
		return status.Errorf(codes.Internal, "remove the snapshot: %v", err)
	}
	return nil
}
