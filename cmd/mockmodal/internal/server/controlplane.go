package server

import (
	"context"
	"maps"
	"slices"
	"time"

	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// imageBuilderVersion is the version of Modal's image builder that the server reports for every environment.
const imageBuilderVersion = "2025.06"

// controlPlane implements the gRPC service ModalClient, which is Modal's main API.
type controlPlane struct {
	pb.UnimplementedModalClientServer
	*Server
}

// modalEnvironment is one of Modal's environments, which hold apps, secrets and published images.
type modalEnvironment struct{ id, name string }

// modalApp is one of Modal's apps, to which sandboxes belong.
type modalApp struct {
	id, name string
	env      *modalEnvironment
	created  time.Time
}

// modalSecret is one of Modal's secrets: environment variables for sandboxes.
type modalSecret struct {
	id, name string
	env      *modalEnvironment
	values   map[string]string
}

// AuthTokenGet returns the token that the SDK sends with its unary calls.
func (c *controlPlane) AuthTokenGet(context.Context, *pb.AuthTokenGetRequest) (*pb.AuthTokenGetResponse, error) {
	return pb.AuthTokenGetResponse_builder{Token: c.signToken("auth", authTokenLifetime)}.Build(), nil
}

// ClientHello answers a client's first call.
func (c *controlPlane) ClientHello(context.Context, *emptypb.Empty) (*pb.ClientHelloResponse, error) {
	return pb.ClientHelloResponse_builder{ImageBuilderVersion: imageBuilderVersion}.Build(), nil
}

// findEnvironment returns the environment with a name, or the default environment for "". The caller must hold s.mu.
func (s *Server) findEnvironment(name string) (*modalEnvironment, error) {
	if name == "" {
		name = s.cfg.Environments[0]
	}
	if env := s.environments[name]; env != nil {
		return env, nil
	}
	return nil, status.Errorf(codes.NotFound, "Environment '%s' not found", name)
}

// EnvironmentGetOrCreate returns an environment and its settings.
func (c *controlPlane) EnvironmentGetOrCreate(_ context.Context, r *pb.EnvironmentGetOrCreateRequest) (*pb.EnvironmentGetOrCreateResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	env, err := c.findEnvironment(r.GetDeploymentName())
	if status.Code(err) == codes.NotFound && r.GetObjectCreationType() == pb.ObjectCreationType_OBJECT_CREATION_TYPE_CREATE_IF_MISSING {
		if !environmentNamePattern.MatchString(r.GetDeploymentName()) {
			return nil, status.Errorf(codes.InvalidArgument, "Invalid Environment name: '%s'", r.GetDeploymentName())
		}
		env, err = &modalEnvironment{id: newV1ID("en"), name: r.GetDeploymentName()}, nil
		c.environments[env.name] = env
	}
	if err != nil {
		return nil, err
	}
	return pb.EnvironmentGetOrCreateResponse_builder{
		EnvironmentId: env.id,
		Metadata: pb.EnvironmentMetadata_builder{
			Name: env.name, Settings: pb.EnvironmentSettings_builder{ImageBuilderVersion: imageBuilderVersion}.Build(),
		}.Build(),
	}.Build(), nil
}

// EnvironmentList lists the environments.
func (c *controlPlane) EnvironmentList(context.Context, *emptypb.Empty) (*pb.EnvironmentListResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	items := []*pb.EnvironmentListItem{}
	for _, name := range slices.Sorted(maps.Keys(c.environments)) {
		items = append(items, pb.EnvironmentListItem_builder{
			Name: name, EnvironmentId: c.environments[name].id, Default: name == c.cfg.Environments[0],
		}.Build())
	}
	return pb.EnvironmentListResponse_builder{Items: items}.Build(), nil
}

// findApp returns the app with an id. The caller must hold s.mu.
func (s *Server) findApp(id string) (*modalApp, error) {
	if err := requireFields("app_id", id); err != nil {
		return nil, err
	}
	if a := s.apps[id]; a != nil {
		return a, nil
	}
	return nil, status.Errorf(codes.NotFound, "App '%s' not found", id)
}

// findAppByName returns the app with a name in an environment, or nil. The caller must hold s.mu.
func (s *Server) findAppByName(env *modalEnvironment, name string) *modalApp {
	for _, a := range s.apps {
		if a.env == env && a.name == name {
			return a
		}
	}
	return nil
}

// AppGetOrCreate returns the app with a name. If there is none, it creates one if the request allows that.
func (c *controlPlane) AppGetOrCreate(_ context.Context, r *pb.AppGetOrCreateRequest) (*pb.AppGetOrCreateResponse, error) {
	if !isObjectName(r.GetAppName()) {
		return nil, status.Errorf(codes.InvalidArgument, "Invalid App name: '%s'", r.GetAppName())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	env, err := c.findEnvironment(r.GetEnvironmentName())
	if err != nil {
		return nil, err
	}
	found := c.findAppByName(env, r.GetAppName())
	switch kind := r.GetObjectCreationType(); {
	case kind != pb.ObjectCreationType_OBJECT_CREATION_TYPE_UNSPECIFIED && kind != pb.ObjectCreationType_OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
		return nil, status.Errorf(codes.Unimplemented, "mockmodal does not implement apps of type %s", kind)
	case found == nil && kind == pb.ObjectCreationType_OBJECT_CREATION_TYPE_UNSPECIFIED:
		return nil, status.Errorf(codes.NotFound, "App '%s' not found", r.GetAppName())
	case found == nil:
		found = &modalApp{id: newV1ID("ap"), name: r.GetAppName(), env: env, created: time.Now()}
		c.apps[found.id] = found
	}
	return pb.AppGetOrCreateResponse_builder{
		AppId: found.id,
		HandleMetadata: pb.AppHandleMetadata_builder{
			Description: found.name, AppId: found.id, EnvironmentName: env.name,
			Lifecycle: pb.AppLifecycle_builder{
				AppState: pb.AppState_APP_STATE_DEPLOYED, CreatedAt: float64(found.created.UnixMilli()) / 1000,
			}.Build(),
		}.Build(),
	}.Build(), nil
}

// SecretGetOrCreate creates a secret that lives as long as the server, or finds
// one by name.
func (c *controlPlane) SecretGetOrCreate(_ context.Context, r *pb.SecretGetOrCreateRequest) (*pb.SecretGetOrCreateResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	env, err := c.findEnvironment(r.GetEnvironmentName())
	if err != nil {
		return nil, err
	}
	var found *modalSecret
	for _, known := range c.secrets {
		if known.env == env && known.name != "" && known.name == r.GetDeploymentName() {
			found = known
		}
	}
	switch kind := r.GetObjectCreationType(); {
	case kind == pb.ObjectCreationType_OBJECT_CREATION_TYPE_EPHEMERAL:
		found = &modalSecret{id: newV1ID("st"), env: env, values: r.GetEnvDict()}
	case found != nil:
	case kind == pb.ObjectCreationType_OBJECT_CREATION_TYPE_CREATE_IF_MISSING && isObjectName(r.GetDeploymentName()):
		found = &modalSecret{id: newV1ID("st"), name: r.GetDeploymentName(), env: env, values: r.GetEnvDict()}
	default:
		return nil, status.Errorf(codes.NotFound, "Secret '%s' not found", r.GetDeploymentName())
	}
	c.secrets[found.id] = found
	for _, key := range r.GetRequiredKeys() {
		if _, ok := found.values[key]; !ok {
			return nil, status.Errorf(codes.FailedPrecondition, "Secret is missing the required key %s", key)
		}
	}
	return pb.SecretGetOrCreateResponse_builder{SecretId: found.id}.Build(), nil
}

// SecretDelete deletes a secret.
func (c *controlPlane) SecretDelete(_ context.Context, r *pb.SecretDeleteRequest) (*emptypb.Empty, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.secrets[r.GetSecretId()] == nil {
		return nil, status.Errorf(codes.NotFound, "Secret '%s' not found", r.GetSecretId())
	}
	delete(c.secrets, r.GetSecretId())
	return &emptypb.Empty{}, nil
}

// secretVariables returns the environment variables of the secrets with the given ids, followed by those of sources.
// The caller must hold s.mu.
func (s *Server) secretVariables(ids []string, sources []*pb.SecretSource) ([]string, error) {
	for i := len(ids) - 1; i >= 0; i-- {
		sources = slices.Insert(slices.Clone(sources), 0, pb.SecretSource_builder{SecretId: &ids[i]}.Build())
	}
	env := []string{}
	for _, source := range sources {
		values := source.GetEnv().GetContents()
		if source.HasSecretId() {
			known := s.secrets[source.GetSecretId()]
			if known == nil {
				return nil, status.Errorf(codes.NotFound, "Secret '%s' not found", source.GetSecretId())
			}
			values = known.values
		}
		for _, name := range slices.Sorted(maps.Keys(values)) {
			env = append(env, name+"="+values[name])
		}
	}
	return env, nil
}
