package gateway

import (
	"errors"
	"fmt"
	"github.com/spoolhq/spool/pkg/settings"
	"github.com/spoolhq/spool/pkg/storage"
	"net"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/services/gateway/internal/api"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/cors"
	"github.com/spoolhq/spool/services/gateway/internal/rest"
)

// Values of Config.Auth: how a gateway authenticates clients.
const (
	AuthOff  = "off"  // clients need no key and act as tenant default; allowed on loopback only
	AuthKeys = "keys" // clients need an API key or the root key
)

// Config configures a gateway: flags, and SPOOL_* environment variables of the same names. The zero value is valid
// and listens on loopback.
type Config struct {
	Listen               string        `help:"Address of the HTTP listener: REST, SSE, WebSocket, health, metrics." default:"127.0.0.1:7700" env:"SPOOL_LISTEN"`
	GRPCListen           string        `name:"grpc-listen" help:"Address of the gRPC listener." default:"127.0.0.1:7701" env:"SPOOL_GRPC_LISTEN"`
	TLSCert              string        `name:"tls-cert" placeholder:"FILE" help:"PEM file of the certificate, with its chain, for HTTP and gRPC. The file is read again when it changes." env:"SPOOL_TLS_CERT"`
	TLSKey               string        `name:"tls-key" placeholder:"FILE" help:"PEM file of the private key of tls-cert." env:"SPOOL_TLS_KEY"`
	BehindTLSProxy       bool          `name:"behind-tls-proxy" default:"false" help:"Allows listening beyond loopback without tls-cert, because a proxy in front of this gateway terminates TLS." env:"SPOOL_BEHIND_TLS_PROXY"`
	TrustedProxies       []string      `help:"Addresses and networks (CIDR) of proxies in front of this gateway. Only on connections from them is the client's address read from X-Forwarded-For, and the use of TLS from X-Forwarded-Proto. With behind-tls-proxy, empty means every connection." env:"SPOOL_TRUSTED_PROXIES"`
	PublishedAddress     string        `help:"Host address on which a container engine publishes the listeners, if they can only be reached there. Without TLS it must be on loopback." env:"SPOOL_PUBLISHED_ADDRESS"`
	Auth                 string        `help:"Authentication of clients: keys requires an API key; off serves every client as tenant default and is refused beyond loopback." default:"off" enum:"off,keys" env:"SPOOL_AUTH"`
	RootKey              string        `help:"A key of 32 characters or more that may only manage API keys, limits and budgets, of any tenant." env:"SPOOL_ROOT_KEY"`
	AllowedOrigins       []string      `help:"Origins of web pages that may use this gateway, such as https://app.example.com; * allows all." env:"SPOOL_ALLOWED_ORIGINS"`
	PathPrefix           string        `help:"Path below which a proxy serves this gateway, such as /spool. The proxy may keep or remove the prefix: requests are served with and without it." env:"SPOOL_PATH_PREFIX"`
	NoWeb                bool          `name:"no-web" default:"false" help:"Serves no inspector, the page at /." env:"SPOOL_NO_WEB"`
	SignInLifetime       time.Duration `name:"signin-lifetime" help:"How long a session with a cookie may last. It also ends after 8 hours without a request." default:"168h" env:"SPOOL_SIGNIN_LIFETIME"`
	CommandTimeout       time.Duration `help:"How long the gateway waits for the answer to a command before it reports an unknown outcome." default:"10s" env:"SPOOL_COMMAND_TIMEOUT"`
	WriteTimeout         time.Duration `help:"How long a streaming client may take to read before its stream is ended. For WatchExecution this applies to the final status only." default:"10s" env:"SPOOL_WRITE_TIMEOUT"`
	MaxRequest           int64         `help:"Largest body in bytes of a request with workspaceFiles." default:"16777216" env:"SPOOL_MAX_REQUEST"`
	MaxFile              int64         `help:"Largest file or tar, in bytes, that may be uploaded to a workspace." default:"1073741824" env:"SPOOL_MAX_FILE"`
	MaxTranscript        int64         `help:"Largest transcript, in bytes, that a session may continue." default:"67108864" env:"SPOOL_MAX_TRANSCRIPT"`
	MaxBytes             int64         `help:"Bytes of requests and of unsent stream data that the gateway holds at once; a request above the limit is refused with OVERLOADED. Streams may hold half of the bytes, and wait for three times write-timeout before they are refused. The process may use a multiple of this in memory." default:"134217728" env:"SPOOL_MAX_BYTES"`
	MaxTenantBytes       int64         `help:"Bytes, as in max-bytes, for one tenant; a request above the limit is refused with TOO_MUCH_IN_FLIGHT. At least max-request." default:"67108864" env:"SPOOL_MAX_TENANT_BYTES"`
	MaxTenantStreams     int           `help:"Streams (SSE, WebSocket and gRPC together) that one tenant may have open at this gateway, including requests that wait for the end of an execution." default:"2048" env:"SPOOL_MAX_TENANT_STREAMS"`
	MaxTenantRequests    int           `help:"Requests and WebSocket messages per second that one tenant may send to this gateway; a request above the rate is refused with RATE_LIMITED." default:"1000" env:"SPOOL_MAX_TENANT_REQUESTS"`
	MaxTenantBurst       int           `help:"Largest burst of requests of one tenant, after a pause." default:"10000" env:"SPOOL_MAX_TENANT_BURST"`
	MaxTenantSessions    int           `help:"Sessions, except deleted ones, that one tenant may have; a new session above the limit is refused with TENANT_SESSIONS. 0 means no limit." default:"0" env:"SPOOL_MAX_TENANT_SESSIONS"`
	MaxTenantStorage     int64         `help:"Bytes that one tenant may store: events, files and snapshots of its sessions, definitions and skills. Requests that would store more are refused with TENANT_STORAGE. 0 means no limit." default:"0" env:"SPOOL_MAX_TENANT_STORAGE"`
	MaxConnections       int           `help:"Connections that may be open, for HTTP and gRPC separately. Further connections are closed immediately." default:"4096" env:"SPOOL_MAX_CONNECTIONS"`
	MaxAddressConns      int           `name:"max-address-connections" help:"Connections from one address, for HTTP and gRPC separately. Behind a proxy all clients have the proxy's address: use the value of max-connections there." default:"2048" env:"SPOOL_MAX_ADDRESS_CONNECTIONS"`
	ReadTimeout          time.Duration `help:"How long the body of a request, a gRPC message or a WebSocket message may take to arrive. File uploads and downloads get the additional time that they need at 16 KiB a second." default:"30s" env:"SPOOL_READ_TIMEOUT"`
	SecretsRecipientFile string        `help:"File that contains secrets-recipient." env:"SPOOL_SECRETS_RECIPIENT_FILE"`
	SecretsRecipient     string        `help:"Public key (age1…) to which secrets are encrypted, or several separated by commas; executors have the private key. Without it secrets are refused." env:"SPOOL_SECRETS_RECIPIENT"`
	storage.ReserveSettings
	LagAfter      time.Duration `help:"How far the read models may be behind before streaming clients are notified." default:"5s" env:"SPOOL_LAG_AFTER"`
	ShutdownGrace time.Duration `help:"How long running requests may take to finish when the gateway stops." default:"10s" env:"SPOOL_SHUTDOWN_GRACE"`
}

// validate sets the defaults and returns an error that begins with the name of the first invalid setting.
func (c *Config) validate() error {
	settings.SetDefaults(c)
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"command-timeout", c.CommandTimeout}, {"write-timeout", c.WriteTimeout}, {"lag-after", c.LagAfter}, {"read-timeout", c.ReadTimeout}, {"signin-lifetime", c.SignInLifetime},
		{"shutdown-grace", c.ShutdownGrace},
	} {
		if d.value < 0 {
			return fmt.Errorf("%s: %s is negative", d.name, d.value)
		}
	}
	for _, n := range []struct {
		name            string
		value, min, max int64
	}{
		{"max-request", c.MaxRequest, api.MaxMessageBytes, 256 << 20},
		{"max-file", c.MaxFile, 1, 16 << 30},
		{"max-transcript", c.MaxTranscript, 1, 1 << 30},
		{"max-bytes", c.MaxBytes, 10 << 20, 1 << 40},
		{"max-tenant-bytes", c.MaxTenantBytes, 10 << 20, 1 << 40},
		{"max-tenant-storage", c.MaxTenantStorage, 0, 1 << 60},
	} {
		if n.value < n.min || n.value > n.max {
			return fmt.Errorf("%s: %d bytes is not between %d and %d", n.name, n.value, n.min, n.max)
		}
	}
	if err := storage.CheckReserve(c.StoreReserve); err != nil {
		return err
	}
	// A gateway whose max-request was raised before this limit existed must still accept such requests.
	c.MaxTenantBytes = max(c.MaxTenantBytes, c.MaxRequest+1<<20)
	c.MaxBytes = max(c.MaxBytes, c.MaxTenantBytes)
	for _, n := range []struct {
		name  string
		value int
	}{
		{"max-tenant-streams", c.MaxTenantStreams}, {"max-tenant-requests", c.MaxTenantRequests}, {"max-tenant-burst", c.MaxTenantBurst},
		{"max-tenant-sessions", c.MaxTenantSessions}, {"max-connections", c.MaxConnections}, {"max-address-connections", c.MaxAddressConns},
	} {
		if n.value < 0 {
			return fmt.Errorf("%s: %d is negative", n.name, n.value)
		}
	}
	if c.Auth != AuthOff && c.Auth != AuthKeys {
		return fmt.Errorf("auth: %.64q is neither %s nor %s", c.Auth, AuthOff, AuthKeys)
	}
	for i, o := range c.AllowedOrigins {
		c.AllowedOrigins[i] = strings.ToLower(o)
		if err := cors.ValidateOrigin(c.AllowedOrigins[i]); err != nil {
			return err
		}
	}
	if c.RootKey != "" && len(c.RootKey) < auth.MinRootKeyLength {
		return fmt.Errorf("root-key has %d characters; it needs %d or more random characters", len(c.RootKey), auth.MinRootKeyLength)
	}
	if err := rest.ValidatePathPrefix(c.PathPrefix); err != nil {
		return err
	}
	if _, err := c.recipients(); err != nil {
		return fmt.Errorf("secrets-recipient: %w", err)
	}
	if _, err := c.trustedProxies(); err != nil {
		return err
	}
	if _, err := certificate.CheckPair(c.TLSCert, c.TLSKey); err != nil {
		return err
	}
	return errors.Join(c.checkListenAddress("listen", c.Listen), c.checkListenAddress("grpc-listen", c.GRPCListen))
}

// trustedProxies returns the reverse proxies whose header X-Forwarded-For the gateway uses to find a client's
// address.
func (c *Config) trustedProxies() (auth.TrustedProxies, error) {
	p, err := auth.ParseProxies(c.TrustedProxies)
	p.Any = c.BehindTLSProxy && len(c.TrustedProxies) == 0
	return p, err
}

// checkListenAddress returns an error if other machines can reach addr, the value of the setting name, and API keys
// or TLS are off.
func (c *Config) checkListenAddress(name, addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("%s: %.100q is not host:port: %w", name, addr, err)
	}
	if c.Auth == AuthOff && !cors.ListensOnLoopback(host) {
		return fmt.Errorf("%s: %s can be reached from other machines, where keys are needed: use --auth keys, or listen on 127.0.0.1", name, addr)
	}
	if c.PublishedAddress != "" {
		host = c.PublishedAddress
	}
	if c.TLSCert == "" && !c.BehindTLSProxy && !cors.ListensOnLoopback(host) {
		return fmt.Errorf("%s: %s can be reached from other machines, where TLS is needed: name a certificate with --tls-cert and --tls-key, "+
			"listen on 127.0.0.1, or set --behind-tls-proxy if a proxy in front speaks TLS", name, addr)
	}
	return nil
}
