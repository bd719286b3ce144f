package daemon

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// healthRequestTimeout is the maximum time in which a running service must report whether it is ready.
const healthRequestTimeout = 8 * time.Second

// requestHealth sends a request to /readyz of the service that listens on addr, with TLS if secure is set. It returns
// nil if the service is ready, and otherwise an error that names the components that are not ready.
func requestHealth(ctx context.Context, addr string, secure bool) error {
	if addr == "" {
		return errors.New("health: no address is set: set --metrics-listen or SPOOL_METRICS_LISTEN to the value of the service")
	}
	to, err := localAddress(addr)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, healthRequestTimeout)
	defer cancel()
	scheme := map[bool]string{false: "http", true: "https"}[secure]
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+"://"+to+"/readyz", nil)
	if err != nil {
		return fmt.Errorf("health: %w", err)
	}
	// The service is on this machine, so a proxy from the environment must not be used.
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		// No secret is sent, and a service with an expired certificate must still be reachable.
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // as above
	}}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("health: no response from %s: %w", to, err)
	}
	defer func() { _ = resp.Body.Close() }()
	var report struct {
		Checks map[string]string `json:"checks"`
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return fmt.Errorf("health: read the response of %s: %w", to, err)
	}
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	if err := json.Unmarshal(body, &report); err != nil || report.Checks == nil {
		return fmt.Errorf("health: %s responded with %s", to, resp.Status)
	}
	var wrong []string
	for _, name := range slices.Sorted(maps.Keys(report.Checks)) {
		if said := report.Checks[name]; said != "ok" {
			wrong = append(wrong, name+": "+said)
		}
	}
	return fmt.Errorf("health: not ready: %s", strings.Join(wrong, "; "))
}

// localAddress returns the address at which this machine reaches a server that listens on addr.
func localAddress(addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", fmt.Errorf("health: %.100q is not an address such as 127.0.0.1:9090", addr)
	}
	switch ip, err := netip.ParseAddr(host); {
	case host == "":
		host = "127.0.0.1"
	case err == nil && ip.IsUnspecified() && ip.Is4():
		host = "127.0.0.1"
	case err == nil && ip.IsUnspecified():
		host = "::1"
	}
	return net.JoinHostPort(host, port), nil
}
