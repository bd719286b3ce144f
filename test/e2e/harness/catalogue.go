package harness

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"sync"

	"github.com/spoolhq/spool/pkg/secret"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/skills"
)

// startSkills runs a copy of the skills service.
func (c *Cluster) startSkills() {
	nc, log := c.connect(topology.UserSkills)
	svc, err := skills.New(skills.Config{Scratch: c.T.TempDir()}, skills.Deps{NATS: nc, Log: log, Logger: c.logger("skills")})
	must(c.T, err)
	c.run(nc, svc.Ready(), svc.Run)
}

// setSecretsKeys sets a key pair of secrets for gateways and executors.
func (c *Cluster) setSecretsKeys() {
	identity, recipient, err := secret.Generate()
	must(c.T, err)
	c.opts.Executor.SecretsKey, c.opts.Gateway.SecretsRecipient = identity, recipient
}

// PushSkill pushes the archive of a skill, and returns the status and the body of the answer.
func (c *Cluster) PushSkill(zip []byte, query string) (int, []byte) {
	c.T.Helper()
	req, err := http.NewRequestWithContext(c.T.Context(), http.MethodPost, c.URL(0)+"/api/skills?"+query, bytes.NewReader(zip))
	must(c.T, err)
	req.Header.Set("Content-Type", "application/zip")
	res, err := http.DefaultClient.Do(req)
	must(c.T, err)
	defer res.Body.Close() //nolint:errcheck // the body is read
	raw, err := io.ReadAll(res.Body)
	must(c.T, err)
	return res.StatusCode, raw
}

// Written returns everything that the cluster wrote to the disk of this machine, by path: the files of NATS, of the
// egress proxy and of local sandboxes. It also returns everything that the services logged.
func (c *Cluster) Written() map[string][]byte {
	c.T.Helper()
	out := map[string][]byte{"the logs of the services": c.said.bytes()}
	for _, dir := range []string{c.dir, c.egressDir} {
		if dir == "" {
			continue
		}
		must(c.T, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			raw, err := os.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) {
				return nil // a temporary file of NATS, which is still running
			}
			out[path] = raw
			return err
		}))
	}
	return out
}

// Logs returns the log records of the services in slog's JSON format, oldest first. It needs Options.KeepLogs.
func (c *Cluster) Logs() (records []map[string]any) {
	c.T.Helper()
	for line := range bytes.Lines(c.said.bytes()) {
		var r map[string]any
		if json.Unmarshal(line, &r) == nil { // the egress proxy may have written a part of a line
			records = append(records, r)
		}
	}
	return records
}

// record is a writer that keeps the log output of the services under test.
type record struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all.Write(p)
}

func (r *record) bytes() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return bytes.Clone(r.all.Bytes())
}
