package main_test

import (
	"bytes"
	"io"
	"testing"

	modal "github.com/modal-labs/modal-client/go"
)

func TestExec_CarriesStreamsAndExitCodes(t *testing.T) {
	b := newBed(t)
	sb := b.create(&modal.SandboxCreateParams{BlockNetwork: true, Env: map[string]string{"COLOUR": "blue"}, Workdir: "/tmp"})
	out, errors, code := b.run(sb, "cat; echo $COLOUR $PWD; echo broken >&2; exit 7", "one\ntwo\n")
	if out != "one\ntwo\nblue /tmp\n" || errors != "broken\n" || code != 7 {
		t.Errorf("printed %q and %q, code %d", out, errors, code)
	}
	_, _, code = b.run(sb, "kill -TERM $$", "")
	if code != 128+15 {
		t.Errorf("a process that SIGTERM ended has code %d", code)
	}
	b.noViolations()
}

func TestExec_CarriesFiveMegabytesBothWays(t *testing.T) {
	b := newBed(t)
	sb := b.create(nil)
	sent := bytes.Repeat([]byte("0123456789abcde\n"), 5<<20/16)
	p, err := sb.Exec(b.ctx, []string{"cat"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for rest := sent; len(rest) > 0; {
			n := min(len(rest), 300_000)
			if _, err := p.Stdin.Write(rest[:n]); err != nil {
				t.Error(err)
			}
			rest = rest[n:]
		}
		if err := p.Stdin.Close(); err != nil {
			t.Error(err)
		}
	}()
	got, err := io.ReadAll(p.Stdout)
	if err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("%d bytes came back of %d, %v", len(got), len(sent), err)
	}
}
