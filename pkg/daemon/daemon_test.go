package daemon

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/daemon/porttest"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cli holds the settings of a service, with one required setting of its own.
type cli struct {
	Settings
	Database string `required:"" help:"Something."`
}

// service runs a program against a real NATS server until the program ends, and returns the exit code.
func service(t *testing.T, stderr io.Writer, run func(context.Context, Env) error, args ...string) int {
	t.Helper()
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort})
	var c cli
	p := serviceProgram{name: "svc", doc: "A service.", cli: &c, settings: &c.Settings, run: run, open: openNoLog}
	return p.runMain(append([]string{"--database=x", "--nats-url=" + srv.ClientURL()}, args...), io.Discard, stderr)
}

// health runs `svc health` and returns the exit code and the output.
func health(t *testing.T, args ...string) (int, string) {
	t.Helper()
	var c cli
	var said bytes.Buffer
	p := serviceProgram{name: "svc", doc: "A service.", cli: &c, settings: &c.Settings}
	return p.runMain(append([]string{"health"}, args...), io.Discard, &said), said.String()
}

func get(t *testing.T, addr, path string) (int, string) {
	t.Helper()
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + addr + path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// awaitPartitions is an opener that waits for the partitions, as a service without the log does.
func awaitPartitions(ctx context.Context, nc *nats.Conn, logger *slog.Logger) (eventlog.Log, events.Partitioning, error) {
	partitions, err := AwaitPartitions(ctx, nc, logger)
	return nil, partitions, err
}

func TestHealth_ReportsTheStateOfTheService(t *testing.T) {
	t.Parallel()
	addr := porttest.FreeAddrs(t, 1)[0]
	code := service(t, io.Discard, func(_ context.Context, env Env) error {
		ready := make(chan struct{})
		env.Health.AddChannelCheck("jobs", ready)
		env.Metrics.MustRegister(prometheus.NewCounter(prometheus.CounterOpts{Name: "svc_turns_total", Help: "Turns."}))

		if status, _ := get(t, addr, "/healthz"); status != http.StatusOK {
			t.Errorf("/healthz answers %d before the service is ready", status)
		}
		if status, body := get(t, addr, "/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(body, `"jobs":"not started yet"`) || !strings.Contains(body, `"nats":"ok"`) {
			t.Errorf("/readyz answers %d %s", status, body)
		}
		if code, said := health(t, "--metrics-listen="+addr); code != 1 || said != "svc: health: not ready: jobs: not started yet\n" {
			t.Errorf("health before: %d, %q", code, said)
		}
		close(ready)
		if status, body := get(t, addr, "/readyz"); status != http.StatusOK {
			t.Errorf("/readyz answers %d %s", status, body)
		}
		if code, said := health(t, "--metrics-listen="+addr); code != 0 || said != "" {
			t.Errorf("health after: %d, %q", code, said)
		}
		_, metrics := get(t, addr, "/metrics")
		for _, want := range []string{"svc_turns_total 0", "go_goroutines", "process_resident_memory_bytes", "spool_nats_connected 1"} {
			if !strings.Contains(metrics, want) {
				t.Errorf("/metrics has no %s", want)
			}
		}
		return nil
	}, "--metrics-listen="+addr)
	if code != 0 {
		t.Errorf("the service ended with %d", code)
	}
	if code, said := health(t, "--metrics-listen="+addr); code != 1 || !strings.Contains(said, "no response from "+addr) {
		t.Errorf("health of a stopped service: %d, %q", code, said)
	}
}

func TestHealth_RefusesInvalidAddresses(t *testing.T) {
	t.Parallel()
	for arg, want := range map[string]string{
		"--metrics-listen=":      "set --metrics-listen or SPOOL_METRICS_LISTEN",
		"--metrics-listen=nine":  `"nine" is not an address`,
		"--log-level=everything": "log-level",
	} {
		if code, said := health(t, arg); code == 0 || !strings.Contains(said, want) {
			t.Errorf("%s: %d, %q", arg, code, said)
		}
	}
	for addr, want := range map[string]string{"0.0.0.0:1": "127.0.0.1:1", ":2": "127.0.0.1:2", "[::]:3": "[::1]:3", "10.0.0.1:4": "10.0.0.1:4", "host:5": "host:5"} {
		if got, err := localAddress(addr); got != want || err != nil {
			t.Errorf("%s is reached by %s, %v", addr, got, err)
		}
	}
}

func TestMetricsListen_IsOffByDefaultAndRefusesBadAddresses(t *testing.T) {
	t.Parallel()
	var said bytes.Buffer
	code := service(t, &said, func(context.Context, Env) error { return nil })
	if code != 0 || strings.Contains(said.String(), "health and metrics are served") {
		t.Errorf("without an address: %d, %s", code, said.String())
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	for addr, want := range map[string]string{taken.Addr().String(): "choose another address with --metrics-listen", "9090": "is not an address"} {
		said.Reset()
		code := service(t, &said, func(context.Context, Env) error { t.Error("the service ran"); return nil }, "--metrics-listen="+addr)
		if code != 1 || !strings.Contains(said.String(), want) {
			t.Errorf("%s: %d, %s", addr, code, said.String())
		}
	}
}

// TestLogLevel_SetsTheLowestLevelLogged tests that every log line is JSON and names the service, and that no line is
// below the configured level.
func TestLogLevel_SetsTheLowestLevelLogged(t *testing.T) {
	for level, want := range map[string][]string{
		"":      {"INFO", "WARN", "ERROR"},
		"debug": {"DEBUG", "INFO", "WARN", "ERROR"},
		"WARN":  {"WARN", "ERROR"},
		"error": {"ERROR"},
	} {
		t.Run("level "+level, func(t *testing.T) {
			if level != "" {
				t.Setenv("SPOOL_LOG_LEVEL", level)
			}
			var said bytes.Buffer
			code := service(t, &said, func(_ context.Context, env Env) error {
				env.Logger.Debug("mine")
				env.Logger.Info("mine")
				env.Logger.Warn("mine")
				env.Logger.Error("mine")
				return nil
			})
			if code != 0 {
				t.Fatalf("the service ended with %d: %s", code, said.String())
			}
			var got []string
			for lines := bufio.NewScanner(&said); lines.Scan(); {
				var line struct{ Level, Msg, Service string }
				if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
					t.Fatalf("%s is not JSON: %v", lines.Text(), err)
				}
				if line.Service != "svc" {
					t.Errorf("%s does not name the service", lines.Text())
				}
				if line.Msg == "mine" {
					got = append(got, line.Level)
				}
			}
			if strings.Join(got, " ") != strings.Join(want, " ") {
				t.Errorf("logged %v, want %v", got, want)
			}
		})
	}
	t.Run("no level", func(t *testing.T) {
		t.Setenv("SPOOL_LOG_LEVEL", "loud")
		var said bytes.Buffer
		if code := service(t, &said, func(context.Context, Env) error { return nil }); code != 2 || !strings.Contains(said.String(), "log-level") {
			t.Errorf("the service ended with %d: %s", code, said.String())
		}
	})
}

// serviceCLI is the command line of a service that opens the log.
type serviceCLI struct {
	Settings
	LogSettings
}

func TestOpen_WaitsForTheStreamsAndReadsTheirPartitions(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]logOpenFunc{"with the log": logOpener{"session", jslog.RoleWriter, &serviceCLI{}}.open, "without the log": awaitPartitions} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			nc := natstest.Conn(t, natstest.Run(t))
			js, err := jetstream.New(nc)
			if err != nil {
				t.Fatal(err)
			}
			var said syncBuffer
			waits := make(chan struct{})
			logger := slog.New(slog.NewTextHandler(io.MultiWriter(&said, closeOnWrite{waits}), nil))
			type opened struct {
				log        eventlog.Log
				partitions events.Partitioning
				err        error
			}
			done := make(chan opened, 1)
			go func() {
				log, partitions, err := open(t.Context(), nc, logger)
				done <- opened{log, partitions, err}
			}()
			<-waits
			if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{Shards: 2, Partitions: 16}); err != nil {
				t.Fatal(err)
			}
			got := <-done
			if got.err != nil || got.partitions != 16 || got.log != nil && got.log.Partitioning() != 16 {
				t.Errorf("opened %+v after %s", got, said.String())
			}
		})
	}
}

// TestOpen_RepeatsEveryRequestThatNATSDoesNotAnswer opens the log while NATS does not answer one request, once for each
// request of the start.
func TestOpen_RepeatsEveryRequestThatNATSDoesNotAnswer(t *testing.T) {
	t.Parallel()
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort})
	js, err := jetstream.New(natstest.Conn(t, srv))
	if err != nil {
		t.Fatal(err)
	}
	keys := "session:" + strings.Repeat("s", 32)
	parsed, err := eventlog.ParseKeys(keys, "session")
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{Shards: 2, Partitions: 8, KeyIDs: parsed.KeyIDs()}); err != nil {
		t.Fatal(err)
	}
	// openWithout opens the log while the request of that number is lost, and returns the number of requests.
	openWithout := func(t *testing.T, lost int32) int32 {
		var requests atomic.Int32
		relay := natstest.RunRelay(t, strings.TrimPrefix(srv.ClientURL(), "nats://"), func(subject string) bool {
			return subject != "PING" && requests.Add(1) == lost
		})
		nc, err := nats.Connect(relay.URL)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		opener := logOpener{"session", jslog.RoleContributor, &serviceCLI{LogSettings: LogSettings{LogKeys: keys}}}
		log, _, err := opener.open(t.Context(), nc, slog.New(slog.DiscardHandler))
		if err != nil || log.Shards() != 2 {
			t.Errorf("request %d was lost: %v", lost, err)
		}
		return requests.Load()
	}
	all := openWithout(t, 0)
	if all < 4 {
		t.Fatalf("the start sends %d requests, want at least the layout and the signing settings of two shards", all)
	}
	for lost := int32(1); lost <= all; lost++ {
		t.Run(fmt.Sprintf("request %d", lost), func(t *testing.T) {
			t.Parallel()
			if requests := openWithout(t, lost); requests <= all {
				t.Errorf("%d requests, want more than the %d of a start in which none is lost", requests, all)
			}
		})
	}
}

// TestOpen_RefusesInvalidSigningSettings tests that the start ends at once, with an error that names the stream, if the
// recorded signing settings cannot be read.
func TestOpen_RefusesInvalidSigningSettings(t *testing.T) {
	t.Parallel()
	nc := natstest.Conn(t, natstest.Run(t))
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{Partitions: 8}); err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(t.Context(), "EVENTS-0")
	if err != nil {
		t.Fatal(err)
	}
	c := s.CachedInfo().Config
	for field, value := range map[string]string{"spool-commit-version": "new", "spool-signed-after": "x"} {
		c.Metadata["spool-commit-version"], c.Metadata["spool-signing-keys"] = "1", "session/1"
		c.Metadata[field] = value
		if _, err := js.UpdateStream(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("stream EVENTS-0: metadata %s is %q", field, value)
		if _, _, err := (logOpener{"session", jslog.RoleWriter, &serviceCLI{}}).open(t.Context(), nc, slog.New(slog.DiscardHandler)); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

func TestOpen_RefusesStreamsOfAnotherLayout(t *testing.T) {
	t.Parallel()
	nc := natstest.Conn(t, natstest.Run(t))
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(t.Context(), js, topology.ProvisionConfig{Partitions: 8}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"EVENTS-0", "COMMANDS"} {
		s, err := js.Stream(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		c := s.CachedInfo().Config
		c.Metadata["spool-partitions"] = "9"
		if _, err := js.UpdateStream(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	for stream, open := range map[string]logOpenFunc{"EVENTS-0": logOpener{"session", jslog.RoleWriter, &serviceCLI{}}.open, "COMMANDS": awaitPartitions} {
		want := "stream " + stream + `: metadata spool-partitions is "9"`
		if _, _, err := open(t.Context(), nc, slog.New(slog.DiscardHandler)); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// closeOnWrite closes a channel at the first write.
type closeOnWrite struct{ written chan struct{} }

func (c closeOnWrite) Write(b []byte) (int, error) {
	select {
	case <-c.written:
	default:
		close(c.written)
	}
	return len(b), nil
}
