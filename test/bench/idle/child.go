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

// socketsSubcommand is the name of the hidden subcommand SocketsCommand. The benchmark runs it in a child process.
const socketsSubcommand = "idle-sockets"

// SocketsCommand is the hidden subcommand idle-sockets of the benchmark program. It reads ids of sessions from its
// input, up to an empty line, joins each session over a WebSocket, prints a line, and keeps the WebSockets until its
// input ends.
type SocketsCommand struct {
	URL string `arg:"" help:"URL of the gateway."`
}

// Run runs the subcommand. kong, the parser of the command line, calls it.
func (c *SocketsCommand) Run(ctx context.Context) error {
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
		group.Go(func() error { return openIdleSocket(ctx, client, id) })
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

// openIdleSocket joins a session over a WebSocket and reads the events that the session has so far. Then a goroutine
// keeps the WebSocket until the process ends.
func openIdleSocket(ctx context.Context, client *system.Client, session string) error {
	joining, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	s, err := client.JoinSession(joining, session)
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
