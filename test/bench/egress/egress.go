// Package egress measures what the egress proxy adds to a request to a model, to a request whose body it reads, and to
// each token of a streamed answer, compared with the same without it. The proxy is the real process. The client talks to
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
	maxRequests = 20_000
	maxTokens   = 100_000
	timeout     = 10 * time.Minute
)

// Benchmark is the subcommand egress. It measures the latency that the egress proxy adds to requests and to streamed
// tokens.
type Benchmark struct {
	Requests int           `default:"2000" help:"Requests on each route, one after the other."`
	Tokens   int           `default:"2000" help:"Tokens of a streamed answer."`
	Pace     time.Duration `default:"2ms" help:"Time from one token to the next, where they are not sent at once."`
}

// Validate is called by kong.
func (m *Benchmark) Validate() error {
	if m.Requests < 1 || m.Requests > maxRequests || m.Tokens < 2 || m.Tokens > maxTokens || m.Pace <= 0 {
		return fmt.Errorf("--requests must be 1 to %d, --tokens 2 to %d, --pace positive", maxRequests, maxTokens)
	}
	return nil
}

// testbed holds the routes to the model that the benchmark compares.
type testbed struct {
	*Benchmark
	direct, proxied route
	unread          route // through the proxy, which does not read the body
}

// route is a way to reach the model: directly, or through the egress proxy.
type route struct {
	url  string
	http *http.Client
}

// Measure implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	url, stop, err := listen()
	if err != nil {
		return err
	}
	b.Cleanup(stop)
	proxy, err := system.StartEgress(ctx, b.Dir, url)
	if err != nil {
		return err
	}
	b.Cleanup(proxy.Close)
	token, err := register(ctx, proxy)
	if err != nil {
		return err
	}
	direct, sandbox := &http.Transport{}, throughProxy(proxy, token)
	defer direct.CloseIdleConnections()
	defer sandbox.CloseIdleConnections()
	t := &testbed{Benchmark: m, direct: route{url, &http.Client{Transport: direct}}, proxied: route{proxiedURL, &http.Client{Transport: sandbox}}}
	t.unread = route{unreadURL, t.proxied.http}
	for _, measure := range []func(context.Context) (row.Row, error){t.perRequest, t.perBody, t.perToken, t.perTokenAtOnce} {
		r, err := measure(ctx)
		if err != nil {
			return err
		}
		if err := b.Report(r); err != nil {
			return err
		}
	}
	return nil
}

// warmUp is the number of requests on each route before the measured requests.
const warmUp = 20

// compare sends requests alternately on two routes, and returns the duration of each.
func (t *testbed) compare(ctx context.Context, one, other route, prompt string) (ones, others []time.Duration, err error) {
	for i := range t.Requests + warmUp {
		for _, k := range []struct {
			route
			into *[]time.Duration
		}{{one, &ones}, {other, &others}} {
			d, err := k.request(ctx, prompt)
			if err != nil {
				return nil, nil, err
			}
			if i >= warmUp {
				*k.into = append(*k.into, d)
			}
		}
	}
	return ones, others, nil
}

// perRequest measures what the proxy adds to a short request.
func (t *testbed) perRequest(ctx context.Context) (row.Row, error) {
	direct, proxied, err := t.compare(ctx, t.direct, t.proxied, "Is it so?")
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
	bodyBytes  = 200 << 10
	bodyTarget = 1.0                               // the maximum time that reading a body of bodyBytes adds at the median, in milliseconds
	sentence   = `It is \"so\", said the heron.\n` // escaped as part of a JSON string
)

// perBody measures the cost of reading a request of a long conversation, compared with the same proxy that forwards the
// request without reading it.
func (t *testbed) perBody(ctx context.Context) (row.Row, error) {
	unread, read, err := t.compare(ctx, t.unread, t.proxied, strings.Repeat(sentence, bodyBytes/len(sentence)))
	if err != nil {
		return row.Row{}, err
	}
	p50, base := row.Percentile(read, 0.5), row.Percentile(unread, 0.5)
	return row.Row{
		What:     fmt.Sprintf("egress proxy, reading the body of a request of %d KB", bodyBytes>>10),
		Target:   "under 1 ms at the median",
		Measured: fmt.Sprintf("%+.2f ms at the median, of %d requests", p50-base, t.Requests),
		Against:  fmt.Sprintf("forwarded unread by the same proxy p50 %.2f ms, p99 %.2f ms", base, row.Percentile(unread, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(read, 0.99), OK: p50-base < bodyTarget,
		Note: "with metering and the journal entry of the call",
	}, nil
}

// perToken measures the age of each streamed token when the client receives it. The model writes at the pace of a real
// one.
func (t *testbed) perToken(ctx context.Context) (row.Row, error) {
	direct, _, err := t.direct.stream(ctx, t.Tokens, t.Pace)
	if err != nil {
		return row.Row{}, err
	}
	proxied, _, err := t.proxied.stream(ctx, t.Tokens, t.Pace)
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

// perTokenAtOnce measures streams whose tokens the model writes as fast as the client reads them.
func (t *testbed) perTokenAtOnce(ctx context.Context) (row.Row, error) {
	const rounds = 5
	took := func(r route) (time.Duration, error) {
		var all []time.Duration
		for range rounds {
			_, d, err := r.stream(ctx, t.Tokens, 0)
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
