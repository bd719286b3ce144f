package docker

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// The labels of containers and volumes.
const (
	labelVersion          = "dev.spool.version" // version of these labels and of the layout inside
	labelRole             = "dev.spool.role"    // one of the roles below
	labelEngine           = "dev.spool.engine"
	labelSandbox          = "dev.spool.sandbox"
	labelTenant           = "dev.spool.tenant"
	labelSession          = "dev.spool.session"
	labelEpoch            = "dev.spool.epoch"
	labelExecutor         = "dev.spool.executor"
	labelVolumesOwner     = "dev.spool.volumes" // the sandbox that the volumes are named after
	labelRunner           = "dev.spool.runner"  // the runner's digest
	labelLayer            = "dev.spool.layer"   // on a sandbox or a note: the volume with packages; on such a volume: its digest
	labelFilledLayer      = "dev.spool.fills"   // on a sandbox: the volume into which it installs packages
	labelServers          = "dev.spool.servers" // maximum number of MCP servers of a sandbox
	labelServerDefinition = "dev.spool.server"  // on an MCP server: its number, and its definition
	labelSecret           = "dev.spool.secret"  // on a sandbox: the secret with which executors prove themselves to its runner; processes inside cannot read it; sandboxes of earlier releases have none
	labelSocket           = "dev.spool.socket"  // on an MCP server: the name of its socket
	labelUser             = "dev.spool.user"    // on containers, workspaces and records: the number of the user; those of earlier releases have none
)

// labelsVersion is the version of the labels, and of the file layout in sandboxes.
const labelsVersion = "1"

// The roles.
const (
	roleSandbox  = "sandbox"
	roleHelper   = "helper" // a container that is never started, through which volumes are filled
	roleVolume   = "volume" // workspace and records
	roleNote     = "note"   // an empty volume whose label names the owner of a sandbox's volumes
	roleRunner   = "runner"
	roleLayer    = "layer"   // packages that agents depend on
	roleComplete = "whole"   // a note that the layer of a digest is complete, with the name of its volume; empty
	roleLastUse  = "lastuse" // a note whose creation is the last use of a layer; empty
	roleServer   = "server"  // an MCP server of a sandbox
	roleSocket   = "socket"  // the volume with the socket of an MCP server
	roleUser     = "user"    // a volume that reserves a user
)

// namePrefix is the prefix of the names of all containers and volumes of Spool on a Docker engine.
const namePrefix = "spool-"

// containerName returns the name of the container of a sandbox that was not adopted from the warm pool.
func containerName(id string) string { return namePrefix + id }

// adoptedName returns the name of the container of a sandbox that a session took from the warm pool. The name contains the
// labels of the session, because a container's name can be changed and its labels cannot.
func adoptedName(id string, l sandbox.Labels) string {
	s := strings.Join([]string{containerName(id), l.Tenant, l.Session, strconv.FormatUint(l.Epoch, 10)}, ".")
	if l.Executor != "" {
		s += "." + l.Executor
	}
	return s
}

// checkLabels returns an error if the values of labels could not be written into a container's name and read back from it.
func (p *Provider) checkLabels(l sandbox.Labels) error {
	var err error
	if l.Tenant != "" || l.Session != "" {
		err = errors.Join(events.CheckTenant("tenant", l.Tenant), events.CheckID("session", events.KindSession, l.Session))
	}
	if l.Executor != "" {
		err = errors.Join(err, events.CheckID("executor", events.KindExecutor, l.Executor))
	}
	if l.Engine != p.cfg.Engine {
		err = errors.Join(err, fmt.Errorf("engine: %q, want the engine of this provider, %q", l.Engine, p.cfg.Engine))
	}
	return err
}

// sandboxLabels returns the labels of a new sandbox's container. It sets every label of Spool, so that the image cannot
// provide one.
func sandboxLabels(pl containerPlan) map[string]string {
	spec := pl.spec
	return map[string]string{
		labelVersion: labelsVersion, labelRole: roleSandbox, labelSandbox: spec.ID, labelVolumesOwner: pl.owner, labelRunner: pl.runner.digest,
		labelUser:   strconv.Itoa(pl.user.id),
		labelEngine: spec.Labels.Engine, labelTenant: spec.Labels.Tenant, labelSession: spec.Labels.Session,
		labelEpoch: strconv.FormatUint(spec.Labels.Epoch, 10), labelExecutor: spec.Labels.Executor,
		labelLayer: spec.Layer, labelFilledLayer: spec.LayerTarget, labelServers: strconv.Itoa(spec.Servers), labelSecret: pl.secret,
	}
}

// listedSandbox is a sandbox as read from its container's entry in the engine's list.
type listedSandbox struct {
	container string // the engine's id
	id        string
	owner     string
	name      string
	labels    sandbox.Labels
	created   time.Time
	state     container.ContainerState
	servers   uint64 // maximum number of its MCP servers
	secret    string // with which executors prove themselves to its runner
}

// isAlive reports whether the container runs or is paused.
func (f listedSandbox) isAlive() bool {
	return f.state == container.StateRunning || f.state == container.StatePaused
}

// parseContainer returns the sandbox of a container in the engine's list of containers.
func parseContainer(c container.Summary) listedSandbox {
	f := listedSandbox{
		container: c.ID, id: c.Labels[labelSandbox], owner: c.Labels[labelVolumesOwner], created: time.Unix(c.Created, 0), state: c.State,
		servers: parseUintOrZero(c.Labels[labelServers]), secret: c.Labels[labelSecret],
		labels: sandbox.Labels{
			Tenant: c.Labels[labelTenant], Session: c.Labels[labelSession], Engine: c.Labels[labelEngine],
			Executor: c.Labels[labelExecutor], Epoch: parseUintOrZero(c.Labels[labelEpoch]),
		},
	}
	for _, n := range c.Names {
		n = strings.TrimPrefix(n, "/")
		if n != containerName(f.id) && !strings.HasPrefix(n, containerName(f.id)+".") {
			continue
		}
		f.name = n
		if part := strings.Split(n, "."); len(part) >= 4 {
			f.labels.Tenant, f.labels.Session, f.labels.Epoch, f.labels.Executor = part[1], part[2], parseUintOrZero(part[3]), ""
			if len(part) > 4 {
				f.labels.Executor = part[4]
			}
		}
	}
	return f
}

// parseUintOrZero parses a decimal number. It returns 0 for any other text, which Spool does not write.
func parseUintOrZero(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// listSandboxes returns the sandboxes of this engine, or only the one with an id if id is not "".
func (p *Provider) listSandboxes(ctx context.Context, id string) ([]listedSandbox, error) {
	args := filters.NewArgs(filters.Arg("label", labelRole+"="+roleSandbox), filters.Arg("label", labelEngine+"="+p.cfg.Engine))
	if id != "" {
		args.Add("label", labelSandbox+"="+id)
	}
	list, err := callEngine(ctx, p, "list sandboxes", func(ctx context.Context) ([]container.Summary, error) {
		return p.api.ContainerList(ctx, container.ListOptions{All: true, Filters: args})
	})
	if err != nil {
		return nil, err
	}
	out := make([]listedSandbox, len(list))
	for i, c := range list {
		out[i] = parseContainer(c)
	}
	return out, nil
}

// findSandbox returns the sandbox with an id, or sandbox.ErrNotFound if it has no container.
func (p *Provider) findSandbox(ctx context.Context, id string) (listedSandbox, error) {
	if err := events.CheckID("sandbox id", events.KindSandbox, id); err != nil {
		return listedSandbox{}, fmt.Errorf("%w: %w", sandbox.ErrNotFound, err)
	}
	list, err := p.listSandboxes(ctx, id)
	if err != nil {
		return listedSandbox{}, err
	}
	if len(list) == 0 {
		return listedSandbox{}, fmt.Errorf("sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	return list[0], nil
}
