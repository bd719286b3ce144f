package harness

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/natsserver"
)

// natsSubcommand is the hidden subcommand of the benchmark program that runs a NATS server; see NATSCommand.
const natsSubcommand = "nats"

// NATSCommand is the hidden subcommand nats of the benchmark program. It runs a NATS server without users, and prints
// the server's URL.
type NATSCommand struct {
	Folder  string `arg:"" help:"Folder for the data."`
	Relaxed bool   `help:"Sync files by a timer instead of after every message."`
}

// Run runs the server until the standard input ends. kong, the parser of the command line, calls it.
func (c *NATSCommand) Run() error {
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

// StartNATSProcess starts a NATS server in a process of its own, and returns its URL, for system.Config.NATSURL, and
// its process id. With relaxed, the server does not sync every message to the disk.
func (b *Bench) StartNATSProcess(relaxed bool) (url string, pid int, err error) {
	arguments := []string{b.Dir}
	if relaxed {
		arguments = append(arguments, "--relaxed")
	}
	return b.StartChild(nil, natsSubcommand, arguments...)
}
