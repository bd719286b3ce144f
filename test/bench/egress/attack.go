package egress

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

const (
	// attackers is the number of sandboxes of the hostile tenant.
	attackers = 4
	// attackerRequests is the number of requests that each of them has open.
	attackerRequests = 4
	// attackedTurns is the number of turns of the other tenant that are measured, without the attack and with it.
	attackedTurns = 100
	// attackedTurnTokens is the number of tokens of the answer of such a turn.
	attackedTurnTokens = 200
	// maxAttackRatio is the performance target: the largest ratio of the 99th percentiles of turns under attack and without it.
	maxAttackRatio = 2.0
)

// hostileBody returns a request body of nearly 32 MiB with as many keys as fit.
func hostileBody() []byte {
	const size = 32<<20 - 64
	out := bytes.NewBuffer(make([]byte, 0, 32<<20))
	out.WriteString(`{"model":"bench","metadata":[{"k":0`)
	for i := 0; out.Len() < size; i++ {
		if i%50_000 == 49_999 { // the proxy refuses more keys in one object
			out.WriteString(`},{"k":0`)
		}
		fmt.Fprintf(out, `,"%x":0`, i)
	}
	out.WriteString(`}]}`)
	return out.Bytes()
}

// measureAttack measures the turns of a tenant while the sandboxes of another tenant send bodies that take as much memory and time of
// the proxy as they can, and without that. It returns the row of docs/performance.md.
func (t *testbed) measureAttack(ctx context.Context, proxy *system.EgressProxy) (row.Row, error) {
	alone, err := t.timeTurns(ctx)
	if err != nil {
		return row.Row{}, err
	}
	attack, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	var sent, refused atomic.Int64
	body := hostileBody()
	for range attackers {
		token, err := registerSandbox(ctx, proxy, "hostile")
		if err != nil {
			return row.Row{}, err
		}
		transport := newProxyTransport(proxy, token)
		defer transport.CloseIdleConnections()
		for range attackerRequests {
			running.Go(func() {
				for attack.Err() == nil {
					switch status := sendHostileBody(attack, transport, body); status {
					case http.StatusOK:
						sent.Add(1)
					case http.StatusServiceUnavailable:
						refused.Add(1)
					}
				}
			})
		}
	}
	attacked, err := t.timeTurns(ctx)
	if err != nil {
		return row.Row{}, err
	}
	if refused.Load() == 0 || sent.Load() == 0 {
		return row.Row{}, fmt.Errorf("the attack did not reach the limits: %d bodies were forwarded, %d were refused", sent.Load(), refused.Load())
	}
	p99, base := row.Percentile(attacked, 0.99), row.Percentile(alone, 0.99)
	return row.Row{
		What:     "egress proxy, a turn of a tenant while another sends bodies with millions of keys",
		Target:   "p99 at most twice that without the attack",
		Measured: fmt.Sprintf("p99 %.0f ms, of %d turns", p99, attackedTurns),
		Against:  fmt.Sprintf("without the attack p50 %.0f ms, p99 %.0f ms", row.Percentile(alone, 0.5), base),
		Ratio:    p99 / base, P50Ms: row.Percentile(attacked, 0.5), P99Ms: p99, OK: p99 <= maxAttackRatio*base,
		Note: fmt.Sprintf("a turn is one request of %d KB with a streamed answer of %d tokens; %d sandboxes of the hostile tenant with %d requests each share the machine with the proxy; %d of their bodies were forwarded, %d were refused",
			requestBodyBytes>>10, attackedTurnTokens, attackers, attackerRequests, sent.Load(), refused.Load()),
	}, nil
}

// sendHostileBody sends a body and returns the status of the answer, or 0 if there is none because the proxy closed the connection.
func sendHostileBody(ctx context.Context, transport *http.Transport, body []byte) int {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, proxiedURL+"/v1/messages", bytes.NewReader(body))
	if err != nil {
		return 0
	}
	res, err := transport.RoundTrip(req)
	if err != nil {
		return 0
	}
	defer res.Body.Close() //nolint:errcheck // only read
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		return 0
	}
	return res.StatusCode
}

// timeTurns measures turns, one after the other.
func (t *testbed) timeTurns(ctx context.Context) ([]time.Duration, error) {
	prompt := strings.Repeat(promptSentence, requestBodyBytes/len(promptSentence))
	var out []time.Duration
	for range attackedTurns {
		_, took, err := t.proxied.timeStream(ctx, prompt, attackedTurnTokens, t.Pace)
		if err != nil {
			return nil, err
		}
		out = append(out, took)
	}
	return out, nil
}
