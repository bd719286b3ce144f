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

// startTime is the time limit for the start of all processes, and for the stop of one.
const startTime = 90 * time.Second

// executorSlots is the number of slots of one executor. It is lower than the number of sessions, so that executions wait for
// a slot.
const executorSlots = 3

// cluster is an installation of Spool whose services are processes of this machine.
type cluster struct {
	bin, dir string // folders of the programs and of all written files
	nats     string // URL
	database string
	model    string
	gateways []string
	parts    []*process // processes that faults affect
	faults   []injectedFault
	mock     *process
	natsHTTP string
}

// startCluster starts all processes and returns when both gateways are ready.
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

// password returns the password of a NATS user. It is not a secret: the server listens on loopback and ends with the
// run.
func password(user string) string { return "chaos" + user }

// add starts a process that faults affect.
func (c *cluster) add(name string, start func() *exec.Cmd) error {
	p, err := run(c.dir, name, start)
	if err == nil {
		c.parts = append(c.parts, p)
	}
	return err
}

// startNATS runs the server with the repository's configuration, on loopback and in a folder of this run.
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
		{"\ntls {\n  cert_file: $" + topology.CertificateVariable + "\n  key_file: $" + topology.KeyVariable + "\n  min_version: \"1.2\"\n}\n", ""},
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
		env = append(env, "SPOOL_NATS_PASSWORD_"+strings.ToUpper(u.Name)+"="+password(u.Name))
	}
	c.nats = "nats://" + addr
	if err := c.add("nats", func() *exec.Cmd {
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

// runSpool runs the command line tool with this cluster.
func (c *cluster) runSpool(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, "spool"), args...)
	cmd.Env = append(os.Environ(), "SPOOL_NATS_URL="+c.nats, "SPOOL_NATS_USER="+topology.UserAdmin,
		"SPOOL_NATS_PASSWORD="+password(topology.UserAdmin), "SPOOL_LOG_KEYS="+logKeys(eventlog.Writers()...), "SPOOL_DATABASE_URL="+c.database)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("spool %s: %w", strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// startPostgres creates a database cluster and runs it, as another user if this one is root.
func (c *cluster) startPostgres(ctx context.Context) error {
	data := filepath.Join(c.dir, "postgres")
	if err := os.Mkdir(data, 0o700); err != nil {
		return err
	}
	postgres, err := pgserver.Find(ctx, pgserver.Config{DataDir: filepath.Join(c.dir, "none")})
	if err != nil {
		return err
	}
	credential, err := ownPostgres(data)
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
	return c.add("postgres", func() *exec.Cmd {
		return command(postgres, "-D", data, "-p", port, "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "max_connections=200")
	})
}

// ownPostgres gives a folder to the user that runs Postgres, and returns that user. It returns nil if this user is
// not root.
func ownPostgres(data string) (*syscall.Credential, error) {
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

// startModel runs the scripted model server, which faults do not affect.
func (c *cluster) startModel(context.Context) error {
	addr, err := freeAddress()
	if err != nil {
		return err
	}
	c.model = "http://" + addr
	c.mock, err = run(c.dir, "mockllm", func() *exec.Cmd {
		return exec.Command(filepath.Join(c.bin, "mockllm"), "--listen", addr, "--script", "test/chaos/script.yaml")
	})
	return err
}

// startServices runs two copies of each service, and one copy of the skills service.
func (c *cluster) startServices(ctx context.Context) error {
	for _, s := range []struct {
		name   string
		copies int
		env    []string
	}{
		{"session", 2, []string{
			"SPOOL_NATS_GATE_PASSWORD=" + password(topology.UserGate), "SPOOL_HEADS_KEY=" + headsSeed, "SPOOL_HEADS_EVERY=2s",
		}},
		{"projector", 2, []string{"SPOOL_DATABASE_URL=" + c.database}},
		{"janitor", 2, []string{"SPOOL_DATABASE_URL=" + c.database, "SPOOL_GC_INTERVAL=500ms", "SPOOL_GC_GRACE=1s", "SPOOL_GC_UPLOADS=30s"}},
		{"skills", 1, []string{"SPOOL_SKILL_SCRATCH=" + c.dir}},
		{"executor", 2, []string{
			"SPOOL_DATA_DIR=" + c.sandboxFolder(), "SPOOL_RUNNER=" + filepath.Join(c.bin, "runner"), "SPOOL_ENGINE=chaos",
			"SPOOL_SLOTS=" + strconv.Itoa(executorSlots), "SPOOL_OPENAI_BASE_URL=" + c.model + "/v1", "OPENAI_API_KEY=mock", "SPOOL_SWEEP_EVERY=5s",
		}},
		{"gateway", 2, []string{"SPOOL_DATABASE_URL=" + c.database, "SPOOL_GRPC_LISTEN=127.0.0.1:0"}},
	} {
		for i := range s.copies {
			env := append(os.Environ(), "SPOOL_NATS_URL="+c.nats, "SPOOL_NATS_USER="+s.name, "SPOOL_NATS_PASSWORD="+password(s.name))
			switch s.name {
			case "janitor", "skills":
				env = append(env, "SPOOL_LOG_KEYS="+logKeys(s.name))
			case "session", "executor", "projector":
				env = append(env, "SPOOL_LOG_KEYS="+logKeys(eventlog.Writers()...))
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
			if err := c.add(fmt.Sprintf("%s-%d", s.name, i), func() *exec.Cmd {
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
	ctx, cancel := context.WithTimeout(ctx, startTime)
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
				return fmt.Errorf("gateway %s was not ready within %s", url, startTime)
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
	return nil
}

// sandboxFolder returns the folder of the executors.
func (c *cluster) sandboxFolder() string { return filepath.Join(c.dir, "executor") }

// openLog opens the log with the rights of admin.
func (c *cluster) openLog(ctx context.Context) (*nats.Conn, *jslog.Log, error) {
	nc, err := nats.Connect(c.nats, nats.UserInfo(topology.UserAdmin, password(topology.UserAdmin)), nats.CustomInboxPrefix(topology.InboxPrefix(topology.UserAdmin)))
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
	keys, err := eventlog.ParseKeys(logKeys(eventlog.Writers()...), "")
	if err != nil {
		return nc, nil, err
	}
	signing, err := jslog.Signing(ctx, js, layout.Shards, keys, jslog.Verifier)
	if err != nil {
		return nc, nil, err
	}
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: layout.Shards, Partitions: layout.Partitions, Keys: keys, Signing: signing})
	return nc, log, err
}

// logKeys returns the setting with the keys that sign the commits of the roles.
func logKeys(roles ...string) string {
	var list []string
	for _, role := range roles {
		list = append(list, role+":"+strings.Repeat("chaos-"+role, 4))
	}
	return strings.Join(list, ",")
}

// headsSeed is the key that signs the heads of the log.
var headsSeed = strings.Repeat("c0", 32)

// headsPublicKey writes the public key into a file.
func (c *cluster) headsPublicKey() (file string, err error) {
	key, err := heads.ParsePrivateKey(headsSeed)
	if err != nil {
		return "", err
	}
	file = filepath.Join(c.dir, "heads.pub")
	return file, os.WriteFile(file, []byte(key.Public().String()+"\n"), 0o600)
}

// processes returns all parts and the model server.
func (c *cluster) processes() []*process {
	if c.mock == nil {
		return c.parts
	}
	return append(slices.Clone(c.parts), c.mock)
}

// end stops all processes, the servers last.
func (c *cluster) end() error {
	var errs []error
	all := c.processes()
	for i := len(all) - 1; i >= 0; i-- {
		sig := syscall.SIGTERM
		if all[i].name == "postgres" {
			sig = syscall.SIGINT // a fast shutdown, although clients are connected
		}
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		errs = append(errs, all[i].thaw(), all[i].end(ctx, sig))
		cancel()
	}
	return errors.Join(errs...)
}
