package topology

import (
	"fmt"
	"io"
	"strings"
)

//go:generate go run ./gen ../../deploy/nats.conf

// PasswordVariable is the environment variable that deploy/nats.conf takes a user's password from.
func PasswordVariable(user string) string { return "SPOOL_NATS_PASSWORD_" + strings.ToUpper(user) }

// The environment variables that deploy/nats.conf takes the PEM files of the server's certificate and of its private key from.
const (
	CertificateVariable = "SPOOL_NATS_TLS_CERT"
	KeyVariable         = "SPOOL_NATS_TLS_KEY"
)

// StoreVariable is the environment variable that bounds what the streams of deploy/nats.conf may take on disk, such as 100GB.
const StoreVariable = "SPOOL_NATS_MAX_STORE"

// natsConfHead is what the server is apart from its users. What differs from NATS's own defaults is what
// `spool up` sets for its embedded server too; ADR 11 says why.
const natsConfHead = `# Generated from pkg/topology by "make generate"; do not edit.
# The NATS server of an installation: JetStream on the disk, and for each service one account and one user with its rights alone
# (docs/adr/0042). Passwords come from the environment; make them of letters and digits and begin them with a letter, since the server reads them as values of its own.
server_name: spool
listen: 0.0.0.0:4222
# Health and figures, without a password: for this container's own health check alone.
http: 127.0.0.1:8222

# Whoever connects has to speak TLS. The files are read again at SIGHUP.
tls {
  cert_file: $%s
  key_file: $%s
  min_version: "1.2"
}

max_payload: 8388608
max_connections: 4096

jetstream {
  store_dir: /data
  # What is acknowledged is on the disk.
  sync_interval: always
  max_file_store: $%s
  # LIVE alone lies in memory, for a minute.
  max_memory_store: 512MB
}

`

// WriteNATSConf writes deploy/nats.conf: the configuration of a NATS server of
// its own, with the accounts of WriteAccounts.
func WriteNATSConf(w io.Writer) error {
	if _, err := fmt.Fprintf(w, natsConfHead, CertificateVariable, KeyVariable, StoreVariable); err != nil {
		return err
	}
	return WriteAccounts(w, "$"+StoreVariable, func(user string) string { return "$" + PasswordVariable(user) })
}
