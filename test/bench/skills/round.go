package main

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

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/test/bench/system"
)

const plain = "plain" // the agent without skills

const (
	scripts    = 5
	scriptSize = 20 << 10
)

// agent applies one of the built-in architecture.
func (b *bench) agent(ctx context.Context, slug string, skills []string) error {
	return b.client.Apply(ctx, "agents", slug, map[string]any{"architecture": "spool", "instructions": "Answer what you are asked.", "skills": skills})
}

// round pushes new skills and takes three first turns.
func (b *bench) round(ctx context.Context, n int, t *times) error {
	slug := fmt.Sprint("skilled-", n)
	var zips [][]byte
	var names []string
	for i := range b.skills {
		name := fmt.Sprintf("skill-%d-%d", n, i)
		z, err := b.pack(name)
		if err != nil {
			return err
		}
		if err := b.client.PushSkill(ctx, name, z); err != nil {
			return err
		}
		zips, names = append(zips, z), append(names, name)
	}
	if err := b.agent(ctx, slug, names); err != nil {
		return err
	}
	for _, m := range []struct {
		agent string
		into  *[]time.Duration
	}{{plain, &t.none}, {slug, &t.first}, {slug, &t.again}} {
		d, err := b.turn(ctx, m.agent)
		if err != nil {
			return fmt.Errorf("agent %s: %w", m.agent, err)
		}
		*m.into = append(*m.into, d)
	}
	d, err := unpack(filepath.Join(b.dir, slug), zips)
	t.unpacked = append(t.unpacked, d)
	return err
}

// pack makes a skill that no other is like.
func (b *bench) pack(name string) (_ []byte, err error) {
	dir := filepath.Join(b.dir, name)
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.MkdirAll(filepath.Join(dir, "scripts"), 0o750); err != nil {
		return nil, err
	}
	text := "---\nname: " + name + "\ndescription: Does one of many things.\n---\nRun scripts/0.\n"
	if err := os.WriteFile(filepath.Join(dir, "SKILL.md"), []byte(text), 0o600); err != nil {
		return nil, err
	}
	content := make([]byte, scriptSize)
	for i := range scripts {
		_, _ = rand.Read(content) // it never fails
		if err := os.WriteFile(filepath.Join(dir, "scripts", fmt.Sprint(i)), content, 0o600); err != nil {
			return nil, err
		}
	}
	var z bytes.Buffer
	err = skill.Pack(dir, &z, "")
	return z.Bytes(), err
}

// turn is a new session's first turn, from the message to the first text. The session is gone when it returns.
func (b *bench) turn(ctx context.Context, agent string) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, turnWithin)
	defer cancel()
	id, err := b.client.CreateOf(ctx, agent)
	if err != nil {
		return 0, err
	}
	socket, err := b.client.Join(ctx, id)
	if err != nil {
		return 0, err
	}
	defer socket.Close()
	failed := make(chan error, 1)
	posted := time.Now()
	go func() {
		// The text may come before the answer of REST does.
		_, err := b.client.Post(ctx, id, "hello")
		failed <- err
	}()
	at, err := firstText(ctx, socket)
	return at.Sub(posted), errors.Join(err, <-failed, b.sys.End(ctx, id))
}

// firstText reads to the turn's end and gives when its first text came.
func firstText(ctx context.Context, socket *system.Socket) (first time.Time, err error) {
	for {
		w, at, err := socket.Next(ctx)
		if err != nil {
			return first, err
		}
		s, ok, err := system.TextOf(w)
		if err != nil {
			return first, err
		}
		if ok && s.Piece != "" && first.IsZero() {
			first = at
		}
		switch {
		case !events.Terminal(w.Type):
		case w.Type != (events.ExecutionCompleted{}).EventType() || first.IsZero():
			return first, fmt.Errorf("it ended with %s: %s", w.Type, w.Data)
		default:
			return first, nil
		}
	}
}

// unpack writes the files of ZIPs into a folder, as any program would, and removes it.
func unpack(dir string, zips [][]byte) (took time.Duration, err error) {
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	began := time.Now()
	for i, z := range zips {
		r, err := zip.NewReader(bytes.NewReader(z), int64(len(z)))
		if err != nil {
			return 0, err
		}
		for _, f := range r.File {
			if err := extract(filepath.Join(dir, fmt.Sprint(i), filepath.Clean("/"+f.Name)), f); err != nil {
				return 0, err
			}
		}
	}
	return time.Since(began), nil
}

func extract(path string, f *zip.File) error {
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
