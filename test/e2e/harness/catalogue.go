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

// StartSkills starts one more copy of the skills service. stop stops it.
func (c *Cluster) StartSkills() (stop func()) {
	nc, log := c.connectNATS(topology.UserSkills)
	svc, err := skills.New(skills.Config{Scratch: c.T.TempDir()}, skills.Deps{NATS: nc, Log: log, Logger: c.serviceLogger("skills")})
	requireNoError(c.T, err)
	return c.startService(nc, svc.Ready(), svc.Run)
}

// setSecretsKeys generates the key pair that encrypts secrets, and adds it to the configuration of gateways and
// executors.
func (c *Cluster) setSecretsKeys() {
	identity, recipient, err := secret.GenerateKeyPair()
	requireNoError(c.T, err)
	c.opts.Executor.SecretsKey, c.opts.Gateway.SecretsRecipient = identity, recipient
}

// PushSkill sends the ZIP of a skill to gateway 0. query is the query of the request's URL. PushSkill returns the
// status and the body of the response.
func (c *Cluster) PushSkill(zip []byte, query string) (int, []byte) {
	c.T.Helper()
	req, err := http.NewRequestWithContext(c.T.Context(), http.MethodPost, c.URL(0)+"/api/skills?"+query, bytes.NewReader(zip))
	requireNoError(c.T, err)
	req.Header.Set("Content-Type", "application/zip")
	res, err := http.DefaultClient.Do(req)
	requireNoError(c.T, err)
	defer res.Body.Close() //nolint:errcheck // the body is read
	raw, err := io.ReadAll(res.Body)
	requireNoError(c.T, err)
	return res.StatusCode, raw
}

// WrittenData returns everything that the cluster has written on this machine, by path or name: the files of NATS, of
// the egress proxy and of local sandboxes, and the logs of the services.
func (c *Cluster) WrittenData() map[string][]byte {
	c.T.Helper()
	out := map[string][]byte{"the logs of the services": c.said.bytes()}
	for _, dir := range []string{c.dir, c.egressDir} {
		if dir == "" {
			continue
		}
		requireNoError(c.T, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
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

// LogRecords returns the log records of the services, in the format of slog's JSONHandler, oldest first. It needs
// Options.KeepLogs.
func (c *Cluster) LogRecords() (records []map[string]any) {
	c.T.Helper()
	for line := range bytes.Lines(c.said.bytes()) {
		var r map[string]any
		if json.Unmarshal(line, &r) == nil { // the egress proxy may have written a part of a line
			records = append(records, r)
		}
	}
	return records
}

// logBuffer is a writer that keeps the log output of the services.
type logBuffer struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (r *logBuffer) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all.Write(p)
}

func (r *logBuffer) bytes() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return bytes.Clone(r.all.Bytes())
}
