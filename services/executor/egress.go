package executor

import (
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"

	hosts "github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/services/executor/internal/egress"
)

// startsEgressProxy reports whether this executor starts the egress proxy, as a container on its engine.
func (c Config) startsEgressProxy() bool { return c.Sandbox == ProviderDocker && c.EgressImage != "" }

// checkEgressSettings returns an error if the settings of the egress proxy are invalid or contradict each other. The settings
// either name a running proxy, or configure the proxy that this executor starts.
func (c Config) checkEgressSettings() error {
	if c.Sandbox == ProviderModal {
		_, err := c.remoteEgress()
		return err
	}
	switch {
	case c.EgressServer != "" || c.EgressAuthority != "":
		return fmt.Errorf("egress-server, egress-authority: they are for sandbox %s, and sandbox is %s: leave them empty", ProviderModal, c.Sandbox)
	case (c.EgressAdmin == "") != (c.EgressSockets == ""):
		return errors.New("egress-admin and egress-sockets: set both, or neither")
	case !c.startsEgressProxy():
		return nil
	case c.EgressAdmin != "":
		return errors.New("egress-image: egress-admin and egress-sockets name a proxy that runs already: set either egress-image or these")
	case c.EgressNetwork == "none" || strings.HasPrefix(c.EgressNetwork, "container:"):
		return fmt.Errorf("egress-network: %q cannot reach the internet, so no sandbox would reach a model: name a network of the engine", c.EgressNetwork)
	}
	return c.egressConfig().Check()
}

// remoteEgress is the address by which sandboxes on other machines reach the egress proxy.
type remoteEgress struct {
	Server    string // host:port
	Authority string // certificates in PEM form
}

// remoteEgress checks the settings for sandboxes on other machines, and reads the file of the authority.
func (c Config) remoteEgress() (remoteEgress, error) {
	server, err := hosts.ParseTarget(c.EgressServer, 0)
	switch {
	case c.EgressServer == "":
		return remoteEgress{}, fmt.Errorf("egress-server: it is empty, and %s sandboxes reach models only through it: set the host and port of the egress proxy's TLS listener", ProviderModal)
	case err != nil:
		return remoteEgress{}, fmt.Errorf("egress-server: it is not a host and a port like proxy.example.com:7443: %w", err)
	case server.Host.Addr.IsUnspecified():
		return remoteEgress{}, fmt.Errorf("egress-server: no sandbox can connect to %s: set the address by which the internet reaches the egress proxy", server)
	case c.EgressAuthority == "":
		return remoteEgress{}, errors.New("egress-authority: it is empty: set the PEM file of the authority that signed the certificate of egress-server")
	case c.EgressAdmin == "":
		return remoteEgress{}, fmt.Errorf("egress-admin: it is empty, and %s sandboxes are registered there: set the admin socket of the egress proxy", ProviderModal)
	case c.EgressSockets != "" || c.EgressImage != "":
		return remoteEgress{}, fmt.Errorf("egress-sockets, egress-image: they are for sandbox %s: leave them empty", ProviderDocker)
	}
	text, err := os.ReadFile(c.EgressAuthority)
	if err != nil {
		return remoteEgress{}, fmt.Errorf("egress-authority: %w", err)
	}
	if !x509.NewCertPool().AppendCertsFromPEM(text) {
		return remoteEgress{}, fmt.Errorf("egress-authority: %s has no certificate in PEM form", c.EgressAuthority)
	}
	return remoteEgress{server.String(), string(text)}, nil
}

// egressConfig returns the settings of the egress proxy that this executor starts. They include the API keys of the model
// providers, which sandboxes do not have.
func (c Config) egressConfig() egress.Config {
	return egress.Config{
		AnthropicKey: c.AnthropicKey, AnthropicBaseURL: c.AnthropicBaseURL, OpenAIKey: c.OpenAIKey, OpenAIBaseURL: c.OpenAIBaseURL,
		NVIDIAKey: c.NVIDIAKey, NVIDIABaseURL: c.NVIDIABaseURL,
	}
}
