package docker

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/volume"

	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// An MCP server of a sandbox is a container with the same restrictions, whose first process is also the runner. They
// share a volume in memory with a socket. The server can write to the volume, the sandbox can only read it.
const (
	// maxMCPServers is the largest number of MCP servers in containers of one sandbox.
	maxMCPServers = 64
	// socketVolumeBytes is the size limit in bytes of a volume for the socket of an MCP server, and socketVolumeFiles its limit of
	// files.
	socketVolumeBytes = 1 << 20
	socketVolumeFiles = 64
)

// newSocketName returns a new random name for the socket of an MCP server's container. A restarted container gets another name, so that the
// runner in the sandbox notices the restart.
func newSocketName() string { return strings.ToLower(rand.Text()[:12]) + ".sock" }

// socketVolumeName returns the name of the volume with the socket of the n-th MCP server of the sandbox id.
func socketVolumeName(id string, n int) string { return containerName(id) + "-mcp-" + strconv.Itoa(n) }

// serverContainerName returns the name of the container of the n-th MCP server of the sandbox id.
func serverContainerName(id string, n int) string { return socketVolumeName(id, n) }

// serverSocketDir returns the folder in a sandbox that contains the socket of the n-th MCP server.
func serverSocketDir(n int) string { return path.Join(mcpSocketsDir, strconv.Itoa(n)) }

// createSockets creates the volumes with the sockets that a new sandbox shares with the containers of its MCP servers. The volumes are in
// memory, because no limit would apply to them on disk.
func (p *Provider) createSockets(ctx context.Context, spec sandbox.Spec) error {
	for n := range spec.Servers {
		v := socketVolumeName(spec.ID, n)
		if err := p.callEngineNoResult(ctx, "make volume "+v, func(ctx context.Context) error {
			_, err := p.api.VolumeCreate(ctx, volume.CreateOptions{
				Name: v, Driver: "local",
				DriverOpts: map[string]string{"type": "tmpfs", "device": "tmpfs", "o": fmt.Sprintf("size=%d,nr_inodes=%d,mode=0777,noexec,nosuid,nodev", socketVolumeBytes, socketVolumeFiles)},
				Labels: map[string]string{
					labelVersion: labelsVersion, labelRole: roleSocket, labelEngine: p.cfg.Engine, labelSandbox: spec.ID, labelVolumesOwner: spec.ID,
				},
			})
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// removeServerVolumes removes the socket volumes of a sandbox's MCP servers, and releases the user numbers of the servers.
func (p *Provider) removeServerVolumes(ctx context.Context, id string) error {
	list, err := callEngine(ctx, p, "list volumes of "+id, func(ctx context.Context) (volume.ListResponse, error) {
		return p.api.VolumeList(ctx, volume.ListOptions{Filters: filters.NewArgs(
			filters.Arg("label", labelEngine+"="+p.cfg.Engine), filters.Arg("label", labelSandbox+"="+id))})
	})
	if err != nil {
		return err
	}
	for _, v := range list.Volumes {
		if v.Labels[labelRole] != roleSocket && v.Labels[labelRole] != roleUser {
			continue
		}
		if _, err := p.removeVolume(ctx, v.Name); err != nil {
			return err
		}
	}
	return nil
}

// listServers returns the containers of the MCP servers of a sandbox, or of all sandboxes if id is "".
func (p *Provider) listServers(ctx context.Context, id string) ([]container.Summary, error) {
	args := filters.NewArgs(filters.Arg("label", labelRole+"="+roleServer), filters.Arg("label", labelEngine+"="+p.cfg.Engine))
	if id != "" {
		args.Add("label", labelSandbox+"="+id)
	}
	return callEngine(ctx, p, "list MCP servers", func(ctx context.Context) ([]container.Summary, error) {
		return p.api.ContainerList(ctx, container.ListOptions{All: true, Filters: args})
	})
}

// removeServers removes the containers of a sandbox's MCP servers.
func (p *Provider) removeServers(ctx context.Context, id string) error {
	list, err := p.listServers(ctx, id)
	for _, c := range list {
		err = errors.Join(err, p.removeContainer(ctx, c.ID))
	}
	return err
}

// removeOrphanServers removes the containers of MCP servers whose sandbox does not exist. It lists the servers before the sandboxes. A
// server is created after its sandbox, so no server of an existing sandbox is removed.
func (p *Provider) removeOrphanServers(ctx context.Context) error {
	list, err := p.listServers(ctx, "")
	if err != nil || len(list) == 0 {
		return err
	}
	boxes, err := p.listSandboxes(ctx, "")
	if err != nil {
		return err
	}
	for _, c := range list {
		if slices.ContainsFunc(boxes, func(b listedSandbox) bool { return b.id == c.Labels[labelSandbox] }) {
			continue
		}
		p.cfg.Logger.Info("an MCP server's sandbox is gone", "container", c.ID, "sandbox", c.Labels[labelSandbox])
		if err := p.removeContainer(ctx, c.ID); err != nil {
			return err
		}
	}
	return nil
}

// freezeServers calls f, which pauses or resumes a container, for the containers of a sandbox's MCP servers that are in the state from.
func (p *Provider) freezeServers(ctx context.Context, id string, from container.ContainerState, what string, f func(context.Context, string) error) error {
	list, err := p.listServers(ctx, id)
	if err != nil {
		return err
	}
	for _, c := range list {
		if c.State != from {
			continue
		}
		err := p.callEngineNoResult(ctx, what+" an MCP server of "+id, func(ctx context.Context) error { return f(ctx, c.ID) })
		if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsConflict(err) { // it is gone, or another program was faster
			return err
		}
	}
	return nil
}

// StartServer starts the n-th MCP server of a sandbox, counted from 0, in its own container, unless it already runs. It returns the path of
// the server's socket, relative to the folder of sockets in the sandbox.
func (p *Provider) StartServer(ctx context.Context, id string, n int, s sandbox.MCPServer) (string, error) {
	box, err := p.findSandbox(ctx, id)
	if err != nil {
		return "", fmt.Errorf("serve: %w", err)
	}
	if n < 0 || uint64(n) >= box.servers {
		return "", fmt.Errorf("sandbox %s has its limit of %d MCP servers: %w", id, box.servers, sandbox.ErrNotFound)
	}
	for range maxCreateAttempts {
		var socket string
		if socket, err = p.serverSocket(ctx, id, n, s); err == nil && socket == "" {
			socket, err = p.createServer(ctx, box, n, s)
		}
		if err == nil {
			return path.Join(serverSocketDir(n), socket), nil
		}
		if !errors.Is(err, errVanished) {
			break
		}
		if retry.Pause(ctx, enginePollInterval) != nil {
			return "", ctx.Err()
		}
	}
	return "", guest.WithCode(sandbox.CodeMCPServerFailed, fmt.Sprintf("start MCP server %d of sandbox %s", n, id), err)
}

// serverSocket returns the path of the socket of a running MCP server, or "" if the server does not run. It removes the container of a
// server that has ended, or that was created from another definition.
func (p *Provider) serverSocket(ctx context.Context, id string, n int, s sandbox.MCPServer) (string, error) {
	list, err := p.listServers(ctx, id)
	if err != nil {
		return "", err
	}
	want := serverLabel(n, s)
	for _, c := range list {
		number, _, _ := strings.Cut(c.Labels[labelServerDefinition], " ")
		switch {
		case number != strconv.Itoa(n):
			continue
		case c.Labels[labelServerDefinition] == want && c.State == container.StateRunning:
			return c.Labels[labelSocket], nil
		case c.Labels[labelServerDefinition] == want && c.State == container.StatePaused:
			err := p.callEngineNoResult(ctx, "resume an MCP server of "+id, func(ctx context.Context) error { return p.api.ContainerUnpause(ctx, c.ID) })
			return c.Labels[labelSocket], err
		}
		if err := p.removeContainer(ctx, c.ID); err != nil {
			return "", err
		}
	}
	return "", nil
}

// serverLabel returns the value of the label with the number and the definition of an MCP server.
func serverLabel(n int, s sandbox.MCPServer) string {
	raw, err := json.Marshal(s)
	if err != nil {
		raw = []byte(s.Image) // strings always marshal
	}
	sum := sha256.Sum256(raw)
	return strconv.Itoa(n) + " " + hex.EncodeToString(sum[:8])
}

// createServer creates and starts the container of the n-th MCP server of a sandbox, and returns the name of its socket. The error wraps
// errVanished if another attempt may succeed.
func (p *Provider) createServer(ctx context.Context, box listedSandbox, n int, s sandbox.MCPServer) (string, error) {
	pic, err := p.lookUpAllowedImage(ctx, "", s.Image)
	if err != nil {
		return "", err
	}
	r, err := p.runnerForImage(pic)
	if err != nil {
		return "", err
	}
	if err := p.fillRunnerVolume(ctx, r, s.Image); err != nil {
		return "", err
	}
	u, reserved, err := p.serverUser(ctx, box.id, n)
	if err != nil {
		return "", err
	}
	// The account has the name and the home folder of the image's user, but not its number: the number could be that of
	// another sandbox.
	name, home := defaultUserName, homeDir
	if !isRoot(pic.user) {
		name, _, _ = strings.Cut(pic.user, ":")
		home = ""
	}
	if err := p.prepareVolumes(ctx, pic, u, name, home); err != nil {
		return "", err
	}
	socket := newSocketName()
	config, host, err := p.serverProfile(ctx, box, n, s, socket, pic, r, u)
	if err != nil {
		return "", err
	}
	made, err := callEngine(ctx, p, "make the container of an MCP server", func(ctx context.Context) (container.CreateResponse, error) {
		return p.api.ContainerCreate(ctx, config, host, nil, nil, serverContainerName(box.id, n))
	})
	if errdefs.IsConflict(err) {
		return "", fmt.Errorf("%w: another executor creates it: %w", errVanished, err) // the next attempt finds it
	}
	err = u.wrapVanished(err)
	if err == nil {
		err = errors.Join(p.checkServerVolumes(ctx, box.id, n, r), p.checkUserVolume(ctx, u, reserved))
	}
	if err == nil {
		err = p.startContainer(ctx, made.ID)
	}
	if err == nil {
		err = p.awaitServerReady(ctx, box.id, made.ID, socket)
	}
	if err == nil {
		return socket, nil
	}
	undo := context.WithoutCancel(ctx)
	if made.ID != "" {
		err = errors.Join(err, p.removeContainer(undo, made.ID))
	}
	if errors.Is(err, errNoSocket) {
		_, rerr := p.removeVolume(undo, socketVolumeName(box.id, n)) // empty, created by the engine
		err = errors.Join(err, rerr)
	}
	return "", errors.Join(err, p.releaseUser(undo, u, reserved))
}

// errNoSocket is returned when a sandbox was removed while the container of one of its MCP servers was being created.
var errNoSocket = fmt.Errorf("its volume for the socket is gone: %w", sandbox.ErrNotFound)

// checkServerVolumes returns an error unless the container of an MCP server mounts the volumes that were prepared for it; see checkVolumes.
func (p *Provider) checkServerVolumes(ctx context.Context, id string, n int, r *runnerBinary) error {
	if err := p.checkRunnerVolume(ctx, r); err != nil {
		return err
	}
	l, err := p.volumeLabels(ctx, socketVolumeName(id, n))
	if err == nil && l[labelRole] != roleSocket {
		return fmt.Errorf("sandbox %s: %w", id, errNoSocket)
	}
	return err
}

// awaitServerReady blocks until the runner in an MCP server's container listens on the socket.
func (p *Provider) awaitServerReady(ctx context.Context, id, containerID, socket string) error {
	b := &box{p: p, id: id, container: containerID}
	out, err := b.runRunner(ctx, nil, "mcp-ready", "--socket", path.Join(mcpSocketsDir, socket), "--within", runnerReadyTimeout.String())
	if err == nil && out.Code == 0 {
		return nil
	}
	if err != nil && guest.IsUnavailable(err) || ctx.Err() != nil {
		return errors.Join(err, ctx.Err())
	}
	said := p.outputTail(ctx, containerID)
	if said == "" {
		said = strings.TrimSpace(out.Stderr)
	}
	return guest.WithCode(sandbox.CodeMCPServerFailed, "its container does not become ready; its log ends with: "+said, nil)
}

// isRoot reports whether an image's user is root, by number or name.
func isRoot(user string) bool {
	user, _, _ = strings.Cut(user, ":")
	return user == "" || user == "root" || strings.Trim(user, "0") == ""
}

// serverProfile returns the configuration of the container of an MCP server.
func (p *Provider) serverProfile(ctx context.Context, box listedSandbox, n int, s sandbox.MCPServer, socket string, pic imageInfo, r *runnerBinary, u user) (*container.Config, *container.HostConfig, error) {
	limits := p.cfg.Limits
	cpus, err := p.engineCPUs(ctx)
	if err != nil {
		return nil, nil, err
	}
	limits.CPUs = min(limits.CPUs, float64(cpus))
	entrypoint, err1 := json.Marshal(append([]string{}, pic.entrypoint...))
	cmd, err2 := json.Marshal(append([]string{}, pic.cmd...))
	if err := errors.Join(err1, err2); err != nil {
		return nil, nil, fmt.Errorf("image %q: %w", s.Image, err)
	}
	tmpfs := p.serverTmpfs(pic)
	scratch := slices.Sorted(maps.Keys(tmpfs))
	config := &container.Config{
		Image: pic.ref, Hostname: "mcp", StopSignal: "SIGTERM", Healthcheck: &container.HealthConfig{Test: []string{"NONE"}},
		Entrypoint: []string{
			runnerPath, "mcp-serve", "--socket", path.Join(mcpSocketsDir, socket),
			"--entrypoint", string(entrypoint), "--cmd", string(cmd), "--scratch", strings.Join(scratch, ","),
		},
		User: u.String(),
		Labels: map[string]string{
			labelVersion: labelsVersion, labelRole: roleServer, labelUser: strconv.Itoa(u.id), labelEngine: p.cfg.Engine, labelSandbox: box.id, labelServerDefinition: serverLabel(n, s), labelSocket: socket, labelRunner: r.digest,
			labelTenant: box.labels.Tenant, labelSession: box.labels.Session, labelEpoch: strconv.FormatUint(box.labels.Epoch, 10),
		},
	}
	if isRoot(pic.user) {
		config.Env = []string{"HOME=" + homeDir}
	}
	host := p.restrictedHostConfig(limits)
	host.Tmpfs = tmpfs
	host.Mounts = append(host.Mounts, helperVolume{name: r.volumeName()}.mount(binDir, true), helperVolume{name: socketVolumeName(box.id, n)}.mount(mcpSocketsDir, false))
	host.Mounts = append(host.Mounts, u.mounts(pic)...)
	if !s.Egress {
		return config, host, nil
	}
	token, err := p.egressToken(ctx, box)
	if err != nil || token == "" {
		return config, host, err
	}
	config.Env = append(config.Env, "SPOOL_RUNNER_EGRESS_SOCKET="+egressSocket, egressTokenPrefix+token)
	host.Mounts = append(host.Mounts, p.egressMount()...)
	return config, host, nil
}

// serverTmpfs returns the in-memory folders of an MCP server's container, with their mount options.
func (p *Provider) serverTmpfs(pic imageInfo) map[string]string {
	size := "rw,exec,nosuid,nodev,mode=1777," + tmpfsLimit(p.cfg.TmpBytes)
	out := map[string]string{shmDir: shmOptions}
	for _, v := range pic.volumes {
		out[filepath.Clean(v)] = size
	}
	out["/tmp"], out[homeDir] = size, size
	for _, taken := range []string{binDir, egressDir, mcpSocketsDir, userDir} {
		delete(out, taken)
	}
	return out
}

// egressTokenPrefix is the beginning of the environment variable that holds a sandbox's token for the egress proxy.
const egressTokenPrefix = "SPOOL_RUNNER_EGRESS_TOKEN="

// egressToken returns the token with which a sandbox identifies itself to the egress proxy, "" for a sandbox without
// egress.
func (p *Provider) egressToken(ctx context.Context, box listedSandbox) (string, error) {
	got, err := callEngine(ctx, p, "look at sandbox "+box.id, func(ctx context.Context) (container.InspectResponse, error) {
		return p.api.ContainerInspect(ctx, box.container)
	})
	if errdefs.IsNotFound(err) {
		return "", fmt.Errorf("sandbox %s: %w", box.id, sandbox.ErrNotFound)
	}
	if err != nil {
		return "", err
	}
	for _, v := range got.Config.Env {
		if token, ok := strings.CutPrefix(v, egressTokenPrefix); ok {
			return token, nil
		}
	}
	return "", nil
}
