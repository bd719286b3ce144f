package skills

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/test/bench/system"
)

// plainAgent is the slug of the agent without skills.
const plainAgent = "plain"

// Each skill has this number of scripts of this size in bytes.
const (
	// scriptsPerSkill is the number of script files of each skill.
	scriptsPerSkill = 5
	// scriptBytes is the size, in bytes, of each script file of a skill.
	scriptBytes = 20 << 10
)

// applyAgent creates an agent with the given slug, the architecture spool and the given skills in the catalogue.
func (s *testbed) applyAgent(ctx context.Context, slug string, skills []string) error {
	return s.client.ApplyDefinition(ctx, "agents", slug, map[string]any{"architecture": "spool", "instructions": "Answer the question.", "skills": skills})
}

// runRound pushes new skills and takes the first turn of three sessions: without skills, with the new skills, and with
// the same skills again. It adds their durations to t. n is the number of the round.
func (s *testbed) runRound(ctx context.Context, n int, t *roundTimes) error {
	slug := fmt.Sprint("skilled-", n)
	var zips [][]byte
	var names []string
	for i := range s.skills {
		name := fmt.Sprintf("skill-%d-%d", n, i)
		z, err := s.packSkill(name)
		if err != nil {
			return err
		}
		if err := s.client.PushSkill(ctx, name, z); err != nil {
			return err
		}
		zips, names = append(zips, z), append(names, name)
	}
	if err := s.applyAgent(ctx, slug, names); err != nil {
		return err
	}
	for _, m := range []struct {
		agent string
		into  *[]time.Duration
	}{{plainAgent, &t.none}, {slug, &t.first}, {slug, &t.again}} {
		d, err := s.timeFirstTurn(ctx, m.agent)
		if err != nil {
			return fmt.Errorf("agent %s: %w", m.agent, err)
		}
		*m.into = append(*m.into, d)
	}
	d, err := timeUnpacking(filepath.Join(s.dir, slug), zips)
	t.unpacked = append(t.unpacked, d)
	return err
}

// packSkill returns the ZIP of a skill with the given name and random content.
func (s *testbed) packSkill(name string) (_ []byte, err error) {
	dir := filepath.Join(s.dir, name)
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.MkdirAll(filepath.Join(dir, "scripts"), 0o750); err != nil {
		return nil, err
	}
	text := "---\nname: " + name + "\ndescription: Does one of many things.\n---\nRun scripts/0.\n"
	if err := os.WriteFile(filepath.Join(dir, "SKILL.md"), []byte(text), 0o600); err != nil {
		return nil, err
	}
	content := make([]byte, scriptBytes)
	for i := range scriptsPerSkill {
		_, _ = rand.Read(content) // never fails
		if err := os.WriteFile(filepath.Join(dir, "scripts", fmt.Sprint(i)), content, 0o600); err != nil {
			return nil, err
		}
	}
	var z bytes.Buffer
	err = skill.PackFolder(dir, &z, "")
	return z.Bytes(), err
}

// timeFirstTurn creates a session of an agent, takes its first turn and deletes the session. It returns the time from
// the message to the first text.
func (s *testbed) timeFirstTurn(ctx context.Context, agent string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	id, err := s.client.CreateSession(ctx, system.SessionSpec{Agent: agent})
	if err != nil {
		return 0, err
	}
	socket, err := s.client.JoinSession(ctx, id)
	if err != nil {
		return 0, err
	}
	defer socket.Close()
	t, err := s.client.TakeTurn(ctx, socket, id, "hello", nil)
	return t.Latency(), errors.Join(err, s.sys.DeleteAndAwaitEnd(ctx, id))
}

// timeUnpacking unpacks ZIPs into the folder dir, removes the folder, and returns the time that the unpacking took.
func timeUnpacking(dir string, zips [][]byte) (took time.Duration, err error) {
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	started := time.Now()
	for i, z := range zips {
		r, err := zip.NewReader(bytes.NewReader(z), int64(len(z)))
		if err != nil {
			return 0, err
		}
		for _, f := range r.File {
			if err := extractEntry(filepath.Join(dir, fmt.Sprint(i), filepath.Clean("/"+f.Name)), f); err != nil {
				return 0, err
			}
		}
	}
	return time.Since(started), nil
}

// extractEntry writes the entry f of a ZIP, a file or a folder, to a path.
func extractEntry(path string, f *zip.File) error {
	if f.FileInfo().IsDir() {
		return os.MkdirAll(path, 0o750)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return err
	}
	in, err := f.Open()
	if err != nil {
		return err
	}
	content, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o600)
}
