package server

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"time"

	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// maxSandboxTimeout is the longest lifetime that a client may request for a sandbox.
const maxSandboxTimeout = 24 * time.Hour

// sandboxesPerPage is the number of sandboxes in one response to SandboxList.
const sandboxesPerPage = 10

// findSandbox returns the sandbox with an id. v2 selects Modal's second backend, which does not find sandboxes of the
// first. The caller must hold s.mu.
func (s *Server) findSandbox(id string, v2 bool) (*modalSandbox, error) {
	if err := requireFields("sandbox_id", id); err != nil {
		return nil, err
	}
	for _, sb := range s.sandboxes {
		if sb.id == id && sb.v2 == v2 {
			return sb, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "Sandbox '%s' not found", id)
}

// lockAndFindSandbox locks s.mu, calls findSandbox and unlocks s.mu.
func (s *Server) lockAndFindSandbox(id string, v2 bool) (*modalSandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.findSandbox(id, v2)
}

// SandboxCreate creates a sandbox of the first backend. It returns before the sandbox runs, and SandboxGetTaskId
// returns the id of its task.
func (c *controlPlane) SandboxCreate(ctx context.Context, r *pb.SandboxCreateRequest) (*pb.SandboxCreateResponse, error) {
	sb, err := c.createSandbox(ctx, r.GetAppId(), r.GetDefinition(), r.GetTags(), nil, false)
	if err != nil {
		return nil, err
	}
	return pb.SandboxCreateResponse_builder{SandboxId: sb.id, Metadata: sb.sdkHandleMetadata()}.Build(), nil
}

// SandboxCreateV2 creates a sandbox of the second backend, and returns when the sandbox runs.
func (c *controlPlane) SandboxCreateV2(ctx context.Context, r *pb.SandboxCreateV2Request) (*pb.SandboxCreateV2Response, error) {
	if err := refuseOtherFields(r, "app_id,definition,tags,secret_sources"); err != nil {
		return nil, err
	}
	sb, err := c.createSandbox(ctx, r.GetAppId(), r.GetDefinition(), r.GetTags(), r.GetSecretSources(), true)
	if err != nil {
		return nil, err
	}
	select {
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	case <-sb.ready:
	case <-sb.ended:
		return nil, status.Error(codes.Internal, sb.outcome().GetException())
	}
	return pb.SandboxCreateV2Response_builder{
		SandboxId: sb.id, TaskId: sb.task, Metadata: sb.sdkHandleMetadata(),
		CommandRouterAccess: pb.CommandRouterAccess_builder{Jwt: c.signToken(sb.task, routerTokenLifetime), Url: c.routerURL()}.Build(),
	}.Build(), nil
}

// createSandbox registers a sandbox and launches it in the background. The launch continues when the client's call
// ends, so that a client that has lost its connection finds the sandbox by its name.
func (s *Server) createSandbox(ctx context.Context, appID string, d *pb.Sandbox, tags []*pb.SandboxTag, sources []*pb.SecretSource, v2 bool) (*modalSandbox, error) {
	if err := checkDefinition(d); err != nil {
		return nil, err
	}
	if _, _, err := s.egressRules(ctx, d.GetNetworkAccess()); err != nil {
		return nil, err
	}
	wanted, err := tagsToMap(tags)
	if err != nil {
		return nil, err
	}
	sb := &modalSandbox{
		id: newV1ID("sb"), task: newV1ID("ta"), v2: v2, name: d.GetName(), tags: wanted, definition: d, network: d.GetNetworkAccess(),
		ready: make(chan struct{}), ended: make(chan struct{}), saved: make(chan struct{}), execs: map[string]*routerExec{}, snapshots: map[string]*sandboxSnapshot{},
	}
	if v2 {
		sb.id, sb.task = newV2ID("sb"), newV2ID("ta")
	}
	sb.folder = filepath.Join(s.cfg.Data, "outputs", sb.id)
	if err := s.registerSandbox(sb, appID, sources); err != nil {
		return nil, err
	}
	s.launches.Go(func() {
		if err := s.launchSandbox(s.life, sb); err != nil {
			s.logger.Error("launch a sandbox", "sandbox", sb.id, "error", err)
			s.endSandbox(sb, pb.GenericResult_builder{Status: pb.GenericResult_GENERIC_STATUS_INIT_FAILURE, Exception: err.Error()}.Build())
		}
	})
	return sb, nil
}

// registerSandbox validates the app, image, secrets and name of a sandbox, and adds the sandbox to s.sandboxes.
func (s *Server) registerSandbox(sb *modalSandbox, appID string, sources []*pb.SecretSource) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	if sb.app, err = s.findApp(appID); err != nil {
		return err
	}
	if sb.image, err = s.findImage(sb.definition.GetImageId()); err != nil {
		return err
	}
	if sb.image.docker == "" {
		return status.Errorf(codes.FailedPrecondition, "Image '%s' is not the image of a file system, or is not built", sb.image.id)
	}
	if !sb.v2 || len(sources) == 0 {
		sb.env, err = s.secretVariables(sb.definition.GetSecretIds(), sources)
	} else {
		sb.env, err = s.secretVariables(nil, sources)
	}
	if err != nil {
		return err
	}
	if other := s.findRunningSandbox(sb.app, sb.name); other != nil {
		return status.Errorf(codes.AlreadyExists, "Sandbox with name '%s' already exists in App '%s'", sb.name, sb.app.name)
	}
	sb.created = max(float64(time.Now().UnixMicro())/1e6, s.lastCreated+1e-6)
	s.lastCreated = sb.created
	s.sandboxes = append(s.sandboxes, sb)
	return nil
}

// findRunningSandbox returns the running sandbox with a name in an app, or nil. The caller must hold s.mu.
func (s *Server) findRunningSandbox(a *modalApp, name string) *modalSandbox {
	for _, sb := range s.sandboxes {
		if name != "" && sb.app == a && sb.name == name && sb.isRunning() {
			return sb
		}
	}
	return nil
}

// checkDefinition returns an error with code InvalidArgument for a sandbox definition that Modal refuses, and with code
// Unimplemented for one that mockmodal does not implement.
func checkDefinition(d *pb.Sandbox) error {
	if err := refuseOtherFields(d, "entrypoint_args,image_id,secret_ids,timeout_secs,idle_timeout_secs,workdir,network_access,resources,open_ports,scheduler_placement,name,"+
		"experimental_options_v2,cloud_provider_str,verbose"); err != nil {
		return err
	}
	if err := refuseOtherFields(d.GetResources(), "milli_cpu,milli_cpu_max,memory_mb,memory_mb_max,gpu_config,ephemeral_disk_mb"); err != nil {
		return err
	}
	switch timeout := time.Duration(d.GetTimeoutSecs()) * time.Second; {
	case len(d.GetOpenPorts().GetPorts()) > 0:
		return status.Error(codes.Unimplemented, "mockmodal does not implement tunnels")
	case d.GetResources().GetGpuConfig().GetCount() > 0:
		return status.Error(codes.Unimplemented, "mockmodal does not implement GPUs")
	case d.GetIdleTimeoutSecs() > 0:
		return status.Error(codes.Unimplemented, "mockmodal does not implement idle timeouts")
	case timeout <= 0 || timeout > maxSandboxTimeout:
		return status.Errorf(codes.InvalidArgument, "timeout must be between 1 second and 24 hours, got %s", timeout)
	case d.GetName() != "" && !isObjectName(d.GetName()):
		return status.Errorf(codes.InvalidArgument, "Invalid Sandbox name: '%s'", d.GetName())
	case d.GetWorkdir() != "" && !strings.HasPrefix(d.GetWorkdir(), "/"):
		return status.Errorf(codes.InvalidArgument, "workdir must be an absolute path, got: %s", d.GetWorkdir())
	case d.GetNetworkAccess().GetNetworkAccessType() == pb.NetworkAccess_UNSPECIFIED:
		return status.Error(codes.InvalidArgument, "network_access is required")
	}
	return checkRegions(d.GetSchedulerPlacement().GetRegions())
}

// modalRegions are the regions in which a client may request a sandbox.
var modalRegions = []string{"us", "us-east", "us-east-1", "us-central", "us-west", "us-west-2", "eu", "eu-west", "eu-west-1", "eu-north", "eu-south", "ap", "ap-northeast", "ap-southeast", "uk", "ca", "me", "sa", "af", "mx"}

// checkRegions returns an error with code InvalidArgument for a region that Modal does not have.
func checkRegions(requested []string) error {
	for _, region := range requested {
		if !slices.Contains(modalRegions, region) {
			return status.Errorf(codes.InvalidArgument, "Invalid region: '%s'", region)
		}
	}
	return nil
}

// tagsToMap converts a list of tags to a map from name to value. It returns an error for an invalid tag.
func tagsToMap(tags []*pb.SandboxTag) (map[string]string, error) {
	values := map[string]string{}
	for _, tag := range tags {
		if tag.GetTagName() == "" {
			return nil, status.Error(codes.InvalidArgument, "tag_name is required")
		}
		values[tag.GetTagName()] = tag.GetTagValue()
	}
	return values, nil
}

// tagsToList converts a map from name to value to a list of tags.
func tagsToList(tags map[string]string) []*pb.SandboxTag {
	list := []*pb.SandboxTag{}
	for name, value := range tags {
		list = append(list, pb.SandboxTag_builder{TagName: name, TagValue: value}.Build())
	}
	return list
}

// SandboxGetTaskId returns the task of a sandbox that runs, or the result of
// one that has ended.
func (c *controlPlane) SandboxGetTaskId(ctx context.Context, r *pb.SandboxGetTaskIdRequest) (*pb.SandboxGetTaskIdResponse, error) {
	return c.getTaskID(ctx, r, false)
}

// SandboxGetTaskIdV2 is SandboxGetTaskId for Modal's second backend.
func (c *controlPlane) SandboxGetTaskIdV2(ctx context.Context, r *pb.SandboxGetTaskIdRequest) (*pb.SandboxGetTaskIdResponse, error) {
	return c.getTaskID(ctx, r, true)
}

// getTaskID implements SandboxGetTaskId for both of Modal's backends.
func (c *controlPlane) getTaskID(ctx context.Context, r *pb.SandboxGetTaskIdRequest, v2 bool) (*pb.SandboxGetTaskIdResponse, error) {
	sb, err := c.lockAndFindSandbox(r.GetSandboxId(), v2)
	if err != nil {
		return nil, err
	}
	if r.HasTimeout() {
		select {
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		case <-time.After(secondsToDuration(r.GetTimeout())):
		case <-sb.ready:
		case <-sb.ended:
		}
	}
	response := pb.SandboxGetTaskIdResponse_builder{}
	switch sb.stateName() {
	case "running":
		response.TaskId = &sb.task
	case "ended":
		response.TaskResult = sb.outcome()
	}
	return response.Build(), nil
}

// SandboxWait blocks until the sandbox has ended or the timeout has passed.
func (c *controlPlane) SandboxWait(ctx context.Context, r *pb.SandboxWaitRequest) (*pb.SandboxWaitResponse, error) {
	return c.waitForSandbox(ctx, r, false)
}

// SandboxWaitV2 is SandboxWait for Modal's second backend.
func (c *controlPlane) SandboxWaitV2(ctx context.Context, r *pb.SandboxWaitRequest) (*pb.SandboxWaitResponse, error) {
	return c.waitForSandbox(ctx, r, true)
}

// waitForSandbox implements SandboxWait for both of Modal's backends.
func (c *controlPlane) waitForSandbox(ctx context.Context, r *pb.SandboxWaitRequest, v2 bool) (*pb.SandboxWaitResponse, error) {
	sb, err := c.lockAndFindSandbox(r.GetSandboxId(), v2)
	if err != nil {
		return nil, err
	}
	select {
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	case <-time.After(secondsToDuration(r.GetTimeout())):
	case <-sb.ended:
	}
	return pb.SandboxWaitResponse_builder{Result: sb.outcome(), Metadata: sb.sdkHandleMetadata()}.Build(), nil
}

// SandboxTerminate ends a sandbox, and returns when its container has been removed.
func (c *controlPlane) SandboxTerminate(_ context.Context, r *pb.SandboxTerminateRequest) (*pb.SandboxTerminateResponse, error) {
	return c.terminateSandbox(r, false)
}

// SandboxTerminateV2 is SandboxTerminate for Modal's second backend.
func (c *controlPlane) SandboxTerminateV2(_ context.Context, r *pb.SandboxTerminateRequest) (*pb.SandboxTerminateResponse, error) {
	return c.terminateSandbox(r, true)
}

// terminateSandbox implements SandboxTerminate for both of Modal's backends.
func (c *controlPlane) terminateSandbox(r *pb.SandboxTerminateRequest, v2 bool) (*pb.SandboxTerminateResponse, error) {
	sb, err := c.lockAndFindSandbox(r.GetSandboxId(), v2)
	if err != nil {
		return nil, err
	}
	existing := sb.outcome()
	c.endSandbox(sb, terminatedResult)
	return pb.SandboxTerminateResponse_builder{ExistingResult: existing}.Build(), nil
}

// SandboxTagsSet replaces the tags of a sandbox.
func (c *controlPlane) SandboxTagsSet(_ context.Context, r *pb.SandboxTagsSetRequest) (*emptypb.Empty, error) {
	return c.setTags(r, false)
}

// SandboxTagsSetV2 is SandboxTagsSet for Modal's second backend.
func (c *controlPlane) SandboxTagsSetV2(_ context.Context, r *pb.SandboxTagsSetRequest) (*emptypb.Empty, error) {
	return c.setTags(r, true)
}

// setTags implements SandboxTagsSet for both of Modal's backends.
func (c *controlPlane) setTags(r *pb.SandboxTagsSetRequest, v2 bool) (*emptypb.Empty, error) {
	tags, err := tagsToMap(r.GetTags())
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	sb, err := c.findSandbox(r.GetSandboxId(), v2)
	if err != nil {
		return nil, err
	}
	sb.tags = tags
	return &emptypb.Empty{}, nil
}

// SandboxTagsGet returns the tags of a sandbox.
func (c *controlPlane) SandboxTagsGet(_ context.Context, r *pb.SandboxTagsGetRequest) (*pb.SandboxTagsGetResponse, error) {
	return c.getTags(r, false)
}

// SandboxTagsGetV2 is SandboxTagsGet for Modal's second backend.
func (c *controlPlane) SandboxTagsGetV2(_ context.Context, r *pb.SandboxTagsGetRequest) (*pb.SandboxTagsGetResponse, error) {
	return c.getTags(r, true)
}

// getTags implements SandboxTagsGet for both of Modal's backends.
func (c *controlPlane) getTags(r *pb.SandboxTagsGetRequest, v2 bool) (*pb.SandboxTagsGetResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	sb, err := c.findSandbox(r.GetSandboxId(), v2)
	if err != nil {
		return nil, err
	}
	return pb.SandboxTagsGetResponse_builder{Tags: tagsToList(sb.tags)}.Build(), nil
}

// SandboxGetFromName returns the running sandbox that has a name in an app.
func (c *controlPlane) SandboxGetFromName(_ context.Context, r *pb.SandboxGetFromNameRequest) (*pb.SandboxGetFromNameResponse, error) {
	return c.findByName(r, false)
}

// SandboxGetFromNameV2 is SandboxGetFromName for Modal's second backend. On request it also finds the newest sandbox
// with the name that has ended.
func (c *controlPlane) SandboxGetFromNameV2(_ context.Context, r *pb.SandboxGetFromNameRequest) (*pb.SandboxGetFromNameResponse, error) {
	return c.findByName(r, true)
}

// findByName implements SandboxGetFromName for both of Modal's backends.
func (c *controlPlane) findByName(r *pb.SandboxGetFromNameRequest, v2 bool) (*pb.SandboxGetFromNameResponse, error) {
	if err := requireFields("app_name", r.GetAppName(), "sandbox_name", r.GetSandboxName()); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	env, err := c.findEnvironment(r.GetEnvironmentName())
	if err != nil {
		return nil, err
	}
	a := c.findAppByName(env, r.GetAppName())
	if a == nil {
		return nil, status.Errorf(codes.NotFound, "App '%s' not found", r.GetAppName())
	}
	found := c.findRunningSandbox(a, r.GetSandboxName())
	if found == nil && r.GetIncludeTerminated() {
		for _, sb := range c.sandboxes {
			if sb.app == a && sb.name == r.GetSandboxName() {
				found = sb
			}
		}
	}
	if found == nil || found.v2 != v2 {
		return nil, status.Errorf(codes.NotFound, "Sandbox with name '%s' not found in App '%s'", r.GetSandboxName(), a.name)
	}
	return pb.SandboxGetFromNameResponse_builder{SandboxId: found.id, Metadata: found.sdkHandleMetadata()}.Build(), nil
}

// SandboxList lists the sandboxes of Modal's first backend, newest first.
func (c *controlPlane) SandboxList(_ context.Context, r *pb.SandboxListRequest) (*pb.SandboxListResponse, error) {
	return c.listSandboxes(r, func(sb *modalSandbox) bool { return !sb.v2 })
}

// SandboxListV2 lists sandboxes of both backends, newest first.
func (c *controlPlane) SandboxListV2(_ context.Context, r *pb.SandboxListRequest) (*pb.SandboxListResponse, error) {
	return c.listSandboxes(r, func(*modalSandbox) bool { return true })
}

// listSandboxes implements SandboxList for both of Modal's backends. isListed selects the sandboxes of the backend.
func (c *controlPlane) listSandboxes(r *pb.SandboxListRequest, isListed func(*modalSandbox) bool) (*pb.SandboxListResponse, error) {
	want, err := tagsToMap(r.GetTags())
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	env, err := c.findEnvironment(r.GetEnvironmentName())
	if err != nil {
		return nil, err
	}
	if r.GetAppId() != "" {
		a, err := c.findApp(r.GetAppId())
		if err != nil {
			return nil, err
		}
		env = a.env
	}
	found := []*pb.SandboxInfo{}
	for _, sb := range slices.Backward(c.sandboxes) {
		switch {
		case len(found) == sandboxesPerPage, !isListed(sb), sb.app.env != env, r.GetAppId() != "" && sb.app.id != r.GetAppId(),
			r.GetBeforeTimestamp() != 0 && sb.created >= r.GetBeforeTimestamp(), !r.GetIncludeFinished() && !sb.isRunning(), !hasTags(sb.tags, want):
		default:
			found = append(found, sb.newListEntry())
		}
	}
	return pb.SandboxListResponse_builder{Sandboxes: found}.Build(), nil
}

// hasTags reports whether tags contains all wanted tags with the same values.
func hasTags(tags, want map[string]string) bool {
	for name, value := range want {
		if got, ok := tags[name]; !ok || got != value {
			return false
		}
	}
	return true
}

// newListEntry returns the description of the sandbox in a response to SandboxList. The caller must hold Server.mu.
func (s *modalSandbox) newListEntry() *pb.SandboxInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	task := pb.TaskInfo_builder{Id: s.task, SandboxId: s.id, StartedAt: s.created, Result: s.result}
	if s.result != nil {
		task.FinishedAt = float64(s.finished.UnixMicro()) / 1e6
	}
	return pb.SandboxInfo_builder{
		Id: s.id, CreatedAt: s.created, AppId: s.app.id, Name: s.name, Tags: tagsToList(s.tags), ImageId: s.image.id,
		TaskInfo: task.Build(), TimeoutSecs: s.definition.GetTimeoutSecs(), Regions: s.definition.GetSchedulerPlacement().GetRegions(),
		Metadata: pb.SandboxHandleMetadata_builder{AppId: s.app.id, Result: s.result}.Build(),
	}.Build()
}

// TaskGetCommandRouterAccess returns the address of a task's command router and
// a token for it.
func (c *controlPlane) TaskGetCommandRouterAccess(_ context.Context, r *pb.TaskGetCommandRouterAccessRequest) (*pb.TaskGetCommandRouterAccessResponse, error) {
	sb, err := c.findSandboxByTask(r.GetTaskId())
	if err != nil {
		return nil, err
	}
	if !sb.isRunning() {
		return nil, status.Errorf(codes.NotFound, "Task %s has already finished", sb.task)
	}
	return pb.TaskGetCommandRouterAccessResponse_builder{Jwt: c.signToken(sb.task, routerTokenLifetime), Url: c.routerURL()}.Build(), nil
}

// SandboxGetCommandRouterAccess is TaskGetCommandRouterAccess for Modal's second backend.
func (c *controlPlane) SandboxGetCommandRouterAccess(_ context.Context, r *pb.SandboxGetCommandRouterAccessRequest) (*pb.SandboxGetCommandRouterAccessResponse, error) {
	sb, err := c.lockAndFindSandbox(r.GetSandboxId(), true)
	if err != nil {
		return nil, err
	}
	if !sb.isRunning() {
		return nil, status.Errorf(codes.NotFound, "Sandbox %s has already finished", sb.id)
	}
	return pb.SandboxGetCommandRouterAccessResponse_builder{Jwt: c.signToken(sb.task, routerTokenLifetime), Url: c.routerURL()}.Build(), nil
}

// findSandboxByTask returns the sandbox in which the task with an id runs.
func (s *Server) findSandboxByTask(id string) (*modalSandbox, error) {
	if err := requireFields("task_id", id); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sb := range s.sandboxes {
		if sb.task == id {
			return sb, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "Task %s not found", id)
}
