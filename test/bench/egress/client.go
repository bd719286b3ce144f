package egress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/test/bench/system"
)

// proxiedURL is the URL at which an agent in a sandbox reaches the model through the egress proxy.
const proxiedURL = runner.EgressURL + "/" + runner.EgressRouteAnthropic

// unreadBodyURL is the URL at which an agent in a sandbox reaches the model through the egress proxy, if the proxy must
// not read the bodies of the requests.
const unreadBodyURL = runner.EgressURL + "/" + system.EgressUnreadRoute

// registerSandbox registers a new sandbox of a tenant with the egress proxy, as an executor does, and returns the sandbox's token.
func registerSandbox(ctx context.Context, proxy *system.EgressProxy, tenant string) (token string, err error) {
	newID := func(kind events.IDKind) string {
		id, ierr := events.NewID(kind, time.Now(), rand.Reader)
		err = errors.Join(err, ierr)
		return id
	}
	sandbox, token := newID(events.KindSandbox), rand.Text()
	body, merr := json.Marshal(map[string]any{
		"token": token, "tenant": tenant, "session": newID(events.KindSession), "execution": newID(events.KindExecution), "epoch": 1, "allow": []string{},
	})
	if err := errors.Join(err, merr); err != nil {
		return "", err
	}
	admin := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", proxy.Admin)
	}}
	defer admin.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, "http://egress/v1/sandboxes/"+sandbox, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	res, err := (&http.Client{Transport: admin}).Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close() //nolint:errcheck // read to its end
	raw, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("register a sandbox with the egress proxy: status %s: %s", res.Status, raw)
	}
	return token, err
}

// newProxyTransport returns an HTTP transport that connects to the egress proxy's socket with a sandbox's token, as the
// runner does.
func newProxyTransport(proxy *system.EgressProxy, token string) *http.Transport {
	return &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", proxy.Sandboxes)
		if err != nil {
			return nil, err
		}
		if _, err := io.WriteString(c, runner.EgressPreamble+token+"\n"); err != nil {
			return nil, errors.Join(err, c.Close())
		}
		return c, nil
	}}
}

// post sends a request to the model by this route. prompt must be escaped as part of a JSON string; stream requests a
// streamed answer; header sets the number of its tokens and the pause between them.
func (r modelRoute) post(ctx context.Context, prompt string, stream bool, header http.Header) (*http.Response, error) {
	body := fmt.Sprintf(`{"model":"bench","max_tokens":100,"stream":%t,"messages":[{"role":"user","content":"%s"}]}`, stream, prompt)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+"/v1/messages", strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header = header
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Api-Key", "bench")
	res, err := r.http.Do(req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		raw, rerr := io.ReadAll(res.Body)
		return nil, errors.Join(fmt.Errorf("post to %s: status %s: %s", r.url, res.Status, raw), rerr, res.Body.Close())
	}
	return res, nil
}

// timeRequest sends a request that the model answers at once, and returns the time from the request to the end of the
// answer.
func (r modelRoute) timeRequest(ctx context.Context, prompt string) (time.Duration, error) {
	began := time.Now()
	res, err := r.post(ctx, prompt, false, http.Header{})
	if err != nil {
		return 0, err
	}
	defer res.Body.Close() //nolint:errcheck // read to its end
	raw, err := io.ReadAll(res.Body)
	took := time.Since(began)
	if err == nil && string(raw) != unstreamedAnswer {
		err = fmt.Errorf("post to %s: unexpected answer %.200q", r.url, raw)
	}
	return took, err
}

// timeStream requests an answer to a prompt of a number of tokens, which the model sends one by one with a pause of pace. It
// returns the age of each token at its receipt, and the time from the request to the end of the answer.
func (r modelRoute) timeStream(ctx context.Context, prompt string, tokens int, pace time.Duration) (ages []time.Duration, took time.Duration, err error) {
	began := time.Now()
	res, err := r.post(ctx, prompt, true, http.Header{tokenCountHeader: {strconv.Itoa(tokens)}, tokenPauseHeader: {pace.String()}})
	if err != nil {
		return nil, 0, err
	}
	defer res.Body.Close() //nolint:errcheck // read to its end
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		received := time.Now()
		_, text, ok := strings.Cut(lines.Text(), `"text_delta","text":"`)
		if !ok {
			continue
		}
		stamp, err := strconv.ParseInt(strings.TrimRight(text, `"}`), 10, 64)
		if err != nil {
			return nil, 0, err
		}
		ages = append(ages, received.Sub(time.Unix(0, stamp)))
	}
	if err := lines.Err(); err != nil {
		return nil, 0, err
	}
	if len(ages) != tokens {
		return nil, 0, fmt.Errorf("post to %s: received %d of %d tokens", r.url, len(ages), tokens)
	}
	return ages, time.Since(began), nil
}
