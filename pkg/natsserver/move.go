package natsserver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/topology"
)

// globalAccount is the NATS account of a server without accounts. Earlier releases kept the streams in it.
const globalAccount = "$G"

// moveStreamsToAccount moves the streams of an earlier release into the NATS account that now owns JetStream. It is a
// single rename, so a crash leaves it done or not done, and it does nothing the second time. deploy/nats-start does the
// same for containers.
func moveStreamsToAccount(dir string) error {
	root := filepath.Join(dir, "jetstream")
	from, to := filepath.Join(root, globalAccount), filepath.Join(root, topology.AccountLog)
	if _, err := os.Lstat(from); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("nats: look for streams of an earlier release: %w", err)
	}
	if _, err := os.Lstat(to); err == nil {
		return fmt.Errorf("nats: both %s and %s contain streams, of an earlier release and of this one: move the folder without your data elsewhere", from, to)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("nats: look for streams: %w", err)
	}
	if err := os.Rename(from, to); err != nil {
		return fmt.Errorf("nats: move streams of an earlier release: %w", err)
	}
	return syncDir(root)
}

// syncDir syncs a folder to disk, so that a rename inside of it is durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("nats: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("nats: sync %s: %w", dir, err)
	}
	return nil
}
