// Package server is a local stand-in for Modal's API, for tests: the calls that
// the Go SDK makes for apps, images and sandboxes. Sandboxes are containers of a
// Docker engine on the same machine.
package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/gofrs/flock"
	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
)

// Config configures a Server. Data is required; the other fields have defaults.
type Config struct {
	Listen       string   `default:"127.0.0.1:0" help:"Address of the gRPC API."`
	Control      string   `default:"127.0.0.1:0" help:"Address of the control API (HTTP)."`
	Data         string   `required:"" type:"path" help:"Data folder of the server. At its start, a server removes everything that killed servers left on the engine."`
	DockerHost   string   `help:"Address of the Docker engine, which must be on this machine. Empty: DOCKER_HOST, or the default socket."`
	Tokens       []string `name:"token" default:"ak-test:as-test" help:"Credentials that are accepted, as ID:SECRET."`
	Environments []string `name:"environment" default:"main" help:"Names of the environments. The first is the default."`
	GatewayNames []string `name:"gateway-name" help:"Name that stands for the gateway, in sandboxes and in domain allowlists."`

	UntilParentEnds bool `help:"End when the process that started this one has ended, as after SIGTERM."`
}

// ReadyMessage is the JSON line that Run writes to its output when the server accepts calls.
type ReadyMessage struct {
	URL     string `json:"url"`
	Control string `json:"control"`
	Gateway string `json:"gateway"` // the machine's address in the sandboxes' network
}

// Server is a local stand-in for Modal's API that runs sandboxes as Docker containers. It is safe for concurrent use.
type Server struct {
	cfg    Config
	logger *slog.Logger
	engine *dockerEngine
	port   *switchablePort
	url    string
	secret []byte          // signs tokens
	life   context.Context // ends before the server removes its containers and images
	stop   context.CancelFunc

	lock *flock.Flock // the lock of the data folder

	launches sync.WaitGroup

	calls callTracker

	mu           sync.Mutex
	environments map[string]*modalEnvironment // by name
	apps         map[string]*modalApp         // by id
	secrets      map[string]*modalSecret      // by id
	images       map[string]*modalImage       // by id
	published    map[string]*modalImage       // by environment and tag
	sandboxes    []*modalSandbox              // by time of creation
	lastCreated  float64
}

// Run serves Modal's API until ctx ends, and then removes everything that the server has created on the Docker engine.
func Run(ctx context.Context, cfg Config, out io.Writer, logger *slog.Logger) (err error) {
	s, err := newServer(ctx, cfg, logger)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	var listen net.ListenConfig
	controlListener, err := listen.Listen(ctx, "tcp", cfg.Control)
	if err != nil {
		return fmt.Errorf("listen on the control address: %w", err)
	}
	api := grpc.NewServer(
		grpc.ChainUnaryInterceptor(s.interceptUnary), grpc.ChainStreamInterceptor(s.interceptStream),
		grpc.UnknownServiceHandler(s.refuseUnknownMethod), grpc.WaitForHandlers(true),
		grpc.MaxRecvMsgSize(100<<20), grpc.MaxSendMsgSize(100<<20),
		grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(4<<20),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	)
	pb.RegisterModalClientServer(api, &controlPlane{Server: s})
	pb.RegisterTaskCommandRouterServer(api, &commandRouter{Server: s})
	control := &http.Server{Handler: s.controlAPI(), ReadHeaderTimeout: 10 * time.Second}
	if err := json.NewEncoder(out).Encode(ReadyMessage{
		URL: s.url, Control: "http://" + controlListener.Addr().String(), Gateway: s.engine.gateway.String(),
	}); err != nil {
		return err
	}
	if cfg.UntilParentEnds {
		ctx = contextUntilParentEnds(ctx)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return api.Serve(s.port) })
	group.Go(func() error { return control.Serve(controlListener) })
	group.Go(func() error {
		<-ctx.Done()
		s.stop()
		api.Stop()
		return control.Close()
	})
	if err := group.Wait(); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	return nil
}

// newServer validates the configuration, locks and empties the data folder, and connects to the Docker engine.
func newServer(ctx context.Context, cfg Config, logger *slog.Logger) (*Server, error) {
	data, err := filepath.Abs(cfg.Data)
	if err != nil {
		return nil, err
	}
	cfg.Data = data
	for _, token := range cfg.Tokens {
		if id, secret, ok := strings.Cut(token, ":"); !ok || id == "" || secret == "" {
			return nil, fmt.Errorf("token %q is not of the form ID:SECRET", token)
		}
	}
	address, err := netip.ParseAddrPort(cfg.Listen)
	if err != nil || !address.Addr().Is4() || !address.Addr().IsLoopback() {
		return nil, fmt.Errorf("the listen address %q must be an IPv4 loopback address with a port: the SDK speaks without TLS only there", cfg.Listen)
	}
	s := &Server{
		cfg: cfg, logger: logger, secret: []byte(randomSuffix(32)),
		environments: map[string]*modalEnvironment{}, apps: map[string]*modalApp{}, secrets: map[string]*modalSecret{},
		images: map[string]*modalImage{}, published: map[string]*modalImage{},
	}
	s.life, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	for _, name := range cfg.Environments {
		s.environments[name] = &modalEnvironment{id: newV1ID("en"), name: name}
	}
	if s.port, err = openPort(address); err != nil {
		return nil, err
	}
	s.url = "http://" + s.port.Addr().String()
	if err := s.openDataFolder(); err != nil {
		return nil, errors.Join(err, s.port.Close())
	}
	if s.engine, err = newEngine(ctx, cfg, logger); err != nil {
		return nil, errors.Join(err, s.port.Close(), s.lock.Unlock())
	}
	return s, nil
}

// openDataFolder creates, locks and empties the data folder.
func (s *Server) openDataFolder() (err error) {
	if err := os.MkdirAll(s.cfg.Data, 0o700); err != nil {
		return err
	}
	if s.lock, err = lockDataFolder(s.cfg.Data); err != nil {
		return err
	}
	for _, name := range []string{"outputs", "images"} {
		folder := filepath.Join(s.cfg.Data, name)
		err = errors.Join(err, os.RemoveAll(folder), os.Mkdir(folder, 0o700))
	}
	return err
}

// contextUntilParentEnds returns a context that ends when ctx or the parent process of this program ends.
func contextUntilParentEnds(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	parent := os.Getppid()
	go func() {
		defer cancel()
		for os.Getppid() == parent {
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Second):
			}
		}
	}()
	return ctx
}

// close ends all sandboxes, and removes everything that the server has created on the Docker engine.
func (s *Server) close() error {
	s.stop()
	s.launches.Wait()
	return errors.Join(s.port.Close(), s.engine.close(context.Background()), s.lock.Unlock())
}
