package idle

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/test/bench/system"
)

// socketsCommand is the hidden subcommand with which the benchmark starts its own program again. It stops at the end of its
// input.
const socketsCommand = "idle-sockets"

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
