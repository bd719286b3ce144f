package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	dockerimage "github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/client"

	"github.com/spoolhq/spool/cmd/mockmodal/internal/guest"
)

// ownerLabel is the label of all Docker objects that a mockmodal server creates. Its value is the absolute path of the
// server's data folder.
const ownerLabel = "dev.spool.mockmodal"

// guestStartTimeout is the maximum time that the guest in a new container may take to listen.
const guestStartTimeout = time.Minute

// dockerEngine runs the containers of one mockmodal server on a Docker engine.
type dockerEngine struct {
	api     *client.Client
	logger  *slog.Logger
	owner   string // value of ownerLabel: the data folder
	sockets string // folder with a short path: a folder for each sandbox, with the guest's socket
	program string // path of this program

	network string // id
	gateway netip.Addr
	names   []string // names that resolve to the gateway in sandboxes
}

// newEngine connects to the Docker engine, removes the objects of servers that were killed, and creates a network. The
// caller must hold the lock of the data folder.
func newEngine(ctx context.Context, cfg Config, logger *slog.Logger) (*dockerEngine, error) {
	options := []client.Opt{client.FromEnv, client.WithAPIVersionNegotiation()}
	if cfg.DockerHost != "" {
		options = append(options, client.WithHost(cfg.DockerHost))
	}
	api, err := client.NewClientWithOpts(options...)
	if err != nil {
		return nil, fmt.Errorf("connect to the Docker engine: %w", err)
	}
	program, err := checkProgram()
	if err != nil {
		return nil, err
	}
	e := &dockerEngine{api: api, logger: logger, owner: cfg.Data, program: program, names: cfg.GatewayNames}
	if err := e.removeLeftovers(ctx); err != nil {
		return nil, fmt.Errorf("remove what earlier servers left: %w", err)
	}
	if e.sockets, err = createSocketFolder(cfg.Data); err != nil {
		return nil, err
	}
	if err := e.createNetwork(ctx); err != nil {
		return nil, errors.Join(err, e.close(ctx))
	}
	return e, nil
}

// createNetwork creates the Docker network of the sandboxes, and sets e.network and e.gateway.
func (e *dockerEngine) createNetwork(ctx context.Context) error {
	made, err := e.api.NetworkCreate(ctx, "mockmodal-"+randomSuffix(8), network.CreateOptions{Driver: "bridge", Labels: e.ownerLabels()})
	if err != nil {
		return fmt.Errorf("create the sandboxes' network: %w", err)
	}
	e.network = made.ID
	state, err := e.api.NetworkInspect(ctx, made.ID, network.InspectOptions{})
	if err != nil {
		return fmt.Errorf("inspect the sandboxes' network: %w", err)
	}
	for _, config := range state.IPAM.Config {
		if e.gateway, err = netip.ParseAddr(config.Gateway); err == nil {
			return nil
		}
	}
	return fmt.Errorf("the sandboxes' network has no gateway: %v", state.IPAM.Config)
}

// ownerLabels returns the labels of everything that this server creates on the engine.
func (e *dockerEngine) ownerLabels() map[string]string { return map[string]string{ownerLabel: e.owner} }

// close removes everything that the server has created on the Docker engine.
func (e *dockerEngine) close(ctx context.Context) error {
	return errors.Join(e.removeServerObjects(ctx, e.owner), e.api.Close())
}

// removeImages removes the Docker images that a filter selects. The engine removes an image only after the images that
// were built on it, so removeImages makes further passes until no image is left or a pass removed none.
func (e *dockerEngine) removeImages(ctx context.Context, mine filters.Args) error {
	for before := -1; ; {
		images, err := e.api.ImageList(ctx, dockerimage.ListOptions{All: true, Filters: mine})
		if err != nil {
			return fmt.Errorf("list images: %w", err)
		}
		if len(images) == 0 {
			return nil
		}
		for _, i := range images {
			err = errors.Join(err, e.removeImage(ctx, i.ID))
		}
		if len(images) == before {
			return err
		}
		before = len(images)
	}
}

// removeContainer kills and removes a container, and returns when it is gone.
func (e *dockerEngine) removeContainer(ctx context.Context, id string) error {
	err := e.api.ContainerRemove(ctx, id, container.RemoveOptions{Force: true, RemoveVolumes: true})
	if errdefs.IsConflict(err) { // it is being removed already
		gone, failed := e.api.ContainerWait(ctx, id, container.WaitConditionRemoved)
		select {
		case <-gone:
			return nil
		case err = <-failed:
		}
	}
	return ignoreMissing(err)
}

// removeImage removes a Docker image, but not the images on which it was built.
func (e *dockerEngine) removeImage(ctx context.Context, id string) error {
	_, err := e.api.ImageRemove(ctx, id, dockerimage.RemoveOptions{Force: true})
	return ignoreMissing(err)
}

// ignoreMissing returns nil if err means that an object does not exist on the Docker engine, and otherwise err.
func ignoreMissing(err error) error {
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// findImageID returns the id that the Docker engine has for an image reference. It does not pull the image.
func (e *dockerEngine) findImageID(ctx context.Context, reference string) (string, error) {
	found, err := e.api.ImageInspect(ctx, reference)
	return found.ID, err
}

// containerSpec describes the Docker container of a sandbox.
type containerSpec struct {
	sandbox string // id
	image   string // the engine's id
	network bool
	nanoCPU int64 // CPU limit in billionths of a CPU; 0 for no limit
	memory  int64 // bytes; 0 for no limit
}

// sandboxContainer is the running container of a sandbox.
type sandboxContainer struct {
	id     string
	pid    int    // process id of the container's main process on the server's machine
	folder string // on the server's machine; guest.MountPath in the container
	dir    string // working directory of the image
	lease  net.Conn
}

// runContainer creates and starts the container of a sandbox, and returns when the guest in the container listens.
func (e *dockerEngine) runContainer(ctx context.Context, spec containerSpec) (*sandboxContainer, error) {
	folder := filepath.Join(e.sockets, randomSuffix(10))
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	made, err := e.createContainer(context.WithoutCancel(ctx), spec, folder) // a cancelled call might leave a container of unknown id
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(folder))
	}
	b := &sandboxContainer{id: made, folder: folder}
	if err := e.startContainer(ctx, b); err != nil {
		return nil, errors.Join(err, e.discardContainer(context.WithoutCancel(ctx), b))
	}
	return b, nil
}

// createContainer creates a container without starting it, and returns its id. folder is mounted as guest.MountPath.
func (e *dockerEngine) createContainer(ctx context.Context, spec containerSpec, folder string) (string, error) {
	withInit := true
	host := &container.HostConfig{
		Init: &withInit,
		Mounts: []mount.Mount{
			{Type: mount.TypeBind, Source: e.program, Target: guest.BinaryPath, ReadOnly: true},
			{Type: mount.TypeBind, Source: folder, Target: guest.MountPath},
		},
		NetworkMode: "none",
		Resources:   container.Resources{NanoCPUs: spec.nanoCPU, Memory: spec.memory},
	}
	if spec.network {
		host.NetworkMode = container.NetworkMode(e.network)
		for _, name := range e.names {
			host.ExtraHosts = append(host.ExtraHosts, name+":"+e.gateway.String())
		}
	}
	config := &container.Config{
		Image: spec.image, User: "0:0", Labels: e.ownerLabels(), Hostname: "modal",
		Entrypoint: []string{guest.BinaryPath, "guest"}, Cmd: []string{},
	}
	made, err := e.api.ContainerCreate(ctx, config, host, nil, nil, "mockmodal-"+strings.ToLower(spec.sandbox))
	return made.ID, err
}

// startContainer starts a container, and opens the connection b.lease, which keeps the guest in the container running.
func (e *dockerEngine) startContainer(ctx context.Context, b *sandboxContainer) error {
	if err := e.api.ContainerStart(context.WithoutCancel(ctx), b.id, container.StartOptions{}); err != nil {
		return err
	}
	state, err := e.api.ContainerInspect(ctx, b.id)
	if err != nil {
		return err
	}
	b.pid, b.dir = state.State.Pid, state.Config.WorkingDir
	b.lease, err = b.dialGuest(ctx, guest.Request{Lease: true})
	return err
}

// discardContainer kills and removes a container, and removes its folder on this machine.
func (e *dockerEngine) discardContainer(ctx context.Context, b *sandboxContainer) error {
	if b.lease != nil {
		_ = b.lease.Close() // the container is killed anyway
	}
	return errors.Join(e.removeContainer(ctx, b.id), os.RemoveAll(b.folder))
}

// dialGuest connects to the guest of the container and sends it the request. If the container is new, dialGuest waits
// until the guest listens.
func (b *sandboxContainer) dialGuest(ctx context.Context, request guest.Request) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, guestStartTimeout)
	defer cancel()
	socket := filepath.Join(b.folder, filepath.Base(guest.SocketPath))
	for {
		var dialer net.Dialer
		conn, err := dialer.DialContext(ctx, "unix", socket)
		if err == nil {
			return conn, guest.WriteRequest(conn, request)
		}
		if reason, readErr := os.ReadFile(filepath.Join(b.folder, filepath.Base(guest.ErrorFilePath))); readErr == nil {
			return nil, fmt.Errorf("the container's first process failed: %s", reason)
		}
		if request.Exec != nil { // the guest has listened before: it is gone
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("the container's first process does not listen: %w", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// commitContainer creates an image from a container's file system, and returns the image's id.
func (e *dockerEngine) commitContainer(ctx context.Context, id string) (string, error) {
	changes := []string{fmt.Sprintf("LABEL %s=%q", ownerLabel, e.owner)}
	made, err := e.api.ContainerCommit(ctx, id, container.CommitOptions{Pause: true, Changes: changes})
	return made.ID, err
}

// ranOutOfMemory reports whether the kernel has killed a process of the container because the container had no memory
// left.
func (e *dockerEngine) ranOutOfMemory(ctx context.Context, id string) bool {
	state, err := e.api.ContainerInspect(ctx, id)
	return err == nil && state.State.OOMKilled
}

// egressRule allows outgoing connections of a container to a network, on one TCP port or on all.
type egressRule struct {
	network netip.Prefix
	port    int // TCP port; 0 means all ports and protocols
}

// resolveAllowedName returns the IP addresses of a name in a sandbox's allowlist of domains. It returns an error for
// wildcards. Modal supports wildcards, because it compares the name in the TLS handshake and not addresses.
func (e *dockerEngine) resolveAllowedName(ctx context.Context, name string) ([]netip.Addr, error) {
	if e.isGatewayName(name) {
		return []netip.Addr{e.gateway}, nil
	}
	if strings.Contains(name, "*") {
		return nil, fmt.Errorf("%s: mockmodal does not implement wildcards", name)
	}
	return net.DefaultResolver.LookupNetIP(ctx, "ip4", name)
}

// isGatewayName reports whether sandboxes resolve name to the gateway of their network.
func (e *dockerEngine) isGatewayName(name string) bool {
	for _, known := range e.names {
		if strings.EqualFold(known, name) {
			return true
		}
	}
	return false
}

// restrictEgress allows only the outgoing connections of a container that the rules allow. Open connections that are no
// longer allowed are reset.
func (e *dockerEngine) restrictEgress(ctx context.Context, b *sandboxContainer, allowed []egressRule) error {
	rules := []string{"*filter", ":INPUT ACCEPT", ":FORWARD DROP", ":OUTPUT DROP", "-A OUTPUT -o lo -j ACCEPT"}
	for _, r := range allowed {
		if !r.network.Addr().Is4() {
			continue // the network has no IPv6
		}
		line := "-A OUTPUT -d " + r.network.Masked().String()
		if r.port != 0 {
			line += fmt.Sprintf(" -p tcp --dport %d", r.port)
		}
		rules = append(rules, line+" -j ACCEPT")
	}
	rules = append(rules, "-A OUTPUT -p tcp -j REJECT --reject-with tcp-reset", "-A OUTPUT -j REJECT", "COMMIT", "")
	command := exec.CommandContext(ctx, "nsenter", "--net", "--target", fmt.Sprint(b.pid), "iptables-restore", "--wait")
	command.Stdin = strings.NewReader(strings.Join(rules, "\n"))
	if out, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("set the sandbox's firewall: %w: %s", err, out)
	}
	return nil
}

// mustMarshal returns the JSON of a value whose encoding cannot fail.
func mustMarshal(value any) []byte {
	data, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return data
}
