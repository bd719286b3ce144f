package topology

import (
	"fmt"
	"io"
	"strings"
)

//go:generate go run ./gen ../../deploy/nats.conf

// PasswordVariable returns the name of the environment variable with a user's password in deploy/nats.conf.
func PasswordVariable(user string) string { return "SPOOL_NATS_PASSWORD_" + strings.ToUpper(user) }

// The environment variables with the paths of the PEM files of the server's certificate and private key in
// deploy/nats.conf.
const (
	TLSCertificateVariable = "SPOOL_NATS_TLS_CERT"
	TLSKeyVariable         = "SPOOL_NATS_TLS_KEY"
)

// StoreLimitVariable is the environment variable with the disk limit of the streams in deploy/nats.conf, for example
// 100GB.
const StoreLimitVariable = "SPOOL_NATS_MAX_STORE"

// natsConfHead is the server configuration without the users. Settings that differ from the defaults of NATS are
// the ones that `spool up` sets for its embedded server; ADR 11 has the reasons.
const natsConfHead = `# Generated from pkg/topology by "make generate"; do not edit.
# The NATS server of an installation: JetStream on disk, and for each service one account and one user with only its own permissions
# (docs/adr/0042). Passwords come from the environment. Use letters and digits, starting with a letter: the server parses them as configuration values.
server_name: spool
listen: 0.0.0.0:4222
# Health and metrics, without a password: only for the health check inside this container.
http: 127.0.0.1:8222

# Clients must use TLS. SIGHUP reloads the files.
tls {
  cert_file: $%s
  key_file: $%s
  min_version: "1.2"
}

max_payload: 8388608
max_connections: 4096

jetstream {
  store_dir: /data
  # An acknowledged message is on disk.
  sync_interval: always
  max_file_store: $%s
  # No stream is in memory; the state of temporary consumers is.
  max_memory_store: 512MB
}

`

// WriteNATSConf writes deploy/nats.conf: the configuration of a separate NATS server, with the accounts of
// WriteAccounts.
func WriteNATSConf(w io.Writer) error {
	if _, err := fmt.Fprintf(w, natsConfHead, TLSCertificateVariable, TLSKeyVariable, StoreLimitVariable); err != nil {
		return err
	}
	return WriteAccounts(w, "$"+StoreLimitVariable, func(user string) string { return "$" + PasswordVariable(user) })
}
