// Command record creates the data that test/compat opens. It runs a released build of spool, uses each of its
// functions, stops it, and stores the data folder with a manifest of what the build showed. test/compat/README.md
// describes how to call it.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/test/compat"
)

func main() {
	spool := flag.String("spool", "", "the released build's `program`, with its runner beside it")
	commit := flag.String("commit", "", "the `commit` that it was built from")
	script := flag.String("script", "cmd/mockllm/server/default.yaml", "mockllm's default script of that commit, a `file`")
	out := flag.String("out", "", "`folder` to write data.tar.gz and manifest.json.gz into")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	if err := recordData(ctx, *spool, *commit, *script, *out); err != nil {
		fmt.Fprintln(os.Stderr, "record:", err)
		os.Exit(1) //nolint:gocritic // no deferred call is left to run
	}
}

// recordData runs the released build whose program is at the path spool, creates sessions in it, and writes the data
// folder and a description of it into the folder out. commit names the commit of the build; script is the path of
// mockllm's script.
func recordData(ctx context.Context, spool, commit, script, out string) error {
	if spool == "" || commit == "" || out == "" {
		return errors.New("name -spool, -commit and -out")
	}
	dir := "/tmp/spool-recorded-" + commit
	// Postgres may run as another user, who must reach its folder.
	if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // see above
		return err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary folder
	own, err := os.ReadFile(script)
	if err != nil {
		return err
	}
	script = filepath.Join(dir, "script.yaml")
	if err := os.WriteFile(script, bytes.Replace(own, []byte("\nrules:\n"), []byte("\nrules:\n"+mockllmRules), 1), 0o600); err != nil {
		return err
	}
	w := &recorder{dir: dir, manifest: compat.Recording{Commit: commit, Folder: dir, RootKey: "dummy-root-key-of-the-recording-0000", Secret: tokenSecret}}
	data := filepath.Join(dir, "data")
	cfg := compat.Config{Spool: spool, Data: data, Script: script, RootKey: w.manifest.RootKey}
	if w.Server, err = compat.StartServer(ctx, cfg); err != nil {
		return err
	}
	if err := w.createAllSessions(); err != nil {
		return errors.Join(err, w.Stop())
	}
	if err := w.Stop(); err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil { //nolint:gosec // the folder is part of the repository
		return err
	}
	if err := trimWAL(ctx, filepath.Join(data, "postgres", "cluster"), filepath.Join(dir, "trimmed")); err != nil {
		return err
	}
	if err := packData(data, filepath.Join(out, "data.tar.gz")); err != nil {
		return err
	}
	if err := w.readLog(ctx, data); err != nil {
		return err
	}
	// The build opens the data again to show it.
	if w.Server, err = compat.StartServer(ctx, cfg); err != nil {
		return err
	}
	if err := errors.Join(w.readSessions(), w.Stop()); err != nil {
		return err
	}
	return writeGzip(filepath.Join(out, "manifest.json.gz"), func(to io.Writer) error { return json.NewEncoder(to).Encode(w.manifest) })
}

// writeGzip creates a gzip file at path with the content that the function content writes.
func writeGzip(path string, content func(io.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	z, err := gzip.NewWriterLevel(f, gzip.BestCompression)
	if err != nil {
		return errors.Join(err, f.Close())
	}
	return errors.Join(content(z), z.Close(), f.Close())
}

// trimWAL replaces the write-ahead log of a Postgres data folder, cluster, by an empty one, to save space. Postgres
// must have been shut down cleanly, so that it does not need the log. During the call the folder is at the path
// temporary, which its owner can reach.
func trimWAL(ctx context.Context, cluster, temporary string) error {
	initdb, err := exec.LookPath("initdb")
	if err != nil {
		return err
	}
	if initdb, err = filepath.EvalSymlinks(initdb); err != nil {
		return err
	}
	info, err := os.Stat(cluster)
	if err != nil {
		return err
	}
	if err := os.Rename(cluster, temporary); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(initdb), "pg_resetwal"), "-D", temporary)
	if owner, ok := info.Sys().(*syscall.Stat_t); ok && os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("pg_resetwal: %w: %s", err, out)
	}
	return os.Rename(temporary, cluster)
}

// packData writes a data folder into an archive at path. It leaves out the files that are valid only while Spool runs
// on this machine. Spool must have been stopped.
func packData(data, path string) error {
	return writeGzip(path, func(to io.Writer) error {
		t := tar.NewWriter(to)
		err := filepath.WalkDir(data, func(p string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			name, err := filepath.Rel(data, p)
			if err != nil {
				return err
			}
			if isTransient(name) || !d.IsDir() && !d.Type().IsRegular() && d.Type() != fs.ModeSymlink {
				return nil
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			link := ""
			if d.Type() == fs.ModeSymlink {
				if link, err = os.Readlink(p); err != nil {
					return err
				}
			}
			h, err := tar.FileInfoHeader(info, link)
			if err != nil {
				return err
			}
			h.Name, h.Uid, h.Gid, h.Uname, h.Gname = filepath.ToSlash(name), 0, 0, "", ""
			if err := t.WriteHeader(h); err != nil || !d.Type().IsRegular() {
				return err
			}
			f, err := os.Open(p) //nolint:gosec // the walk stays in the folder
			if err != nil {
				return err
			}
			_, err = io.Copy(t, f)
			return errors.Join(err, f.Close())
		})
		return errors.Join(err, t.Close())
	})
}

// isTransient reports whether a file of a data folder is valid only while Spool runs, such as a lock, a socket or a
// process id.
func isTransient(name string) bool {
	switch base := filepath.Base(name); base {
	case "lock", "spool.json", "postmaster.pid", "postmaster.opts":
		return true
	default:
		return strings.HasSuffix(base, ".sock") || strings.HasSuffix(base, ".pid")
	}
}

// readLog adds a description of every message in the stream EVENTS-0 of a data folder to the recording.
func (w *recorder) readLog(ctx context.Context, data string) (err error) {
	// The server writes to the folder that it opens, so it gets a copy.
	copied := filepath.Join(w.dir, "copy")
	if out, err := exec.CommandContext(ctx, "cp", "-a", filepath.Join(data, "nats"), copied).CombinedOutput(); err != nil {
		return fmt.Errorf("copy the data folder: %w: %s", err, out)
	}
	srv, err := natsserver.Start(natsserver.Config{StoreDir: copied, Relaxed: true, Accounts: true})
	if err != nil {
		return err
	}
	defer srv.Shutdown()
	nc, err := srv.ConnectAs(topology.UserAdmin)
	if err != nil {
		return err
	}
	defer nc.Close()
	w.manifest.Log, err = compat.ReadLog(ctx, nc, func(seq uint64, message []byte) {
		if bytes.Contains(message, []byte(`"life":4294967295`)) {
			w.manifest.Uncounted = append(w.manifest.Uncounted, seq)
		}
	})
	if n := len(w.manifest.Log); n > 0 {
		w.manifest.Last = w.manifest.Log[n-1].Seq
	}
	return err
}

// readSessions adds what the REST API returns about all sessions to the recording, up to the last commit in the
// recorded log.
func (w *recorder) readSessions() error {
	if err := w.awaitReadModels(); err != nil {
		return err
	}
	listed := map[string]json.RawMessage{}
	for _, key := range w.manifest.Keys {
		var page struct{ Sessions []json.RawMessage }
		if err := w.CallAPI(key, "GET", "/api/sessions?pageSize=200", nil, &page); err != nil {
			return err
		}
		for _, s := range page.Sessions {
			var id struct{ SessionID string }
			if err := json.Unmarshal(s, &id); err != nil {
				return err
			}
			listed[id.SessionID] = s
		}
	}
	for i := range w.manifest.Sessions {
		s := &w.manifest.Sessions[i]
		if s.Deleted {
			continue
		}
		if s.Listed = listed[s.ID]; s.Listed == nil {
			return fmt.Errorf("session %s (%s) is not listed", s.ID, s.Name)
		}
		if err := w.readSession(s); err != nil {
			return fmt.Errorf("session %s (%s): %w", s.ID, s.Name, err)
		}
	}
	return nil
}

// awaitReadModels waits until the read models have the last recorded commit of every session.
func (w *recorder) awaitReadModels() error {
	last := map[string]uint64{} // by session id
	for _, c := range w.manifest.Log {
		last[strings.Split(c.Subject, ".")[3]] = c.Seq
	}
	for _, s := range w.manifest.Sessions {
		if s.Deleted {
			continue
		}
		if err := w.CallAPI(w.manifest.Keys[s.Tenant], "GET", fmt.Sprintf("/api/sessions/%s?minPosition=0-%d", s.ID, last[s.ID]), nil, nil); err != nil {
			return err
		}
	}
	return nil
}

// readSession adds what the REST API returns about the session s to s.
func (w *recorder) readSession(s *compat.RecordedSession) error {
	key, path := w.manifest.Keys[s.Tenant], "/api/sessions/"+s.ID
	var x struct{ Executions []json.RawMessage }
	var b struct{ Blocks []json.RawMessage }
	var f struct{ Files []struct{ Path string } }
	if err := errors.Join(w.CallAPI(key, "GET", path+"/executions?pageSize=200", nil, &x), w.CallAPI(key, "GET", path+"/blocks", nil, &b)); err != nil {
		return err
	}
	var refused *compat.StatusError
	if err := w.CallAPI(key, "GET", path+"/files", nil, &f); err != nil && (!errors.As(err, &refused) || refused.Status != http.StatusNotFound) {
		return err // 404: the session has no snapshot
	}
	s.Executions, s.Blocks = x.Executions, b.Blocks
	for _, file := range f.Files {
		s.Files = append(s.Files, file.Path)
	}
	for after := uint32(0); ; {
		var page struct {
			Events    []events.WireEvent
			Tip, Next uint32
		}
		if err := w.CallAPI(key, "GET", fmt.Sprintf("%s/events?limit=1000&after=%d", path, after), nil, &page); err != nil {
			return err
		}
		for _, e := range page.Events {
			seq, err := compat.StreamSequence(e.Position)
			if err != nil {
				return err
			}
			if seq <= w.manifest.Last { // later events belong to the second start
				s.Events = append(s.Events, e)
			}
		}
		if after = page.Next; after >= page.Tip {
			return nil
		}
	}
}
