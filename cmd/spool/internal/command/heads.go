package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
)

type headsCommand struct {
	PublicKey headsPublicKeyCommand `cmd:"" help:"Print the public key for the key that signs the heads of the log."`
}

type headsPublicKeyCommand struct {
	Key     string `name:"heads-key" env:"SPOOL_HEADS_KEY" placeholder:"SEED" help:"The private key of the session service: 64 hexadecimal digits."`
	KeyFile string `name:"heads-key-file" env:"SPOOL_HEADS_KEY_FILE" placeholder:"FILE" help:"File of the private key, such as heads.key in the data folder."`
}

// Run prints the public key that verifies the signed heads of the log.
func (c *headsPublicKeyCommand) Run(a *app) error {
	text := c.Key
	switch {
	case (c.Key == "") == (c.KeyFile == ""):
		return usageError("heads-key: set the private key, or its file with --heads-key-file")
	case c.KeyFile != "":
		b, err := os.ReadFile(c.KeyFile)
		if err != nil {
			return fmt.Errorf("heads-key-file: %w", err)
		}
		text = string(b)
	}
	key, err := heads.ParsePrivateKey(text)
	if err != nil {
		return fmt.Errorf("heads-key: %w", err)
	}
	_, err = terminal.Fprintln(a.Out, key.Public())
	return err
}

// readSignedHeads returns the signed heads of the log, or nil if the command has no public key.
func (c *verifyCommand) readSignedHeads(ctx context.Context, inst Installation) ([]*heads.Chain, error) {
	var keys []heads.PublicKey
	for _, file := range c.PublicKey {
		more, err := readPublicKeys(file)
		if err != nil {
			return nil, err
		}
		keys = append(keys, more...)
	}
	if len(keys) == 0 {
		return nil, nil
	}
	js, err := jetstream.New(inst.NATS)
	if err != nil {
		return nil, fmt.Errorf("jetstream: %w", err)
	}
	chains, err := jslog.ReadHeads(ctx, js, inst.Log.Shards(), keys...)
	var unknown *heads.UnknownKeyError
	if errors.As(err, &unknown) {
		return nil, fmt.Errorf("public-key: %w: add the file of that key, or find out who signed with another key", err)
	}
	return chains, err
}

// readPublicKeys reads a file that contains at least one public key.
func readPublicKeys(file string) ([]heads.PublicKey, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("public-key: %w", err)
	}
	var keys []heads.PublicKey
	for _, line := range strings.Fields(string(text)) {
		key, err := heads.ParsePublicKey(line)
		if err != nil {
			return nil, fmt.Errorf("public-key: a line of %s %w", file, err)
		}
		keys = append(keys, key)
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("public-key: %s holds no key", file)
	}
	return keys, nil
}

// signedShard states up to which commit the signed heads of a shard cover the log.
type signedShard struct {
	Shard     int       `json:"shard"`
	Position  string    `json:"position"`      // position up to which the signed heads cover every commit
	Time      time.Time `json:"time,omitzero"` // time of the signature at this position; absent if there is none
	Entries   uint64    `json:"entries"`
	LastEntry string    `json:"lastEntry"` // SHA-256 of the last entry
}

// describeSignedShards returns for each shard how far its signed heads reach.
func describeSignedShards(chains []*heads.Chain) []signedShard {
	var list []signedShard
	for _, c := range chains {
		through, at := c.ProvedThrough()
		n, hash, _ := c.LastEntry()
		list = append(list, signedShard{c.Shard(), eventlog.Position{Shard: c.Shard(), Seq: through}.String(), at, n, hash})
	}
	return list
}

// printSignedShards prints for each shard how far its signed heads reach.
func printSignedShards(w io.Writer, chains []*heads.Chain) error {
	for i, p := range describeSignedShards(chains) {
		_, _, last := chains[i].LastEntry()
		text := fmt.Sprintf("shard %d: the last of %d entries was signed at %s and has the hash %s; ", p.Shard, p.Entries, last.UTC().Format(time.RFC3339), p.LastEntry)
		switch {
		case p.Entries == 0:
			text = fmt.Sprintf("shard %d: no heads are signed\n", p.Shard)
		case p.Time.IsZero():
			text += "no entry covers all changes yet\n"
		default:
			text += fmt.Sprintf("no commit is missing up to %s, signed at %s\n", p.Position, p.Time.UTC().Format(time.RFC3339))
		}
		if _, err := terminal.Fprintf(w, "%s", terminal.Lines(text)); err != nil {
			return err
		}
	}
	return nil
}
