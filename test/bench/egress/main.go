// Command egress measures what the egress proxy adds: to a request to a model, by
// reading its body, and to each token of a streamed answer, against the same without it. The proxy
// is the real process; the client speaks to its socket as a sandbox's runner does,
// token first. The model is a server in this process that does nothing else.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// limits of what is asked for: the proxy's journal and the time are bounded.
const (
	maxRequests = 20_000
	maxTokens   = 100_000
	within      = 10 * time.Minute
)

const command = "cd test && go run ./bench/egress"

func main() {
	var b bench
	flag.IntVar(&b.requests, "requests", 2000, "requests of each way, one after the other")
	flag.IntVar(&b.tokens, "tokens", 2000, "tokens of a streamed answer, at their pace and at once")
	flag.DurationVar(&b.pace, "pace", 2*time.Millisecond, "time from one token to the next")
	dir := flag.String("dir", "", "folder for everything; a temporary one by default")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	if err := b.run(ctx, os.Stdout, *dir); err != nil {
		fmt.Fprintln(os.Stderr, "egress:", err)
		os.Exit(1)
	}
}

type bench struct {
	requests, tokens int
	pace             time.Duration
	direct, proxied  way
	unread           way // through the proxy, which does not read the body
}

// way is one of the two to the model.
type way struct {
	url  string
	http *http.Client
}

func (b *bench) run(ctx context.Context, out io.Writer, dir string) (err error) {
	if b.requests < 1 || b.requests > maxRequests || b.tokens < 2 || b.tokens > maxTokens || b.pace <= 0 {
		return fmt.Errorf("requests must be 1 to %d, tokens 2 to %d, pace positive", maxRequests, maxTokens)
	}
	tmp, remove, err := system.Scratch(dir)
	if err != nil {
		return err
	}
	defer remove()
	url, stop, err := listen()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	proxy, err := system.StartEgress(ctx, tmp, url)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, proxy.Close()) }()
	token, err := register(ctx, proxy)
	if err != nil {
		return err
	}
	direct, sandbox := &http.Transport{}, throughProxy(proxy, token)
	defer direct.CloseIdleConnections()
	defer sandbox.CloseIdleConnections()
	b.direct, b.proxied = way{url, &http.Client{Transport: direct}}, way{proxiedURL, &http.Client{Transport: sandbox}}
	b.unread = way{unreadURL, b.proxied.http}
	for _, measure := range []func(context.Context) (row.Row, error){b.perRequest, b.perBody, b.perToken, b.perTokenAtOnce} {
		r, err := measure(ctx)
		if err != nil {
			return err
		}
		if err := row.Write(out, r); err != nil {
			return err
		}
	}
	return nil
}

// warmUp is how many requests come before those that are measured.
const warmUp = 20

// compare takes requests of two ways, turn about.
func (b *bench) compare(ctx context.Context, one, other way, prompt string) (ones, others []time.Duration, err error) {
	for i := range b.requests + warmUp {
		for _, k := range []struct {
			way
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

// perRequest measures a short request.
func (b *bench) perRequest(ctx context.Context) (row.Row, error) {
	direct, proxied, err := b.compare(ctx, b.direct, b.proxied, "Is it so?")
	if err != nil {
		return row.Row{}, err
	}
	p50, base := row.Percentile(proxied, 0.5), row.Percentile(direct, 0.5)
	return row.Row{
		What:     "egress proxy, one request to a model",
		Measured: fmt.Sprintf("%+.2f ms at the median, of %d requests", p50-base, b.requests),
		Against:  fmt.Sprintf("direct p50 %.2f ms, p99 %.2f ms", base, row.Percentile(direct, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(proxied, 0.99), Command: command,
		Note: "connections kept; allowed, given the key, metered and journaled; the runner's own hop apart",
	}, nil
}

// bodyTarget is what reading a body of bodyBytes may add at the median, in milliseconds.
const (
	bodyTarget = 1.0
	bodyBytes  = 200 << 10
	sentence   = `It is \"so\", said the heron.\n` // as it stands inside a string of JSON
)

// perBody measures what it costs to read a request of a long conversation, against the same proxy that passes it unread.
func (b *bench) perBody(ctx context.Context) (row.Row, error) {
	unread, read, err := b.compare(ctx, b.unread, b.proxied, strings.Repeat(sentence, bodyBytes/len(sentence)))
	if err != nil {
		return row.Row{}, err
	}
	p50, base := row.Percentile(read, 0.5), row.Percentile(unread, 0.5)
	return row.Row{
		What:     fmt.Sprintf("egress proxy, reading the body of a request of %d KB", bodyBytes>>10),
		Target:   "under 1 ms at the median",
		Measured: fmt.Sprintf("%+.2f ms at the median, of %d requests", p50-base, b.requests),
		Against:  fmt.Sprintf("passed on unread by the same proxy p50 %.2f ms, p99 %.2f ms", base, row.Percentile(unread, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(read, 0.99), OK: p50-base < bodyTarget, Command: command,
		Note: "metering and the journal of the call included",
	}, nil
}

// perToken reads a stream at a model's pace, both ways: how old each token is when it comes.
func (b *bench) perToken(ctx context.Context) (row.Row, error) {
	direct, _, err := b.direct.stream(ctx, b.tokens, b.pace)
	if err != nil {
		return row.Row{}, err
	}
	proxied, _, err := b.proxied.stream(ctx, b.tokens, b.pace)
	if err != nil {
		return row.Row{}, err
	}
	p50, base := row.Percentile(proxied, 0.5), row.Percentile(direct, 0.5)
	return row.Row{
		What:     fmt.Sprintf("egress proxy, a streamed token, one every %s", b.pace),
		Measured: fmt.Sprintf("%+.3f ms at the median, of %d tokens", p50-base, len(proxied)),
		Against:  fmt.Sprintf("direct p50 %.3f ms, p99 %.2f ms", base, row.Percentile(direct, 0.99)),
		Ratio:    p50 / base, P50Ms: p50, P99Ms: row.Percentile(proxied, 0.99), Command: command,
		Note: "from the model's write to the client's read",
	}, nil
}

// perTokenAtOnce reads streams that are written as fast as they are read.
func (b *bench) perTokenAtOnce(ctx context.Context) (row.Row, error) {
	const rounds = 5
	took := func(w way) (time.Duration, error) {
		var all []time.Duration
		for range rounds {
			_, d, err := w.stream(ctx, b.tokens, 0)
			if err != nil {
				return 0, err
			}
			all = append(all, d)
		}
		return time.Duration(row.Percentile(all, 0.5) * float64(time.Millisecond)), nil
	}
	direct, err := took(b.direct)
	if err != nil {
		return row.Row{}, err
	}
	proxied, err := took(b.proxied)
	if err != nil {
		return row.Row{}, err
	}
	each := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 / float64(b.tokens) }
	return row.Row{
		What:     "egress proxy, streamed tokens written at once, each flushed",
		Measured: fmt.Sprintf("%.1f µs a token", each(proxied)),
		Against:  fmt.Sprintf("direct %.1f µs a token", each(direct)),
		Ratio:    each(proxied) / each(direct), Command: command,
		Note: fmt.Sprintf("the median of %d answers of %d tokens; model, proxy and client share the machine", rounds, b.tokens),
	}, nil
}
