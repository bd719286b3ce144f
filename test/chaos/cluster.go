package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/topology"
)

// startTimeout is the time limit for both gateways to become ready.
const startTimeout = 90 * time.Second

// executorSlots is the number of slots of one executor. It is lower than the number of sessions, so that executions
// wait for a slot.
const executorSlots = 3

// cluster is an installation of Spool on this machine, with each service, NATS and Postgres as processes that faults
// can hit.
type cluster struct {
	bin, dir string // folders of the programs and of all written files
	nats     string // URL
	database string
	model    string
	gateways []string
	parts    []*restartedProcess // processes that faults affect
	faults   []injectedFault
	mock     *restartedProcess
	natsHTTP string
}

// startCluster starts all processes of an installation and returns when both gateways are ready. bin is the folder of
// the programs, dir the folder of all files that they write.
func startCluster(ctx context.Context, bin, dir string) (*cluster, error) {
	c := &cluster{bin: bin, dir: dir}
	for _, start := range []func(context.Context) error{c.startNATS, c.startPostgres, c.startModel, c.startServices} {
		if err := start(ctx); err != nil {
			return c, err
		}
	}
	return c, nil
}

// freeAddress returns an address of loopback on which nothing listens.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// natsPassword returns the password of a NATS user. It is not a secret, because the server listens on loopback and ends
// with the run.
func natsPassword(user string) string { return "chaos" + user }

// startFaultTarget starts a process of the installation that faults can hit. name names it in messages and in the name
// of its log file.
func (c *cluster) startFaultTarget(name string, start func() *exec.Cmd) error {
	p, err := startRestarted(c.dir, name, start)
	if err == nil {
		c.parts = append(c.parts, p)
	}
	return err
}

// startNATS starts a NATS server with the repository's configuration, on loopback and with its data in the folder of
// this run.
func (c *cluster) startNATS(ctx context.Context) error {
	conf, err := os.ReadFile("deploy/nats.conf")
	if err != nil {
		return err
	}
	addr, err := freeAddress()
	if err != nil {
		return err
	}
	if c.natsHTTP, err = freeAddress(); err != nil {
		return err
	}
	text := string(conf)
	for _, r := range [][2]string{
		{"listen: 0.0.0.0:4222", "listen: " + addr}, {"http: 127.0.0.1:8222", "http: " + c.natsHTTP},
		// All processes of the run use loopback, so the server needs no TLS.
		{"\ntls {\n  cert_file: $" + topology.TLSCertificateVariable + "\n  key_file: $" + topology.TLSKeyVariable + "\n  min_version: \"1.2\"\n}\n", ""},
		{"store_dir: /data", "store_dir: " + strconv.Quote(filepath.Join(c.dir, "nats"))},
	} {
		if strings.Count(text, r[0]) != 1 {
			return fmt.Errorf("deploy/nats.conf has no line %q", r[0])
		}
		text = strings.Replace(text, r[0], r[1], 1)
	}
	path := filepath.Join(c.dir, "nats.conf")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return err
	}
	env := append(os.Environ(), "SPOOL_NATS_MAX_STORE=10GB")
	for _, u := range topology.Users() {
		env = append(env, "SPOOL_NATS_PASSWORD_"+strings.ToUpper(u.Name)+"="+natsPassword(u.Name))
	}
	c.nats = "nats://" + addr
	if err := c.startFaultTarget("nats", func() *exec.Cmd {
		cmd := exec.Command(filepath.Join(c.bin, "nats-server"), "--config", path)
		cmd.Env = env
		return cmd
	}); err != nil {
		return err
	}
	out, err := c.runSpool(ctx, "provision", "--nats-user", topology.UserAdmin)
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// runSpool runs a command of the spool program on this installation and returns its output.
func (c *cluster) runSpool(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, "spool"), args...)
	cmd.Env = append(os.Environ(), "SPOOL_NATS_URL="+c.nats, "SPOOL_NATS_USER="+topology.UserAdmin,
		"SPOOL_NATS_PASSWORD="+natsPassword(topology.UserAdmin), "SPOOL_LOG_KEYS="+logKeysSetting(eventlog.WriterRoles()...), "SPOOL_DATABASE_URL="+c.database)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("spool %s: %w", strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// startPostgres creates a Postgres data folder and starts Postgres in it. If this program runs as root, Postgres runs
// as another user.
func (c *cluster) startPostgres(ctx context.Context) error {
	data := filepath.Join(c.dir, "postgres")
	if err := os.Mkdir(data, 0o700); err != nil {
		return err
	}
	postgres, err := pgserver.FindBinary(ctx, pgserver.Config{DataDir: filepath.Join(c.dir, "none")})
	if err != nil {
		return err
	}
	credential, err := chownToPostgresUser(data)
	if err != nil {
		return err
	}
	command := func(args ...string) *exec.Cmd {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential}
		return cmd
	}
	initdb := filepath.Join(filepath.Dir(postgres), "initdb")
	if out, err := command(initdb, "-D", data, "-U", "spool", "-A", "trust", "-E", "UTF8", "--locale=C").CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w: %s", err, out)
	}
	addr, err := freeAddress()
	if err != nil {
		return err
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	c.database = "postgres://spool@" + addr + "/postgres?sslmode=disable"
	return c.startFaultTarget("postgres", func() *exec.Cmd {
		return command(postgres, "-D", data, "-p", port, "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "max_connections=200")
	})
}

// chownToPostgresUser makes the user that will run Postgres the owner of the folder data, and returns that user. It
// does nothing and returns nil if this program does not run as root.
func chownToPostgresUser(data string) (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uerr := strconv.ParseUint(u.Uid, 10, 32)
		gid, gerr := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(uerr, gerr); err != nil {
			return nil, err
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, os.Chown(data, int(uid), int(gid))
	}
	return nil, errors.New("postgres does not run as root, and there is no user postgres or nobody")
}

// startModel starts the scripted model server, which faults do not hit.
func (c *cluster) startModel(context.Context) error {
	addr, err := freeAddress()
	if err != nil {
		return err
	}
	c.model = "http://" + addr
	c.mock, err = startRestarted(c.dir, "mockllm", func() *exec.Cmd {
		return exec.Command(filepath.Join(c.bin, "mockllm"), "--listen", addr, "--script", "test/chaos/script.yaml")
	})
	return err
}

// startServices starts two copies of each service, and one copy of the skills service, and returns when both gateways
// are ready.
func (c *cluster) startServices(ctx context.Context) error {
	for _, s := range []struct {
		name   string
		copies int
		env    []string
	}{
		{"session", 2, []string{
			"SPOOL_NATS_GATE_PASSWORD=" + natsPassword(topology.UserGate), "SPOOL_HEADS_KEY=" + headsPrivateKey, "SPOOL_HEADS_EVERY=2s",
		}},
		{"projector", 2, []string{"SPOOL_DATABASE_URL=" + c.database}},
		{"janitor", 2, []string{"SPOOL_DATABASE_URL=" + c.database, "SPOOL_GC_INTERVAL=500ms", "SPOOL_GC_GRACE=1s", "SPOOL_GC_UPLOADS=30s"}},
		{"skills", 1, []string{"SPOOL_SKILL_SCRATCH=" + c.dir}},
		{"executor", 2, []string{
			"SPOOL_DATA_DIR=" + c.executorFolder(), "SPOOL_RUNNER=" + filepath.Join(c.bin, "runner"), "SPOOL_ENGINE=chaos",
			"SPOOL_SLOTS=" + strconv.Itoa(executorSlots), "SPOOL_OPENAI_BASE_URL=" + c.model + "/v1", "OPENAI_API_KEY=mock", "SPOOL_SWEEP_EVERY=5s",
		}},
		{"gateway", 2, []string{"SPOOL_DATABASE_URL=" + c.database, "SPOOL_GRPC_LISTEN=127.0.0.1:0"}},
	} {
		for i := range s.copies {
			env := append(os.Environ(), "SPOOL_NATS_URL="+c.nats, "SPOOL_NATS_USER="+s.name, "SPOOL_NATS_PASSWORD="+natsPassword(s.name))
			switch s.name {
			case "janitor", "skills":
				env = append(env, "SPOOL_LOG_KEYS="+logKeysSetting(s.name))
			case "session", "executor", "projector":
				env = append(env, "SPOOL_LOG_KEYS="+logKeysSetting(eventlog.WriterRoles()...))
			}
			env = append(env, s.env...)
			if s.name == "gateway" {
				addr, err := freeAddress()
				if err != nil {
					return err
				}
				env = append(env, "SPOOL_LISTEN="+addr)
				c.gateways = append(c.gateways, "http://"+addr)
			}
			if err := c.startFaultTarget(fmt.Sprintf("%s-%d", s.name, i), func() *exec.Cmd {
				cmd := exec.Command(filepath.Join(c.bin, s.name))
				cmd.Env = env
				return cmd
			}); err != nil {
				return err
			}
		}
	}
	return c.awaitReady(ctx)
}

// awaitReady blocks until both gateways report that they are ready.
func (c *cluster) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for _, url := range c.gateways {
		for {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/readyz", nil)
			if err != nil {
				return err
			}
			resp, err := http.DefaultClient.Do(req)
			if err == nil {
				err = resp.Body.Close()
			}
			if err == nil && resp.StatusCode == http.StatusOK {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("gateway %s was not ready within %s", url, startTimeout)
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
	return nil
}

// executorFolder returns the folder in which the executors keep workspaces and sandboxes.
func (c *cluster) executorFolder() string { return filepath.Join(c.dir, "executor") }

// openLog connects to NATS as the user admin and opens the log. The caller must close the connection.
func (c *cluster) openLog(ctx context.Context) (*nats.Conn, *jslog.Log, error) {
	nc, err := nats.Connect(c.nats, nats.UserInfo(topology.UserAdmin, natsPassword(topology.UserAdmin)), nats.CustomInboxPrefix(topology.InboxPrefix(topology.UserAdmin)))
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nc, nil, err
	}
	layout, err := topology.ReadLayout(ctx, js)
	if err != nil {
		return nc, nil, err
	}
	keys, err := eventlog.ParseKeys(logKeysSetting(eventlog.WriterRoles()...), "")
	if err != nil {
		return nc, nil, err
	}
	signing, err := jslog.CheckSigning(ctx, js, layout.Shards, keys, jslog.RoleVerifier)
	if err != nil {
		return nc, nil, err
	}
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: layout.Shards, Partitions: layout.Partitions, Keys: keys, Signing: signing})
	return nc, log, err
}

// logKeysSetting returns the value of SPOOL_LOG_KEYS with the keys that sign the commits of the roles.
func logKeysSetting(roles ...string) string {
	var list []string
	for _, role := range roles {
		list = append(list, role+":"+strings.Repeat("chaos-"+role, 4))
	}
	return strings.Join(list, ",")
}

// headsPrivateKey is the private key that signs the heads of the log, in hexadecimal.
var headsPrivateKey = strings.Repeat("c0", 32)

// writeHeadsPublicKey writes the public key of the signed heads into a file and returns the file's path.
func (c *cluster) writeHeadsPublicKey() (file string, err error) {
	key, err := heads.ParsePrivateKey(headsPrivateKey)
	if err != nil {
		return "", err
	}
	file = filepath.Join(c.dir, "heads.pub")
	return file, os.WriteFile(file, []byte(key.Public().String()+"\n"), 0o600)
}

// allProcesses returns the processes that faults can hit, and the model server.
func (c *cluster) allProcesses() []*restartedProcess {
	if c.mock == nil {
		return c.parts
	}
	return append(slices.Clone(c.parts), c.mock)
}

// stopAll stops the model server, the services, Postgres and NATS, in this order.
func (c *cluster) stopAll() error {
	var errs []error
	all := c.allProcesses()
	for i := len(all) - 1; i >= 0; i-- {
		sig := syscall.SIGTERM
		if all[i].name == "postgres" {
			sig = syscall.SIGINT // a fast shutdown, although clients are connected
		}
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		errs = append(errs, all[i].thaw(), all[i].stop(ctx, sig))
		cancel()
	}
	return errors.Join(errs...)
}
