// Package trust makes an agent's process, and the programs that it starts, trust a certificate authority in addition to
// those of the sandbox's image: the authority of the egress proxy, which issues certificates for hosts whose allowlist
// entry restricts methods.
package trust

import (
	"bytes"
	"cmp"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// bundlePath is the path, below the state folder, of the certificate bundle that the runner writes for agents.
// Snapshots do not contain it.
const bundlePath = agent.UnsavedFolder + "/authorities.pem"

// certificateStart is the first line of a certificate in PEM.
var certificateStart = []byte("-----BEGIN CERTIFICATE-----")

// maxBundleBytes is the maximum number of bytes that are read of one certificate bundle.
const maxBundleBytes = 4 << 20

// bundleVariables are the environment variables in which programs look for a certificate bundle: OpenSSL and programs
// based on it, Go and Rust, Node.js, Python's requests, pip, curl, git, AWS's tools, cargo and Deno.
var bundleVariables = []string{
	"SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO", "DENO_CERT",
}

// systemBundles are the paths at which Linux distributions store the system's certificate bundle. The first one that
// exists is used.
var systemBundles = []string{
	"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/pki/tls/cacert.pem",
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", "/etc/ssl/cert.pem",
}

// AddAuthority returns l with environment variables that make the agent's process trust authority, and the certificate
// bundle that the variables name. authority is one or more certificates in PEM; any other text in it is an error. The
// bundle also has the system's certificates, and those of bundles that l.Env names.
func AddAuthority(l agent.Launch, authority string) (agent.Launch, agent.LaunchFile, error) {
	if err := checkCertificates(authority); err != nil {
		return l, agent.LaunchFile{}, err
	}
	var files []string
	for _, path := range systemBundles {
		if _, err := os.Stat(path); err == nil {
			files = append(files, path)
			break
		}
	}
	own := bundleEnvironment(l)
	for _, v := range bundleVariables {
		if path := own[v]; filepath.IsAbs(path) && !slices.Contains(files, path) {
			files = append(files, path)
		}
	}
	bundle := filepath.Join(l.State, filepath.FromSlash(bundlePath))
	var b strings.Builder
	for _, path := range files {
		if path == bundle {
			continue
		}
		text, err := readBundle(path)
		if err != nil {
			return l, agent.LaunchFile{}, err
		}
		b.WriteString(text)
	}
	b.WriteString(strings.TrimSpace(authority) + "\n")
	env := make(map[string]string, len(l.Env)+len(bundleVariables))
	for k, v := range l.Env {
		env[k] = v
	}
	for _, v := range bundleVariables {
		env[v] = bundle
	}
	l.Env = env
	return l, agent.LaunchFile{Path: bundlePath, Content: b.String()}, nil
}

// checkCertificates returns an error unless text consists of certificates in PEM.
func checkCertificates(text string) error {
	rest := []byte(strings.TrimSpace(text))
	if len(rest) == 0 {
		return errors.New("no certificate in PEM")
	}
	for n := 1; len(rest) > 0; n++ {
		block, after := pem.Decode(rest)
		// Decode skips text and broken blocks before the block that it returns.
		if block == nil || block.Type != "CERTIFICATE" || !bytes.HasPrefix(rest, certificateStart) || bytes.Count(rest[:len(rest)-len(after)], certificateStart) > 1 {
			return fmt.Errorf("part %d is not a certificate in PEM", n)
		}
		rest = bytes.TrimSpace(after)
	}
	return nil
}

// bundleEnvironment returns the environment of the agent's process before the bundle is added: the runner's variables,
// and bundleVariables with their values in l.Env.
func bundleEnvironment(l agent.Launch) map[string]string {
	out := map[string]string{}
	for _, kv := range l.Environ {
		k, v, _ := strings.Cut(kv, "=")
		out[k] = v
	}
	for _, v := range bundleVariables {
		out[v] = cmp.Or(l.Env[v], out[v])
	}
	return out
}

// readBundle returns the text of a certificate bundle, or "" if the file does not exist.
func readBundle(path string) (string, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("certificate authorities: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return "", err
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxBundleBytes+1))
	switch {
	case err != nil:
		return "", fmt.Errorf("certificate authorities: %w", err)
	case len(raw) > maxBundleBytes:
		return "", fmt.Errorf("certificate authorities: %s has more than %d bytes", path, maxBundleBytes)
	case len(raw) == 0:
		return "", nil
	}
	return strings.TrimRight(string(raw), "\n") + "\n", nil
}
