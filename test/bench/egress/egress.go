// Package egress measures what the egress proxy adds to a request to a model, to a request whose body it reads, and to
// each token of a streamed answer, compared with the same without it, and how long turns take while another tenant attacks the proxy. The proxy is the real process. The client talks to
// its socket as a sandbox's runner does: it sends the token first. The model is a server in this process that does
// nothing else.
package egress

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// Limits of the flags, because the proxy's journal and the time are limited.
const (
	// maxRequests is the maximum of the flag --requests, the number of measured requests.
	maxRequests = 20_000
	// maxTokens is the maximum of the flag --tokens, the number of tokens of a streamed answer.
	maxTokens = 100_000
	// benchmarkTimeout is the time limit of the whole benchmark of the egress proxy.
	benchmarkTimeout = 10 * time.Minute
)

// Benchmark is the subcommand egress of the benchmark program. It measures the time that the egress proxy adds to
// requests to a model, and to the tokens of a streamed answer.
type Benchmark struct {
	Requests int           `default:"2000" help:"Requests on each route, one after the other."`
	Tokens   int           `default:"2000" help:"Tokens of a streamed answer."`
	Pace     time.Duration `default:"2ms" help:"Time from one token to the next, where they are not sent at once."`
}

// Validate checks the flags of the benchmark. kong, the parser of the command line, calls it.
func (m *Benchmark) Validate() error {
	if m.Requests < 1 || m.Requests > maxRequests || m.Tokens < 2 || m.Tokens > maxTokens || m.Pace <= 0 {
		return fmt.Errorf("--requests must be 1 to %d, --tokens 2 to %d, --pace positive", maxRequests, maxTokens)
	}
	return nil
}

// testbed holds the routes to the model that the benchmark compares: without the egress proxy, through it, and through
// it with unread bodies.
type testbed struct {
	*Benchmark
	direct, proxied modelRoute
	unread          modelRoute // through the proxy, which does not read the body
}

// modelRoute is a way to reach the model: directly, or through the egress proxy.
type modelRoute struct {
	url  string
	http *http.Client
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	ctx, cancel := context.WithTimeout(ctx, benchmarkTimeout)
	defer cancel()
	url, stop, err := startModel()
	if err != nil {
		return err
	}
	b.Cleanup(stop)
	proxy, err := system.StartEgressProxy(ctx, b.Dir, url)
	if err != nil {
		return err
	}
	b.Cleanup(proxy.Close)
	token, err := registerSandbox(ctx, proxy, "default")
	if err != nil {
		return err
	}
	direct, sandbox := &http.Transport{}, newProxyTransport(proxy, token)
	defer direct.CloseIdleConnections()
	defer sandbox.CloseIdleConnections()
	t := &testbed{Benchmark: m, direct: modelRoute{url, &http.Client{Transport: direct}}, proxied: modelRoute{proxiedURL, &http.Client{Transport: sandbox}}}
	t.unread = modelRoute{unreadBodyURL, t.proxied.http}
	attack := func(ctx context.Context) (row.Row, error) { return t.measureAttack(ctx, proxy) }
	for _, measure := range []func(context.Context) (row.Row, error){t.measureRequest, t.measureBodyRead, t.measureToken, t.measureUnpacedStream, attack} {
		r, err := measure(ctx)
		if err != nil {
			return err
		}
		if err := b.ReportRow(r); err != nil {
			return err
		}
	}
	return nil
}

// shortPrompt is the prompt of a short request.
const shortPrompt = "Is it so?"

// warmUpRequests is the number of requests on each route before the measured requests.
const warmUpRequests = 20

// compareRoutes sends a request with the prompt on two routes, alternately and many times. It returns the durations of
// the requests of each route, up to the end of the answer.
func (t *testbed) compareRoutes(ctx context.Context, one, other modelRoute, prompt string) (ones, others []time.Duration, err error) {
	for i := range t.Requests + warmUpRequests {
		for _, k := range []struct {
			modelRoute
			into *[]time.Duration
		}{{one, &ones}, {other, &others}} {
			d, err := k.timeRequest(ctx, prompt)
			if err != nil {
				return nil, nil, err
			}
			if i >= warmUpRequests {
				*k.into = append(*k.into, d)
			}
		}
	}
	return ones, others, nil
}

// measureRequest measures the time that the egress proxy adds to a short request, and returns the row of
// docs/performance.md.
func (t *testbed) measureRequest(ctx context.Context) (row.Row, error) {
	direct, proxied, err := t.compareRoutes(ctx, t.direct, t.proxied, shortPrompt)
	if err != nil {
		return row.Row{}, err
	}
	p50, base := row.Percentile(proxied, 0.5), row.Percentile(direct, 0.5)
	return row.Row{
		What:     "egress proxy, one request to a model",
		Measured: fmt.Sprintf("%+.2f ms at the median, of %d requests", p50-base, t.Requests),
		Against:  fmt.Sprintf("direct p50 %.2f ms, p99 %.2f ms", base, row.Percentile(direct, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(proxied, 0.99),
		Note: "connections are reused; the proxy checks the allowlist, adds the key, meters and journals; without the runner's hop",
	}, nil
}

const (
	// requestBodyBytes is the size, in bytes, of the body of a request with a long conversation.
	requestBodyBytes = 200 << 10
	// maxBodyReadMs is the performance target: the maximum time, in milliseconds at the median, that the egress proxy
	// needs to read a request body of requestBodyBytes.
	maxBodyReadMs = 1.0
	// promptSentence is repeated to make the prompt of a long request. It is escaped as part of a JSON string.
	promptSentence = `It is \"so\", said the heron.\n`
)

// measureBodyRead measures the time that the egress proxy needs to read the body of a long request, compared with the
// same proxy when it forwards the body unread. It returns the row of docs/performance.md.
func (t *testbed) measureBodyRead(ctx context.Context) (row.Row, error) {
	unread, read, err := t.compareRoutes(ctx, t.unread, t.proxied, strings.Repeat(promptSentence, requestBodyBytes/len(promptSentence)))
	if err != nil {
		return row.Row{}, err
	}
	p50, base := row.Percentile(read, 0.5), row.Percentile(unread, 0.5)
	return row.Row{
		What:     fmt.Sprintf("egress proxy, reading the body of a request of %d KB", requestBodyBytes>>10),
		Target:   "under 1 ms at the median",
		Measured: fmt.Sprintf("%+.2f ms at the median, of %d requests", p50-base, t.Requests),
		Against:  fmt.Sprintf("forwarded unread by the same proxy p50 %.2f ms, p99 %.2f ms", base, row.Percentile(unread, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(read, 0.99), OK: p50-base < maxBodyReadMs,
		Note: "with metering and the journal entry of the call",
	}, nil
}

// measureToken measures the age of each streamed token when the client receives it, with and without the egress proxy,
// and returns the row of docs/performance.md. The model sends tokens at the pace of a real one.
func (t *testbed) measureToken(ctx context.Context) (row.Row, error) {
	direct, _, err := t.direct.timeStream(ctx, shortPrompt, t.Tokens, t.Pace)
	if err != nil {
		return row.Row{}, err
	}
	proxied, _, err := t.proxied.timeStream(ctx, shortPrompt, t.Tokens, t.Pace)
	if err != nil {
		return row.Row{}, err
	}
	p50, base := row.Percentile(proxied, 0.5), row.Percentile(direct, 0.5)
	return row.Row{
		What:     fmt.Sprintf("egress proxy, a streamed token, one every %s", t.Pace),
		Measured: fmt.Sprintf("%+.3f ms at the median, of %d tokens", p50-base, len(proxied)),
		Against:  fmt.Sprintf("direct p50 %.3f ms, p99 %.2f ms", base, row.Percentile(direct, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(proxied, 0.99),
		Note: "from the model's write to the client's read",
	}, nil
}

// measureUnpacedStream measures streamed answers whose tokens the model writes as fast as the client reads them, with
// and without the egress proxy. It returns the row of docs/performance.md.
func (t *testbed) measureUnpacedStream(ctx context.Context) (row.Row, error) {
	const rounds = 5
	took := func(r modelRoute) (time.Duration, error) {
		var all []time.Duration
		for range rounds {
			_, d, err := r.timeStream(ctx, shortPrompt, t.Tokens, 0)
			if err != nil {
				return 0, err
			}
			all = append(all, d)
		}
		return time.Duration(row.Percentile(all, 0.5) * float64(time.Millisecond)), nil
	}
	direct, err := took(t.direct)
	if err != nil {
		return row.Row{}, err
	}
	proxied, err := took(t.proxied)
	if err != nil {
		return row.Row{}, err
	}
	each := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 / float64(t.Tokens) }
	return row.Row{
		What:     "egress proxy, streamed tokens written at once, each flushed",
		Measured: fmt.Sprintf("%.1f µs a token", each(proxied)),
		Against:  fmt.Sprintf("direct %.1f µs a token", each(direct)),
		Ratio:    each(proxied) / each(direct),
		Note:     fmt.Sprintf("the median of %d answers of %d tokens; model, proxy and client share the machine", rounds, t.Tokens),
	}, nil
}
