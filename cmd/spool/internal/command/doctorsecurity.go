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
	composeProject = "com.docker.compose.project"
	composeService = "com.docker.compose.service"
)

// engineSocket is the path of the engine's socket in containers that mount it.
const engineSocket = "/var/run/docker.sock"

// securityExamination is the state that the checks of an installation's hardening share.
type securityExamination struct {
	*examination
	containers []container.InspectResponse // containers of the compose project; nil if there are none
	engine     *dockersystem.Info          // nil if no engine responds
	engineErr  error
}

// checks returns the checks in the order of "Hardening checklist" in docs/security.md.
func (x *securityExamination) checks() []check {
	return []check{
		{"transport", x.transport},
		{"keys required", x.keysRequired},
		{"metrics closed", x.metricsClosed},
		{"secret files", x.secretFiles},
		{"database roles", x.databaseRoles},
		{"published ports", x.publishedPorts},
		{"services confined", x.servicesConfined},
		{"engine's socket", x.socketHolders},
		{"engine", x.engineOptions},
		{"sandbox runtime", x.sandboxRuntime},
		{"kernel", x.kernel},
		{"disk limits of sandboxes", x.projectDiskLimit},
		{"image allowlist", x.imageAllowlist},
		{"images by digest", x.imageDigests},
		{"egress", x.egressSettings},
		{"signed log", x.signedLog},
		{"web origins", x.webOrigins},
	}
}

// newSecurityExamination asks the engine for the containers of a compose project.
func newSecurityExamination(ctx context.Context, x *examination) *securityExamination {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	s := &securityExamination{examination: x}
	s.engineErr = s.askEngine(ctx)
	return s
}

func (x *securityExamination) askEngine(ctx context.Context) error {
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
	list, err := api.ContainerList(ctx, container.ListOptions{Filters: filters.NewArgs(filters.Arg("label", composeProject+"="+x.Project))})
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

// service returns the name of a container's compose service.
func service(c container.InspectResponse) string { return c.Config.Labels[composeService] }

// needsServices reports whether a compose installation with these services runs. If not, f is the result of the check.
func (x *securityExamination) needsServices(services ...string) (f finding, runs bool) {
	if x.engineErr != nil {
		return note(fmt.Sprintf("the Docker engine cannot be reached: %v", x.engineErr), "run spool doctor where the engine can be reached, or set DOCKER_HOST"), false
	}
	if len(x.containers) == 0 {
		return ok("no compose project %s runs on this engine", x.Project), false
	}
	for _, s := range services {
		if !slices.ContainsFunc(x.containers, func(c container.InspectResponse) bool { return service(c) == s }) {
			return note(fmt.Sprintf("no %s of compose project %s runs on this engine", s, x.Project), "start it, and run spool doctor again"), false
		}
	}
	return finding{}, true
}

// variable returns the value of a container's environment variable, or "".
func variable(c container.InspectResponse, name string) string {
	for _, e := range c.Config.Env {
		if value, is := strings.CutPrefix(e, name+"="); is {
			return value
		}
	}
	return ""
}

// setting returns the values of a variable in the containers of services.
func (x *securityExamination) setting(name string, services ...string) []string {
	var out []string
	for _, c := range x.containers {
		if value := variable(c, name); slices.Contains(services, service(c)) && !slices.Contains(out, value) {
			out = append(out, value)
		}
	}
	return out
}

func (x *securityExamination) address() string {
	switch {
	case x.URL != "":
		return x.URL
	case x.running != nil:
		return x.running.URL
	}
	return x.app.DefaultURL
}

func (x *securityExamination) transport(context.Context) finding {
	u, err := url.Parse(x.address())
	if err != nil || u.Host == "" {
		return failedFinding(fmt.Sprintf("url: %q is not an address", x.address()), "use a URL like https://spool.example.com")
	}
	if u.Scheme == "https" || isLoopback(u.Hostname()) {
		return ok("%s", u.Redacted())
	}
	return failedFinding(fmt.Sprintf("%s is neither TLS nor loopback: others on the network can read keys and content", u.Redacted()), `serve TLS: docs/security.md, "TLS"`)
}

// isLoopback reports whether a host is the local machine.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func (x *securityExamination) keysRequired(ctx context.Context) finding {
	return x.requiresKey(ctx, "/api/sessions", "set SPOOL_AUTH=keys and SPOOL_ROOT_KEY")
}

func (x *securityExamination) metricsClosed(ctx context.Context) finding {
	return x.requiresKey(ctx, "/metrics", "set SPOOL_AUTH=keys: the gateway's metrics then need the root key")
}

// requiresKey checks that a server rejects requests for a path without a key.
func (x *securityExamination) requiresKey(ctx context.Context, path, remedy string) finding {
	address := strings.TrimRight(x.address(), "/") + path
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
		return note(fmt.Sprintf("no server responds: %v", err), "name it with --url")
	}
	defer res.Body.Close() //nolint:errcheck // it is not read
	switch {
	case res.StatusCode == http.StatusUnauthorized || res.StatusCode == http.StatusForbidden:
		return ok("%s without a key is rejected with %d", path, res.StatusCode)
	case res.StatusCode >= http.StatusInternalServerError:
		return note(fmt.Sprintf("%s responds with %d", address, res.StatusCode), "try again when the server is ready")
	case isLoopback(req.URL.Hostname()):
		return note(fmt.Sprintf("%s is served without a key to everybody on this machine", path), remedy)
	}
	return failedFinding(fmt.Sprintf("%s is served without a key", address), remedy)
}

// secretFiles checks that only their owner may read the files with passwords and keys.
func (x *securityExamination) secretFiles(context.Context) finding {
	files := []string{x.EnvFile, filepath.Join(x.dir, "log.keys"), filepath.Join(x.dir, "secrets.key")}
	var seen, open []string
	for _, f := range files {
		info, err := os.Stat(f)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return note(err.Error(), "run spool doctor as the owner of the file")
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
		return ok("none at %s", strings.Join(files, ", "))
	}
	return ok("%s: readable only by the owner", strings.Join(seen, ", "))
}

// databaseRoles checks the role of the named database, or else of the gateway of the compose project.
func (x *securityExamination) databaseRoles(ctx context.Context) finding {
	if x.Database != "" || x.running != nil {
		return x.postgres(ctx)
	}
	if f, there := x.needsServices("gateway"); !there {
		return f
	}
	for _, database := range x.setting("SPOOL_DATABASE_URL", "gateway") {
		u, err := url.Parse(database)
		if err != nil {
			return failedFinding("the gateway's SPOOL_DATABASE_URL is not a URL", "use a URL like postgres://user:password@host:5432/name")
		}
		if u.User.Username() != readmodel.GatewayRole {
			return note("gateways connect as "+u.User.Username(), `see "Roles in Postgres" in docs/security.md for a separate role of the gateway`)
		}
	}
	return ok("gateways connect as %s", readmodel.GatewayRole)
}

func (x *securityExamination) publishedPorts(context.Context) finding {
	if f, there := x.needsServices(); !there {
		return f
	}
	var inner, clear, proxied []string
	for _, c := range x.containers {
		for port, bindings := range c.HostConfig.PortBindings {
			for _, b := range bindings {
				if isLoopback(b.HostIP) {
					continue
				}
				published := fmt.Sprintf("%s %s at %s", service(c), port, net.JoinHostPort(b.HostIP, b.HostPort))
				switch {
				case isEgressListener(c, port):
				case service(c) != "gateway":
					inner = append(inner, published)
				case variable(c, "SPOOL_TLS_CERT") != "":
				case variable(c, "SPOOL_BEHIND_TLS_PROXY") == "true":
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
		return note("SPOOL_BEHIND_TLS_PROXY is set, so these addresses serve the gateway without TLS: "+strings.Join(proxied, ", "), "restrict them to the proxy, with a firewall or a separate network")
	}
	return ok("only gateways with TLS, and the egress proxy's TLS listener, are published beyond loopback")
}

// isEgressListener reports whether a container's port is the TLS listener of the egress proxy, which sandboxes on Modal reach.
func isEgressListener(c container.InspectResponse, port nat.Port) bool {
	_, listens, err := net.SplitHostPort(variable(c, "SPOOL_EGRESS_LISTEN_TLS"))
	return err == nil && service(c) == "egress" && port == nat.Port(listens+"/tcp")
}

// usesModal reports whether all executors of the project make their sandboxes at Modal.
func (x *securityExamination) usesModal() bool {
	providers := x.setting("SPOOL_SANDBOX", "executor")
	return len(providers) > 0 && !slices.ContainsFunc(providers, func(p string) bool { return p != executor.Modal })
}

// servicesConfined checks that each container still has the restrictions of deploy/compose.yaml.
func (x *securityExamination) servicesConfined(context.Context) finding {
	if f, there := x.needsServices(); !there {
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
				wrong = append(wrong, service(c)+": "+what)
			}
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return failedFinding(strings.Join(wrong, "; "), "compare the compose file with that of this release")
	}
	return ok("%d containers without capabilities of their own, new privileges or unbounded processes", len(x.containers))
}

func (x *securityExamination) socketHolders(context.Context) finding {
	if f, there := x.needsServices(); !there {
		return f
	}
	var others []string
	held := false
	for _, c := range x.containers {
		for _, m := range c.Mounts {
			if m.Destination != engineSocket && !strings.HasSuffix(m.Source, "/docker.sock") {
				continue
			}
			held = true
			if service(c) != "executor" {
				others = append(others, service(c))
			}
		}
	}
	if len(others) > 0 {
		return failedFinding(strings.Join(others, ", ")+": access to the engine's socket is access to the machine", "mount it only into executors")
	}
	if !held {
		return ok("no container has it")
	}
	return ok("executors alone have it; whoever takes one over has the machine")
}

func (x *securityExamination) engineOptions(context.Context) finding {
	if x.engine == nil {
		return note(fmt.Sprintf("the Docker engine cannot be reached: %v", x.engineErr), "run spool doctor where the engine can be reached, or set DOCKER_HOST")
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
		return note("seccomp, without "+strings.Join(without, ", "), "they bound what a process that escapes from a sandbox may do: docs.docker.com/engine/security")
	}
	return ok("%s", options)
}

func (x *securityExamination) sandboxRuntime(context.Context) finding {
	if f, there := x.needsServices("executor"); !there {
		return f
	}
	if x.usesModal() {
		return ok("sandboxes run at Modal, not on this machine")
	}
	runtimes := slices.DeleteFunc(x.setting("SPOOL_SANDBOX_RUNTIME", "executor"), func(r string) bool { return r == "" || r == "runc" })
	if len(runtimes) == 0 {
		return note("sandboxes share the machine's kernel", "for agents that you do not trust install gVisor, and set SPOOL_SANDBOX_RUNTIME=runsc")
	}
	return ok("%s", strings.Join(runtimes, ", "))
}

func (x *securityExamination) projectDiskLimit(context.Context) finding {
	if f, there := x.needsServices("executor"); !there {
		return f
	}
	if x.usesModal() {
		return ok("the runner enforces them in Modal sandboxes: it ends a turn that wrote more")
	}
	for _, mode := range x.setting("SPOOL_SANDBOX_DISK_LIMIT", "executor") {
		if mode == executor.DiskWatch {
			return note("watch: one sandbox can fill the engine's disk before its turn is ended", "set SPOOL_SANDBOX_DISK_LIMIT=auto, or look into the executor's log why it chose it")
		}
	}
	return ok("by what executors proved at their start, which spool_executor_sandbox_disk_limit tells")
}

func (x *securityExamination) imageAllowlist(context.Context) finding {
	if f, there := x.needsServices("executor"); !there {
		return f
	}
	pulls := slices.Contains(x.setting("SPOOL_SANDBOX_IMAGES_PULL", "executor"), "true")
	for _, list := range x.setting("SPOOL_SANDBOX_IMAGES", "executor", "session") {
		for _, entry := range strings.Split(list, ",") {
			if strings.TrimSpace(entry) == "*" && pulls {
				return failedFinding("tenants may have the engine pull any image from any host", "name the images in SPOOL_SANDBOX_IMAGES, or unset SPOOL_SANDBOX_IMAGES_PULL")
			}
			if strings.TrimSpace(entry) == "*" {
				return note("tenants may name every image that is on the engine", "name the images in SPOOL_SANDBOX_IMAGES")
			}
		}
	}
	return ok("tenants name no image but those that you listed")
}

func (x *securityExamination) imageDigests(context.Context) finding {
	if f, there := x.needsServices(); !there {
		return f
	}
	var tagged []string
	for _, c := range x.containers {
		if name := c.Config.Image; !strings.Contains(name, "@sha256:") && (service(c) == "nats" || service(c) == "postgres") {
			tagged = append(tagged, name)
		}
	}
	if len(tagged) > 0 {
		slices.Sort(tagged)
		return note(strings.Join(slices.Compact(tagged), ", ")+": a tag may stand for something else tomorrow", "run deploy/env --pin once they are pulled")
	}
	return ok("NATS and Postgres are named by digest")
}

func (x *securityExamination) egressSettings(context.Context) finding {
	if f, there := x.needsServices("egress"); !there {
		return f
	}
	if slices.Contains(x.setting("SPOOL_EGRESS_ALL_PATHS", "egress"), "true") {
		return note("SPOOL_EGRESS_ALL_PATHS: agents reach every path of the models' hosts, and those requests pass unread", "unset it")
	}
	for _, open := range x.setting("SPOOL_EGRESS_OPEN", "egress") {
		if open != "" {
			return note("SPOOL_EGRESS_OPEN: agents that are allowed to reach "+open+", which is in your own network", "keep it as small as agents need")
		}
	}
	return ok("no private network, and no unread path of models")
}

func (x *securityExamination) signedLog(context.Context) finding {
	if f, there := x.needsServices("session", "executor", "projector"); !there {
		return f
	}
	for _, s := range []string{"session", "executor", "projector"} {
		if slices.Contains(x.setting("SPOOL_LOG_KEYS", s), "") {
			return failedFinding(s+" has no SPOOL_LOG_KEYS: who gets at NATS can forge commits", "run deploy/env, then docker compose up -d")
		}
	}
	if slices.ContainsFunc(x.setting("SPOOL_LOG_KEYS", "gateway"), func(k string) bool { return k != "" }) {
		return failedFinding("the gateway has keys of the log", "take SPOOL_LOG_KEYS out of its environment")
	}
	return ok("commits are signed, and gateways hold no key")
}

func (x *securityExamination) webOrigins(context.Context) finding {
	if f, there := x.needsServices("gateway"); !there {
		return f
	}
	for _, origins := range x.setting("SPOOL_ALLOWED_ORIGINS", "gateway") {
		if slices.Contains(strings.Split(origins, ","), "*") {
			return note("SPOOL_ALLOWED_ORIGINS=*: every web page may use this gateway with a key that it has", "name your application's origin")
		}
	}
	return ok("web pages of named origins alone")
}
