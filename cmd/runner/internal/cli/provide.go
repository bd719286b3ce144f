package cli

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// provideTranscriptCommand is the command provide-transcript, which stores a transcript that a client uploaded in the
// state folder.
type provideTranscriptCommand struct {
	Trees  snapshotFolders `embed:""`
	SHA256 string          `name:"sha256" required:"" help:"SHA-256 of the transcript in hex."`
}

// Run writes the transcript from stdin atomically. An earlier attempt may have left symbolic links in the folder; Run
// follows none out of the state folder.
func (c *provideTranscriptCommand) Run(sys *System) error {
	place, err := prepareFolders(c.Trees.Workspace, c.Trees.State)
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(place.State)
	if err != nil {
		return fmt.Errorf("open the state folder: %w", err)
	}
	defer root.Close() //nolint:errcheck // every write was checked
	n, err := c.writeVerified(root, sys.Stdin)
	if err != nil {
		return withExitCode(fmt.Errorf("write the provided transcript: %w", err))
	}
	return sys.printJSON(map[string]any{"type": "transcript_provided", "bytes": n})
}

// writeVerified copies the transcript from the reader from into the state folder root, and returns the number of bytes.
// It returns an error if the SHA-256 does not match.
func (c *provideTranscriptCommand) writeVerified(root *os.Root, from io.Reader) (int64, error) {
	const tmp = agent.ProvidedTranscript + ".new"
	if err := errors.Join(root.MkdirAll(path.Dir(tmp), 0o700), root.RemoveAll(tmp)); err != nil {
		return 0, err
	}
	f, err := root.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(f, sum), from)
	if err = errors.Join(err, f.Close()); err == nil && hex.EncodeToString(sum.Sum(nil)) != c.SHA256 {
		err = errors.New("its SHA-256 does not match")
	}
	if err == nil {
		err = root.RemoveAll(agent.ProvidedTranscript)
	}
	if err == nil {
		err = root.Rename(tmp, agent.ProvidedTranscript)
	}
	if err != nil {
		return 0, errors.Join(err, root.RemoveAll(tmp))
	}
	return n, nil
}
