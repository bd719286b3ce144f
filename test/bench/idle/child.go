package idle

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/system"
)

// The hidden subcommands with which the benchmark starts its own program again. They stop at the end of their input.
const (
	natsCommand    = "idle-nats"
	socketsCommand = "idle-sockets"
)

// startChild starts this program with a subcommand and its argument, writes lines to its input, and returns the one line
// that it prints. The process stops at the end of the benchmark.
func startChild(b *harness.Bench, subcommand, argument string, lines []string) (printed string, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	cmd := exec.Command(self, subcommand, argument) //nolint:gosec // this program
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return "", err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	b.Cleanup(func() error { return errors.Join(in.Close(), cmd.Wait()) })
	if len(lines) > 0 {
		_, err = io.WriteString(in, strings.Join(lines, "\n")+"\n\n")
	}
	if err == nil {
		printed, err = bufio.NewReader(out).ReadString('\n')
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", subcommand, err)
	}
	return strings.TrimSpace(printed), nil
}

// NATS is the subcommand idle-nats. It runs a server and prints the server's URL.
type NATS struct {
	Folder string `arg:"" help:"Folder for the data."`
}

// Run is called by kong. The server syncs its files by its timer, because the creation of sessions is not measured.
func (c *NATS) Run() error {
	srv, err := natsserver.Start(natsserver.Config{StoreDir: filepath.Join(c.Folder, "nats"), Port: natsserver.RandomPort, Relaxed: true})
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

// Sockets is the subcommand idle-sockets. It reads the ids of sessions from its input, up to an empty line, joins them
// and prints a line.
type Sockets struct {
	URL string `arg:"" help:"URL of the gateway."`
}

// Run is called by kong.
func (c *Sockets) Run(ctx context.Context) error {
	in := bufio.NewReader(os.Stdin)
	client := system.NewClient(c.URL)
	var group errgroup.Group
	group.SetLimit(16)
	for {
		id, err := in.ReadString('\n')
		if err != nil {
			return err
		}
		if id = strings.TrimSpace(id); id == "" {
			break
		}
		group.Go(func() error { return openSocket(ctx, client, id) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if _, err := fmt.Println("joined"); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, in)
	return err
}

// openSocket joins a session and reads its events so far. Then a goroutine keeps the WebSocket until the process ends.
func openSocket(ctx context.Context, client *system.Client, session string) error {
	joining, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	s, err := client.Join(joining, session)
	if err != nil {
		return err
	}
	for seq := uint32(0); seq < s.Tip; {
		w, _, err := s.Next(joining)
		if err != nil {
			return err
		}
		seq = w.Seq
	}
	go func() { // answers pings
		defer s.Close()
		_, _, _ = s.Next(ctx)
	}()
	return nil
}
