package command

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/settings"
	"github.com/spoolhq/spool/services/gateway"
)

// defaultURL returns the URL at which `spool up` serves by default.
func defaultURL() string {
	var cfg gateway.Config
	settings.SetDefaults(&cfg)
	return "http://" + cfg.Listen
}

// probeTimeout is the time limit of the request that checks whether a server responds on this machine.
const probeTimeout = 3 * time.Second

// stackGoneTimeout is the time after which a local stack that does not respond counts as ended.
const stackGoneTimeout = 3 * time.Second

// serverFlags are the flags of commands that send requests to a server.
type serverFlags struct {
	URL  string `env:"SPOOL_URL" placeholder:"http://${gateway_Listen}" help:"URL of the gateway; by default the default address of spool up, or else the stack on the data folder."`
	Key  string `env:"SPOOL_API_KEY" help:"API key; by default the local key of the stack on the data folder, which is sent to that stack only."`
	CA   string `name:"ca-file" env:"SPOOL_CA_FILE" placeholder:"FILE" help:"PEM file of the authorities that verify the certificate of an https server; by default the system's."`
	Data string `env:"SPOOL_DATA_DIR" placeholder:"DIR" help:"Data folder of a local stack; by default spool in the user's data folder."`
	JSON bool   `help:"Print one JSON object per line."`
}

// connect returns a client of the server that the flags name, or of a server that runs on this machine.
func (s serverFlags) connect(ctx context.Context, a *app) (*client.Client, error) {
	c, _, err := s.findServer(ctx, a)
	return c, err
}

// withClient calls do with a client, and with a context that ends at the first signal. If do fails after a signal,
// withClient returns errInterrupted.
func (s serverFlags) withClient(a *app, do func(context.Context, *client.Client) error) error {
	ctx, cancel := a.interruptibleContext()
	defer cancel()
	cl, err := s.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	err = do(ctx, cl)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		return cause
	}
	return err
}

// changeAndPrint calls do, which changes something on the server. It then prints the text done on standard error, or
// the response with --json.
func (s serverFlags) changeAndPrint(a *app, done string, do func(context.Context, *client.Client) (any, error)) error {
	return s.withClient(a, func(ctx context.Context, cl *client.Client) error {
		response, err := do(ctx, cl)
		switch {
		case err != nil:
			return err
		case s.JSON:
			return a.printJSON(response)
		}
		terminal.Fprintln(a.Err, done)
		return nil
	})
}

// tenantFlags are the flags of commands about a tenant.
type tenantFlags struct {
	serverFlags
	Tenant string `placeholder:"T" help:"The tenant; by default the caller's."`
}

// findServer returns a client of the server that the flags name, or of a server that responds on this machine. local
// reports whether the server is a stack on the data folder, which may end with the run that has started it. It does not
// check whether a server that the flags name responds.
func (s serverFlags) findServer(ctx context.Context, a *app) (c *client.Client, local bool, err error) {
	running, ok, err := s.findRunningStack(a)
	if s.URL != "" {
		// A data folder that cannot be read does not concern a server that the flags name.
		c, err := client.New(client.Config{URL: s.URL, Key: s.keyFor(s.URL, running), CAFile: s.CA})
		if err != nil {
			return nil, false, &exitError{ExitUsage, err}
		}
		return c, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	var urls []string
	if ok {
		urls = append(urls, running.URL)
	}
	if ok && s.Data != "" {
		urls = append(urls, a.DefaultURL)
	} else {
		urls = append([]string{a.DefaultURL}, urls...)
	}
	var first error
	for _, u := range urls {
		local := ok && u == running.URL
		cfg := client.Config{URL: u, Key: s.keyFor(u, running), CAFile: s.CA}
		if local {
			cfg.GiveUp = stackGoneTimeout
		}
		c, err := client.New(cfg)
		if err != nil {
			return nil, false, &exitError{ExitUsage, err}
		}
		probe, cancel := context.WithTimeout(ctx, probeTimeout)
		err = c.Ping(probe)
		cancel()
		if err == nil {
			return c, local, nil
		}
		if ctx.Err() != nil {
			return nil, false, context.Cause(ctx)
		}
		if errors.Is(err, context.DeadlineExceeded) {
			err = &client.UnreachableError{URL: u, Err: err}
		}
		if first == nil || local {
			first = err
		}
	}
	return nil, false, first
}

// keyFor returns the key for requests to a URL: the key of the flags, or else the local key of the running stack if this
// stack serves exactly that URL. Another server, such as one on another address of localhost, does not receive it.
func (s serverFlags) keyFor(url string, running StackConnection) string {
	if s.Key == "" && strings.TrimRight(url, "/") == running.URL {
		return running.LocalKey
	}
	return s.Key
}

// findRunningStack returns how to reach the stack that runs on the data folder, if there is one.
func (s serverFlags) findRunningStack(a *app) (StackConnection, bool, error) {
	dir, err := dataDirOrDefault(a, s.Data)
	if err != nil {
		return StackConnection{}, false, err
	}
	return a.Local.Find(dir)
}

// dataDirOrDefault returns the value of the flag with the data folder, or the default data folder if the flag is "".
func dataDirOrDefault(a *app, flag string) (string, error) {
	if flag != "" {
		return flag, nil
	}
	return a.Local.DefaultDir()
}

// checkID returns a usage error if id cannot be the id of an object of the kind. field is the argument, for the
// message.
func checkID(field string, kind events.IDKind, id string) error {
	if err := events.CheckID(field, kind, id); err != nil {
		return &exitError{ExitUsage, err}
	}
	return nil
}
