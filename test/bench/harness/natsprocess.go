package harness

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/natsserver"
)

// NATSCommand is the hidden subcommand that runs NATSProcess.
const NATSCommand = "nats"

// NATSProcess is the subcommand nats. It runs a server without users and prints the server's URL.
type NATSProcess struct {
	Folder  string `arg:"" help:"Folder for the data."`
	Relaxed bool   `help:"Sync files by a timer instead of after every message."`
}

// Run is called by kong.
func (c *NATSProcess) Run() error {
	srv, err := natsserver.Start(natsserver.Config{StoreDir: filepath.Join(c.Folder, "nats"), Port: natsserver.RandomPort, Relaxed: c.Relaxed})
	if err != nil {
		return err
	}
	defer srv.Shutdown()
	if _, err := fmt.Println(srv.ClientURL()); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// StartNATS starts NATS in a process of its own, for system.Config.NATSURL.
func (b *Bench) StartNATS(relaxed bool) (url string, pid int, err error) {
	arguments := []string{b.Dir}
	if relaxed {
		arguments = append(arguments, "--relaxed")
	}
	return b.StartChild(nil, NATSCommand, arguments...)
}
