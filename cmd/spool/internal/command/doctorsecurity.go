package command

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	dockersystem "github.com/docker/docker/api/types/system"
	"github.com/docker/docker/client"
	"github.com/docker/go-connections/nat"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/executor"
)

// The labels with which compose marks its containers.
const (
	composeProjectLabel = "com.docker.compose.project"
	composeServiceLabel = "com.docker.compose.service"
)

// engineSocketPath is the path of the Docker engine's socket in containers that mount it.
const engineSocketPath = "/var/run/docker.sock"

// securityChecks is the state that the checks of "spool doctor --security" share.
type securityChecks struct {
	*doctorChecks
	containers []container.InspectResponse // containers of the compose project; nil if there are none
	engine     *dockersystem.Info          // nil if no engine responds
	engineErr  error
}

// allChecks returns the checks of an installation's security, in the order of "Hardening checklist" in
// docs/security.md.
func (x *securityChecks) allChecks() []doctorCheck {
	return []doctorCheck{
		{"transport", x.checkGatewayTLS},
		{"keys required", x.checkAPIRequiresKey},
		{localAgentsCheckName, x.checkLocalAgents},
		{"metrics closed", x.checkMetricsRequireKey},
		{"secret files", x.checkSecretFiles},
		{"database roles", x.checkDatabaseRoles},
		{"published ports", x.checkPublishedPorts},
		{"services confined", x.checkContainerRestrictions},
		{"engine's socket", x.checkEngineSocketHolders},
		{"engine", x.checkEngineOptions},
		{"sandbox runtime", x.checkSandboxRuntime},
		{"kernel", x.checkKernel},
		{"disk limits of sandboxes", x.checkProjectDiskLimit},
		{"image allowlist", x.checkImageAllowlist},
		{"images by digest", x.checkImageDigests},
		{"egress", x.checkEgressSettings},
		{"signed log", x.checkSignedLog},
		{"web origins", x.checkWebOrigins},
	}
}

// newSecurityChecks returns the security checks. It reads the containers of the compose project from the Docker engine.
func newSecurityChecks(ctx context.Context, x *doctorChecks) *securityChecks {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	s := &securityChecks{doctorChecks: x}
	s.engineErr = s.inspectContainers(ctx)
	return s
}

// inspectContainers reads the running containers of the compose project, and the engine's options, from the Docker
// engine.
func (x *securityChecks) inspectContainers(ctx context.Context) error {
	api, err := client.NewClientWithOpts(client.FromEnv, client.WithAPIVersionNegotiation())
	if err != nil {
		return err
	}
	defer api.Close() //nolint:errcheck // nothing was written
	info, err := api.Info(ctx)
	if err != nil {
		return err
	}
	x.engine = &info
	list, err := api.ContainerList(ctx, container.ListOptions{Filters: filters.NewArgs(filters.Arg("label", composeProjectLabel+"="+x.Project))})
	if err != nil {
		return err
	}
	for _, c := range list {
		one, err := api.ContainerInspect(ctx, c.ID)
		if errdefs.IsNotFound(err) { // the container ended meanwhile
			continue
		}
		if err != nil {
			return err
		}
		x.containers = append(x.containers, one)
	}
	return nil
}

// composeServiceOf returns the name of the compose service to which a container belongs.
func composeServiceOf(c container.InspectResponse) string {
	return c.Config.Labels[composeServiceLabel]
}

// requireServices reports whether containers of all given services of the compose project run. If not, f is the finding
// of a check that needs them.
func (x *securityChecks) requireServices(services ...string) (f finding, runs bool) {
	if x.engineErr != nil {
		return noteFinding(fmt.Sprintf("the Docker engine cannot be reached: %v", x.engineErr), "run spool doctor where the engine can be reached, or set DOCKER_HOST"), false
	}
	if len(x.containers) == 0 {
		return okFinding("no compose project %s runs on this engine", x.Project), false
	}
	for _, s := range services {
		if !slices.ContainsFunc(x.containers, func(c container.InspectResponse) bool { return composeServiceOf(c) == s }) {
			return noteFinding(fmt.Sprintf("no %s of compose project %s runs on this engine", s, x.Project), "start it, and run spool doctor again"), false
		}
	}
	return finding{}, true
}

// containerVariable returns the value of an environment variable of a container, or "".
func containerVariable(c container.InspectResponse, name string) string {
	for _, e := range c.Config.Env {
		if value, is := strings.CutPrefix(e, name+"="); is {
			return value
		}
	}
	return ""
}

// variableValues returns the distinct values that an environment variable has in the containers of the given services.
func (x *securityChecks) variableValues(name string, services ...string) []string {
	var out []string
	for _, c := range x.containers {
		if value := containerVariable(c, name); slices.Contains(services, composeServiceOf(c)) && !slices.Contains(out, value) {
			out = append(out, value)
		}
	}
	return out
}

// gatewayURL returns the URL of the gateway to check.
func (x *securityChecks) gatewayURL() string {
	switch {
	case x.URL != "":
		return x.URL
	case x.running != nil:
		return x.running.URL
	}
	return x.app.DefaultURL
}

// checkGatewayTLS checks that the gateway's URL uses TLS or is on this machine.
func (x *securityChecks) checkGatewayTLS(context.Context) finding {
	u, err := url.Parse(x.gatewayURL())
	if err != nil || u.Host == "" {
		return failedFinding(fmt.Sprintf("url: %q is not an address", x.gatewayURL()), "use a URL like https://spool.example.com")
	}
	if u.Scheme == "https" || isLoopback(u.Hostname()) {
		return okFinding("%s", u.Redacted())
	}
	return failedFinding(fmt.Sprintf("%s is neither TLS nor loopback: others on the network can read keys and content", u.Redacted()), `serve TLS: docs/security.md, "TLS"`)
}

// isLoopback reports whether a host is the local machine.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func (x *securityChecks) checkAPIRequiresKey(ctx context.Context) finding {
	return x.checkPathRequiresKey(ctx, "/api/sessions", "set SPOOL_AUTH=keys and SPOOL_ROOT_KEY; spool up: leave out --no-auth")
}

func (x *securityChecks) checkMetricsRequireKey(ctx context.Context) finding {
	return x.checkPathRequiresKey(ctx, "/metrics", "set SPOOL_AUTH=keys, or start spool up without --no-auth: the gateway's metrics then need the root key or the local key")
}

// checkPathRequiresKey checks that the server rejects requests for a path that have no API key.
func (x *securityChecks) checkPathRequiresKey(ctx context.Context, path, remedy string) finding {
	address := strings.TrimRight(x.gatewayURL(), "/") + path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return failedFinding(err.Error(), "")
	}
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true}
	if x.CA != "" {
		pool, err := certificate.ReadCertPool(x.CA)
		if err != nil {
			return failedFinding("ca-file: "+err.Error(), "name a PEM file with the authority's certificate")
		}
		transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}
	}
	res, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return noteFinding(fmt.Sprintf("no server responds: %v", err), "name it with --url")
	}
	defer res.Body.Close() //nolint:errcheck // it is not read
	switch {
	case res.StatusCode == http.StatusUnauthorized || res.StatusCode == http.StatusForbidden:
		return okFinding("%s without a key is rejected with %d", path, res.StatusCode)
	case res.StatusCode >= http.StatusInternalServerError:
		return noteFinding(fmt.Sprintf("%s responds with %d", address, res.StatusCode), "try again when the server is ready")
	case isLoopback(req.URL.Hostname()):
		return noteFinding(fmt.Sprintf("%s is served without a key to every program on this machine, also to local agents, which can approve their own calls", path), remedy)
	}
	return failedFinding(fmt.Sprintf("%s is served without a key", address), remedy)
}

// checkSecretFiles checks that the files with passwords and keys can be read by their owner only.
func (x *securityChecks) checkSecretFiles(context.Context) finding {
	files := []string{x.EnvFile}
	for _, name := range []string{"local.key", "spool.json", "log.keys", "heads.key", "secrets.key"} {
		files = append(files, filepath.Join(x.dir, name))
	}
	var seen, open []string
	for _, f := range files {
		info, err := os.Stat(f)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return noteFinding(err.Error(), "run spool doctor as the owner of the file")
		}
		seen = append(seen, f)
		if info.Mode().Perm()&0o077 != 0 {
			open = append(open, fmt.Sprintf("%s (%#o)", f, info.Mode().Perm()))
		}
	}
	switch {
	case len(open) > 0:
		return failedFinding("others may read "+strings.Join(open, ", "), "chmod 600, and renew the secrets in them if other users are on this machine")
	case len(seen) == 0:
		return okFinding("none at %s", strings.Join(files, ", "))
	}
	return okFinding("%s: readable only by the owner", strings.Join(seen, ", "))
}

// checkDatabaseRoles checks the privileges of the role with which the gateway connects to Postgres. It uses the URL of
// --database-url, or else the URL in the gateway's container.
func (x *securityChecks) checkDatabaseRoles(ctx context.Context) finding {
	if x.Database != "" || x.running != nil {
		return x.checkPostgres(ctx)
	}
	if f, there := x.requireServices("gateway"); !there {
		return f
	}
	for _, database := range x.variableValues("SPOOL_DATABASE_URL", "gateway") {
		u, err := url.Parse(database)
		if err != nil {
			return failedFinding("the gateway's SPOOL_DATABASE_URL is not a URL", "use a URL like postgres://user:password@host:5432/name")
		}
		if u.User.Username() != readmodel.GatewayRole {
			return noteFinding("gateways connect as "+u.User.Username(), `see "Roles in Postgres" in docs/security.md for a separate role of the gateway`)
		}
	}
	return okFinding("gateways connect as %s", readmodel.GatewayRole)
}

func (x *securityChecks) checkPublishedPorts(context.Context) finding {
	if f, there := x.requireServices(); !there {
		return f
	}
	var inner, clear, proxied []string
	for _, c := range x.containers {
		for port, bindings := range c.HostConfig.PortBindings {
			for _, b := range bindings {
				if isLoopback(b.HostIP) {
					continue
				}
				published := fmt.Sprintf("%s %s at %s", composeServiceOf(c), port, net.JoinHostPort(b.HostIP, b.HostPort))
				switch {
				case isEgressListener(c, port):
				case composeServiceOf(c) != "gateway":
					inner = append(inner, published)
				case containerVariable(c, "SPOOL_TLS_CERT") != "":
				case containerVariable(c, "SPOOL_BEHIND_TLS_PROXY") == "true":
					proxied = append(proxied, published)
				default:
					clear = append(clear, published)
				}
			}
		}
	}
	switch {
	case len(inner) > 0:
		return failedFinding("only gateways serve clients, but these services can be reached from other machines: "+strings.Join(inner, ", "), "remove their ports from the compose file")
	case len(clear) > 0:
		return failedFinding("without TLS: "+strings.Join(clear, ", "), `publish them on 127.0.0.1 behind a proxy that speaks TLS, or give the gateway a certificate: docs/security.md, "TLS"`)
	case len(proxied) > 0:
		return noteFinding("SPOOL_BEHIND_TLS_PROXY is set, so these addresses serve the gateway without TLS: "+strings.Join(proxied, ", "), "restrict them to the proxy, with a firewall or a separate network")
	}
	return okFinding("only gateways with TLS, and the egress proxy's TLS listener, are published beyond loopback")
}

// isEgressListener reports whether a port of a container is the TLS listener of the egress proxy, to which sandboxes at
// Modal connect.
func isEgressListener(c container.InspectResponse, port nat.Port) bool {
	_, listens, err := net.SplitHostPort(containerVariable(c, "SPOOL_EGRESS_LISTEN_TLS"))
	return err == nil && composeServiceOf(c) == "egress" && port == nat.Port(listens+"/tcp")
}

// usesModal reports whether all executors of the compose project run their sandboxes at Modal.
func (x *securityChecks) usesModal() bool {
	providers := x.variableValues("SPOOL_SANDBOX", "executor")
	return len(providers) > 0 && !slices.ContainsFunc(providers, func(p string) bool { return p != executor.ProviderModal })
}

// checkContainerRestrictions checks that each container of the project has the restrictions that deploy/compose.yaml
// sets.
func (x *securityChecks) checkContainerRestrictions(context.Context) finding {
	if f, there := x.requireServices(); !there {
		return f
	}
	var wrong []string
	for _, c := range x.containers {
		h := c.HostConfig
		for what, is := range map[string]bool{
			"privileged":         h.Privileged,
			"keeps capabilities": !slices.Contains([]string(h.CapDrop), "ALL"),
			"may gain privileges": !slices.ContainsFunc(h.SecurityOpt, func(o string) bool {
				return strings.HasPrefix(o, "no-new-privileges") && !strings.HasSuffix(o, "false")
			}),
			"without a seccomp profile":     slices.Contains(h.SecurityOpt, "seccomp=unconfined") || slices.Contains(h.SecurityOpt, "seccomp:unconfined"),
			"no limit of processes":         h.PidsLimit == nil || *h.PidsLimit <= 0,
			"in the network of the machine": h.NetworkMode.IsHost(),
			"sees the machine's processes":  h.PidMode.IsHost(),
		} {
			if is {
				wrong = append(wrong, composeServiceOf(c)+": "+what)
			}
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return failedFinding(strings.Join(wrong, "; "), "compare the compose file with that of this release")
	}
	return okFinding("%d containers without capabilities of their own, new privileges or unbounded processes", len(x.containers))
}

func (x *securityChecks) checkEngineSocketHolders(context.Context) finding {
	if f, there := x.requireServices(); !there {
		return f
	}
	var others []string
	held := false
	for _, c := range x.containers {
		for _, m := range c.Mounts {
			if m.Destination != engineSocketPath && !strings.HasSuffix(m.Source, "/docker.sock") {
				continue
			}
			held = true
			if composeServiceOf(c) != "executor" {
				others = append(others, composeServiceOf(c))
			}
		}
	}
	if len(others) > 0 {
		return failedFinding(strings.Join(others, ", ")+": access to the engine's socket is access to the machine", "mount it only into executors")
	}
	if !held {
		return okFinding("no container has it")
	}
	return okFinding("executors alone have it; whoever takes one over has the machine")
}

func (x *securityChecks) checkEngineOptions(context.Context) finding {
	if x.engine == nil {
		return noteFinding(fmt.Sprintf("the Docker engine cannot be reached: %v", x.engineErr), "run spool doctor where the engine can be reached, or set DOCKER_HOST")
	}
	if host := x.environ(client.EnvOverrideHost); strings.HasPrefix(host, "tcp://") && x.environ(client.EnvTLSVerify) == "" {
		return failedFinding("the connection to the engine at "+host+" is without TLS: anyone who reaches the engine controls its machine", "set DOCKER_TLS_VERIFY and DOCKER_CERT_PATH, or use ssh://")
	}
	options := strings.Join(x.engine.SecurityOptions, " ")
	if !strings.Contains(options, "name=seccomp") {
		return failedFinding("the engine has no seccomp: sandboxes may make every system call", "use an engine and a kernel with seccomp")
	}
	var without []string
	if !strings.Contains(options, "name=apparmor") && !strings.Contains(options, "name=selinux") {
		without = append(without, "AppArmor or SELinux")
	}
	if !strings.Contains(options, "name=userns") && !strings.Contains(options, "name=rootless") {
		without = append(without, "user namespaces (userns-remap) or rootless mode")
	}
	if len(without) > 0 {
		return noteFinding("seccomp, without "+strings.Join(without, ", "), "they bound what a process that escapes from a sandbox may do: docs.docker.com/engine/security")
	}
	return okFinding("%s", options)
}

func (x *securityChecks) checkSandboxRuntime(context.Context) finding {
	if f, there := x.requireServices("executor"); !there {
		return f
	}
	if x.usesModal() {
		return okFinding("sandboxes run at Modal, not on this machine")
	}
	runtimes := slices.DeleteFunc(x.variableValues("SPOOL_SANDBOX_RUNTIME", "executor"), func(r string) bool { return r == "" || r == "runc" })
	if len(runtimes) == 0 {
		return noteFinding("sandboxes share the machine's kernel", "for agents that you do not trust install gVisor, and set SPOOL_SANDBOX_RUNTIME=runsc")
	}
	return okFinding("%s", strings.Join(runtimes, ", "))
}

func (x *securityChecks) checkProjectDiskLimit(context.Context) finding {
	if f, there := x.requireServices("executor"); !there {
		return f
	}
	if x.usesModal() {
		return okFinding("the runner enforces them in Modal sandboxes: it ends a turn that wrote more")
	}
	for _, mode := range x.variableValues("SPOOL_SANDBOX_DISK_LIMIT", "executor") {
		if mode == executor.DiskLimitWatch {
			return noteFinding("watch: one sandbox can fill the engine's disk before its turn is ended", "set SPOOL_SANDBOX_DISK_LIMIT=auto, or look into the executor's log why it chose it")
		}
	}
	return okFinding("by what executors proved at their start, which spool_executor_sandbox_disk_limit tells")
}

func (x *securityChecks) checkImageAllowlist(context.Context) finding {
	if f, there := x.requireServices("executor"); !there {
		return f
	}
	pulls := slices.Contains(x.variableValues("SPOOL_SANDBOX_IMAGES_PULL", "executor"), "true")
	for _, list := range x.variableValues("SPOOL_SANDBOX_IMAGES", "executor", "session") {
		for _, entry := range strings.Split(list, ",") {
			if strings.TrimSpace(entry) == "*" && pulls {
				return failedFinding("tenants may have the engine pull any image from any host", "name the images in SPOOL_SANDBOX_IMAGES, or unset SPOOL_SANDBOX_IMAGES_PULL")
			}
			if strings.TrimSpace(entry) == "*" {
				return noteFinding("tenants may name every image that is on the engine", "name the images in SPOOL_SANDBOX_IMAGES")
			}
		}
	}
	return okFinding("tenants name no image but those that you listed")
}

func (x *securityChecks) checkImageDigests(context.Context) finding {
	if f, there := x.requireServices(); !there {
		return f
	}
	var tagged []string
	for _, c := range x.containers {
		if name := c.Config.Image; !strings.Contains(name, "@sha256:") && (composeServiceOf(c) == "nats" || composeServiceOf(c) == "postgres") {
			tagged = append(tagged, name)
		}
	}
	if len(tagged) > 0 {
		slices.Sort(tagged)
		return noteFinding(strings.Join(slices.Compact(tagged), ", ")+": a tag may stand for something else tomorrow", "run deploy/env --pin once they are pulled")
	}
	return okFinding("NATS and Postgres are named by digest")
}

func (x *securityChecks) checkEgressSettings(context.Context) finding {
	if f, there := x.requireServices("egress"); !there {
		return f
	}
	if slices.Contains(x.variableValues("SPOOL_EGRESS_ALL_PATHS", "egress"), "true") {
		return noteFinding("SPOOL_EGRESS_ALL_PATHS: agents reach every path of the models' hosts, and those requests pass unread", "unset it")
	}
	for _, open := range x.variableValues("SPOOL_EGRESS_OPEN", "egress") {
		if open != "" {
			return noteFinding("SPOOL_EGRESS_OPEN: agents that are allowed to reach "+open+", which is in your own network", "keep it as small as agents need")
		}
	}
	return okFinding("no private network, and no unread path of models")
}

func (x *securityChecks) checkSignedLog(context.Context) finding {
	if f, there := x.requireServices("session", "executor", "projector"); !there {
		return f
	}
	for _, s := range []string{"session", "executor", "projector"} {
		if slices.Contains(x.variableValues("SPOOL_LOG_KEYS", s), "") {
			return failedFinding(s+" has no SPOOL_LOG_KEYS: who gets at NATS can forge commits", "run deploy/env, then docker compose up -d")
		}
	}
	if slices.ContainsFunc(x.variableValues("SPOOL_LOG_KEYS", "gateway"), func(k string) bool { return k != "" }) {
		return failedFinding("the gateway has keys of the log", "take SPOOL_LOG_KEYS out of its environment")
	}
	return okFinding("commits are signed, and gateways hold no key")
}

func (x *securityChecks) checkWebOrigins(context.Context) finding {
	if f, there := x.requireServices("gateway"); !there {
		return f
	}
	for _, origins := range x.variableValues("SPOOL_ALLOWED_ORIGINS", "gateway") {
		if slices.Contains(strings.Split(origins, ","), "*") {
			return noteFinding("SPOOL_ALLOWED_ORIGINS=*: every web page may use this gateway with a key that it has", "name your application's origin")
		}
	}
	return okFinding("web pages of named origins alone")
}
