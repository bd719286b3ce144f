package command

import (
	"net"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/truncate"
)

type certificatesCommand struct {
	Authority   string        `required:"" type:"path" placeholder:"DIR" help:"Folder of the authority's certificate and private key; it is created if it does not exist."`
	CAFile      string        `name:"ca-file" required:"" type:"path" placeholder:"FILE" help:"Output file for the authority's certificate, for clients."`
	Issue       []string      `required:"" sep:"none" placeholder:"DIR=NAME,…" help:"Folder of a certificate and its private key, and the host names and IP addresses of the certificate; ports are ignored. Repeat for each server."`
	ValidFor    time.Duration `default:"17520h" help:"Validity of a new certificate."`
	RenewBefore time.Duration `default:"720h" help:"Renew certificates that expire within this time."`
	JSON        bool          `help:"Print one JSON object per line."`
}

// Run creates the certificate authority and the TLS certificates that are missing, expire soon or have other names.
func (c *certificatesCommand) Run(a *app) error {
	type server struct {
		folder string
		names  []string
	}
	var servers []server
	for _, text := range c.Issue {
		folder, list, _ := strings.Cut(text, "=")
		s := server{folder: folder}
		for name := range strings.SplitSeq(list, ",") {
			name = strings.TrimSpace(name)
			if host, _, err := net.SplitHostPort(name); err == nil {
				name = host
			}
			if name != "" {
				s.names = append(s.names, name)
			}
		}
		if folder == "" || len(s.names) == 0 {
			return usageError("issue: %q is not a folder with names, such as /certificates/nats=nats,10.0.0.1", truncate.Text(text, 64))
		}
		servers = append(servers, s)
	}
	if c.ValidFor <= 0 || c.RenewBefore < 0 {
		return usageError("valid-for, renew-before: %s must be positive, and %s must not be negative", c.ValidFor, c.RenewBefore)
	}
	authority, err := certificate.OpenAuthority(c.Authority, certificate.Validity{For: c.ValidFor, RenewBefore: c.RenewBefore}, time.Now())
	if err != nil {
		return err
	}
	// Clients must trust an authority before a server presents one of its certificates.
	if err := authority.WriteTrustFile(c.CAFile); err != nil {
		return err
	}
	for _, s := range servers {
		issued, err := authority.Issue(s.folder, s.names)
		if err != nil {
			return err
		}
		if err := c.printIssued(a, s.folder, s.names, issued); err != nil {
			return err
		}
	}
	return nil
}

// printIssued prints which certificates were issued, and how to use them.
func (c *certificatesCommand) printIssued(a *app, folder string, names []string, issued certificate.IssueResult) error {
	if c.JSON {
		return a.printJSON(map[string]any{"folder": folder, "names": names, "notAfter": issued.NotAfter, "renewed": issued.Renewed})
	}
	done := map[bool]string{false: "kept", true: "made"}[issued.Renewed]
	_, err := terminal.Fprintf(a.Out, "%s %s for %s, until %s\n", done, folder, strings.Join(names, ", "), issued.NotAfter.UTC().Format(time.RFC3339))
	return err
}
